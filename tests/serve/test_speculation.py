"""Settings of speculative decoding, the drafters for diagnosis, and the check at the start."""

import importlib
from typing import Any

import jax.numpy as jnp
import pytest

from serve import Engine
from serve.engine_config import EngineConfig
from serve.self_check import SelfCheckError
from serve.speculation import Debug
from tests import tiny_models

PROMPTS = [[5, 6, 7] * 9, list(range(40))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_algorithm": "DFLASH"}, "DFLASH is not supported; DSPARK is"),
        ({"speculative_algorithm": "LOOKAHEAD"}, "must be one of .*NEXTN.*, got 'LOOKAHEAD'"),
        ({"speculative_num_draft_tokens": 4}, "needs a speculative_algorithm"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 18},
            r"must be in \[2, 17\], got 18; it counts the target's own token",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1},
            r"must be in \[2, 17\]",
        ),
        ({"speculative_debug": "accept"}, "must be reject, accept:N, .* got 'accept'"),
        ({"speculative_debug": "oracle:3"}, "got 'oracle:3'"),
        ({"speculative_debug": "adversarial:-1"}, "got 'adversarial:-1'"),
        ({"speculative_adaptive": 1}, "speculative_adaptive must be True or False, got 1"),
    ],
)
def test_settings_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ({}, 1),
        ({"speculative_algorithm": "mtp"}, 4),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 17}, 17),
        ({"speculative_debug": "reject", "speculative_num_draft_tokens": 2}, 2),
    ],
)
def test_windows_count_the_targets_own_token(arguments, window):
    config = EngineConfig(max_running_requests=3, **arguments)
    assert config.window == window
    assert config.row_buckets[0] >= 3 * window


def test_debug_is_read():
    assert Debug.parse("accept:3") == Debug("accept", 3)
    assert Debug.parse("adversarial:0") == Debug("adversarial", 0)
    assert Debug.parse("random") == Debug("random")


def start(directory, **arguments) -> Engine:
    return Engine(
        directory,
        load_format="dummy",
        dtype="float32",
        max_running_requests=2,
        chunked_prefill_size=16,
        context_length=120,
        sampling_defaults="openai",
        speculative_num_draft_tokens=4,
        **arguments,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = tiny_models.two_layers("q35_dense")
    return tiny_models.write_with_tokenizer(tmp_path_factory.mktemp("model"), config)


def histogram_of(result: Any) -> list[int]:
    return result["meta_info"]["spec_correct_drafts_histogram"]


# Rounds by accepted drafts of an output of 25 tokens; the second time round for those that replay.
EXPECTED = {
    "reject": [24],
    "accept:2": [0, 0, 8],
    "oracle": [0, 0, 0, 6],
    "adversarial:1": [0, 12],
}


@pytest.mark.parametrize("debug", [*EXPECTED, "random"])
def test_drafters_for_diagnosis(directory, debug):
    params = {"temperature": 0, "max_new_tokens": 25, "ignore_eos": True}
    with start(directory, speculative_debug=debug) as engine:
        first = engine.generate(input_ids=PROMPTS, sampling_params=params)
        again = engine.generate(input_ids=PROMPTS, sampling_params=params)
        info = engine.get_server_info()
    if debug != "accept:2":
        assert [a["output_ids"] for a in first] == [b["output_ids"] for b in again]
    for result in again:
        if debug == "random":
            assert sum(histogram_of(result)) > 20
        else:
            assert histogram_of(result) == EXPECTED[debug]
    rounds = sum(r["meta_info"]["spec_verify_ct"] for r in [*first, *again])
    assert info["spec_verify_calls_total"] == rounds
    assert info["num_late_compiles"] == 0


def test_prompt_lookup_and_adaptive_length(directory):
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "logit_bias": {"9": 50}}
    arguments = {"speculative_algorithm": "NGRAM"}
    with (
        start(directory, **arguments) as fixed,
        start(directory, speculative_adaptive=True, **arguments) as adaptive,
    ):
        # A text of one token, which prompt lookup gets right.
        engines: tuple[Any, Any] = fixed, adaptive
        a, b = (e.generate(input_ids=PROMPTS, sampling_params=params) for e in engines)
    assert [r["output_ids"] for r in a] == [r["output_ids"] for r in b] == [[9] * 60] * 2
    assert all(r["meta_info"]["spec_accept_length"] > 3 for r in a)


def test_an_engine_does_not_start_where_drafts_change_bits(directory, monkeypatch):
    # What the rows of a window sample depends on how many there are.
    step_module = importlib.import_module("spec.step")
    choose = step_module.choose_tokens

    def wrong(bound, x, rows, *more):
        factor = jnp.where(rows.num_rows > 2, 1.5, 1.0).astype(x.dtype)
        return choose(bound, x * factor + (factor - 1), rows, *more)

    monkeypatch.setattr(step_module, "choose_tokens", wrong)
    with pytest.raises(SelfCheckError, match="speculative decoding changes output_"):
        start(directory, speculative_debug="oracle", compilation_cache_dir=None)
    start(
        directory,
        speculative_debug="oracle",
        disable_self_check=True,
        compilation_cache_dir=None,
    ).shutdown()
