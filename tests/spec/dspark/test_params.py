"""Parameters of draft models: the published layout, round trips, and what broken files say."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pallas_kernels.dense import InputMajor
from qwen_hybrid.checkpoint_files import CheckpointError
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.params import leaves, num_bytes, num_params
from spec.dspark import dspark_specs, load_draft, prepare_draft, read_draft_config, save_draft
from tests.spec.dspark.cases import CASES, Case
from tests.vector_configs import hf_config

PUBLISHED = "RadixArk-Qwen3.8-27B-DSpark"
# From the header of the published file: 62 tensors of 1,857,358,337 elements.
PUBLISHED_LAYER = {
    "input_layernorm.weight": (5120,),
    "post_attention_layernorm.weight": (5120,),
    "self_attn.q_proj.weight": (4096, 5120),
    "self_attn.k_proj.weight": (1024, 5120),
    "self_attn.v_proj.weight": (1024, 5120),
    "self_attn.o_proj.weight": (5120, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "mlp.gate_proj.weight": (17408, 5120),
    "mlp.up_proj.weight": (17408, 5120),
    "mlp.down_proj.weight": (5120, 17408),
}
PUBLISHED_TENSORS = {
    "fc.weight": (5120, 25600),
    "hidden_norm.weight": (5120,),
    "norm.weight": (5120,),
    "markov_head.markov_w1.weight": (248320, 256),
    "markov_head.markov_w2.weight": (248320, 256),
    "confidence_head.proj.weight": (1, 5376),
    "confidence_head.proj.bias": (1,),
} | {
    f"layers.{index}.{name}": shape for index in range(5) for name, shape in PUBLISHED_LAYER.items()
}


def test_published_layout():
    specs = dspark_specs(DSparkConfig.from_hf(hf_config(PUBLISHED)))
    assert {spec.name: spec.shape for _, spec in leaves(specs)} == PUBLISHED_TENSORS
    assert (len(PUBLISHED_TENSORS), num_params(specs)) == (62, 1_857_358_337)
    # On disk two bytes each; in memory the confidence head has four.
    assert num_bytes(specs, "bfloat16") == 2 * (1_857_358_337 + 5377)


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("gated", 8, 32 + 8), ("rnn", 3 * 8, 2 * 8 + 32)]
)
def test_other_markov_heads(name: str, rows: int, columns: int):
    specs = {s.name: s.shape for _, s in leaves(dspark_specs(DSparkConfig.from_hf(CASES[name])))}
    module = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}[name]
    assert specs[f"{module}.weight"] == (rows, columns)
    assert specs[f"{module}.bias"] == (rows,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read(case: Case, tmp_path: Path, dtype: str):
    save_draft(tmp_path, case.hf_config, case.params, dtype=dtype)
    assert read_draft_config(tmp_path) == case.config
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    loaded = dict(leaves(load_draft(tmp_path, case.config, dtype=dtype)))
    stored = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    assert loaded.keys() == dict(leaves(case.params)).keys()
    for path, value in leaves(case.params):
        kept = np.float32 if path[0] == "confidence_head" else stored
        assert loaded[path].dtype == kept
        np.testing.assert_array_equal(
            np.asarray(loaded[path], np.float32), np.asarray(value).astype(kept).astype(np.float32)
        )


def test_other_writers_names_are_understood(case: Case, tmp_path: Path):
    save_draft(tmp_path, case.hf_config, case.params, dtype="float32")
    file = tmp_path / "model.safetensors"
    renamed = {}
    for name, value in load_file(file).items():
        name = name.replace("hidden_norm.", "encoder.output_norm_enc.")
        renamed["model." + (f"encoder.{name}" if name.startswith("fc.") else name)] = value
    renamed |= {
        "lm_head.weight": np.zeros((2, 2), np.float32),
        "model.embed_tokens.weight": np.zeros((2, 2), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32),
    }
    save_file(renamed, file)
    loaded = load_draft(tmp_path, case.config, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, loaded, case.params)


def _without_norm(tensors: dict[str, Any]) -> None:
    del tensors["norm.weight"]


def _with_more(tensors: dict[str, Any]) -> None:
    tensors["layers.9.mlp.up_proj.weight"] = np.zeros((1, 1), np.float32)


def _with_wide_fc(tensors: dict[str, Any]) -> None:
    tensors["fc.weight"] = np.zeros((32, 32), np.float32)


def _quantized(tensors: dict[str, Any]) -> None:
    tensors["fc.weight"] = np.zeros((32, 64), np.uint8)


def _twice(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["norm.weight"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_norm, "1 tensors are missing from .*model.safetensors: norm.weight"),
        (_with_more, "not part of the model: layers.9.mlp.up_proj.weight F32.* in .*safetensors"),
        (_with_wide_fc, r"fc.weight F32\[32, 32\] in .*safetensors, expected .*\[32, 64\]"),
        (_quantized, r"fc.weight U8\[32, 64\] in .*safetensors, expected BF16/F16/F32"),
        (_twice, "norm.weight .* in .*safetensors duplicates"),
    ],
)
def test_broken_files_are_named(drafts: Path, tmp_path: Path, spoil, message: str):
    case = Case("vanilla", drafts / "spoiled")
    tensors = load_file(case.directory / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path, case.config, dtype="float32")


def test_config_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        read_draft_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CASES["vanilla"] | {"markov_rank": 0}))
    with pytest.raises(ValueError, match="config.json: .*markov_rank"):
        read_draft_config(tmp_path)
    path.write_text(json.dumps(hf_config("z-lab-Qwen3.8-27B-DFlash2")))
    with pytest.raises(NotImplementedError, match="config.json: .*DFlash2DraftModel"):
        read_draft_config(tmp_path)


def test_tree_of_another_config_is_not_written(case: Case, tmp_path: Path):
    with pytest.raises(ValueError, match="parameters do not fit the config: .*fc"):
        save_draft(tmp_path, case.hf_config | {"hidden_size": 16}, case.params, dtype="float32")
    with pytest.raises(ValueError, match="dtype must be one of"):
        save_draft(tmp_path, case.hf_config, case.params, dtype="float16")


def test_prepared_tree_keeps_what_is_looked_up(case: Case):
    prepared = dict(leaves(prepare_draft(case.params)))
    tables = {path for path, value in prepared.items() if not isinstance(value, InputMajor)}
    assert tables == {
        path for path, v in leaves(case.params) if v.ndim == 1 or path[-1] == "markov_w1"
    }
