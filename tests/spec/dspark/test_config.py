"""Configs of draft models: block kinds, taps, and the target they belong to."""

import dataclasses
from typing import Any

import pytest

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dspark_config import DSparkConfig, default_taps
from tests.spec.dspark.cases import CASES, COMMON
from tests.vector_configs import hf_config

VANILLA = CASES["vanilla"]


def test_block_kinds():
    assert DSparkConfig.from_hf(VANILLA).num_rows == 7
    assert DSparkConfig.from_hf(CASES["rnn"]).num_rows == 4
    gated = DSparkConfig.from_hf(CASES["gated"])
    assert (gated.layer_is_causal, gated.layer_windows) == ((True, False), (21, None))
    explicit = DSparkConfig.from_hf(CASES["gated"] | {"is_causal": False})
    assert explicit.layer_is_causal == (False, False)


def test_other_spellings():
    renamed = dict(VANILLA)
    for key in ("block_size", "target_layer_ids"):
        renamed[f"dspark_{key}"] = renamed.pop(key)
    renamed["dspark_noise_token_id"] = renamed.pop("mask_token_id")
    assert DSparkConfig.from_hf(renamed) == DSparkConfig.from_hf(VANILLA)


def test_default_taps():
    # The example of Qwen3-4B, and one layer.
    assert default_taps(5, 36) == (1, 9, 17, 25, 33)
    assert default_taps(1, 36) == (18,)
    absent = {key: value for key, value in VANILLA.items() if key != "target_layer_ids"}
    assert DSparkConfig.from_hf(absent | {"num_target_layers": 8}).target_layer_ids == (1, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 17}, "block_size must be at most 16; got block_size=17"),
        ({"block_size": 0}, "block_size"),
        ({"target_layer_ids": [2, 0]}, "target_layer_ids must ascend"),
        ({"target_layer_ids": [-2]}, "target_layer_ids must ascend"),
        ({"target_layer_ids": []}, "target_layer_ids must ascend"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"layer_types": ["full_attention"]}, "layer_is_causal needs one value a layer"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types must be"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"confidence_temperatures": [1.0]}, "confidence_temperatures needs"),
        ({"confidence_temperatures": [0.0] * 7}, "confidence_temperatures needs"),
        ({"target_stream_reduction": "first"}, "target_stream_reduction must be one of mean"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2,
                    "mscale": 1,
                    "original_max_position_embeddings": 64,
                }
            },
            "rope_scaling.mscale is not supported",
        ),
    ],
)
def test_broken_configs_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_hf(VANILLA | changes)


def test_target_must_fit():
    target = HybridConfig.from_hf(hf_config("q35_dense"))
    streams = HybridConfig.from_hf(hf_config("q4_all"))

    def draft_for(config: HybridConfig, **changes) -> DSparkConfig:
        keys = {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_target_layers": config.num_layers,
            "mask_token_id": 0,
            "target_layer_ids": [0],
        }
        return DSparkConfig.from_hf(VANILLA | keys | changes)

    draft_for(target).check_target(target)
    draft_for(streams, target_stream_reduction="mean").check_target(streams)
    for changes in ({"hidden_size": 48}, {"vocab_size": 7}, {"num_target_layers": 9}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} of draft and target differ"):
            draft_for(target, **changes).check_target(target)
    with pytest.raises(ValueError, match="target_streams=4"):
        draft_for(streams).check_target(streams)
    with pytest.raises(ValueError, match="target_streams=1"):
        draft_for(target, target_stream_reduction="mean").check_target(target)


def test_configs_are_hashable():
    # They are static arguments of jitted functions.
    config = DSparkConfig.from_hf(COMMON | {"block_size": 2})
    assert hash(config) == hash(dataclasses.replace(config))
