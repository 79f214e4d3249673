"""Loading, saving and making up weights, against checkpoints that transformers writes."""

import io
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from qwen_hybrid import checkpoint_writer, host_memory
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.params import ParamTree, leaves, model_specs, num_bytes
from qwen_hybrid.progress import ProgressBar
from qwen_hybrid.weights import (
    CheckpointError,
    QuantizedCheckpointError,
    dummy_params,
    load_checkpoint,
    load_params,
    save_hf,
)
from tests.vector_configs import TINY, hf_config

State = dict[str, torch.Tensor]
MTP_NAMES = {
    "dense": {
        "fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight",
        "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight",
        "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight",
        "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
    },
    "qwen4_only": {
        "fc_embedding.weight", "fc_hidden.weight", "hyper_connection_mixer.hc_norm.weight",
        "layers.0.attn_hyper_connection.block_inject_weight.weight",
        "layers.0.self_attn.indexer.index_qk_proj.weight",
        "layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.shared_expert_gate.weight",
    },
}  # fmt: skip


def make_model(hf: dict[str, Any], *, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Return transformers' model of a text config, every parameter random."""
    keys = {k: v for k, v in hf.items() if k not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(hf["model_type"], **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def parameters(model: transformers.PreTrainedModel) -> State:
    """Return a copy of a model's weights, by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class Saved:
    """A tiny model as transformers wrote it, with the weights that it has in memory."""

    def __init__(self, name: str, directory: Path, dtype: torch.dtype) -> None:
        model = make_model(hf_config(name), dtype=dtype)
        model.save_pretrained(directory)
        self.directory = directory
        self.config = HybridConfig.from_directory(directory)
        self.state = parameters(model)
        self.on_disk: State = safetensors.torch.load_file(directory / "model.safetensors")

    def rewrite(
        self,
        directory: Path,
        *,
        rename: Callable[[str], str] = lambda name: name,
        change: Callable[[State], None] = lambda state: None,
        num_files: int = 1,
    ) -> Path:
        """Write the directory again with other names, contents or files."""
        directory.mkdir(exist_ok=True)
        config = (self.directory / "config.json").read_text(encoding="utf-8")
        (directory / "config.json").write_text(config, encoding="utf-8")
        state = {rename(name): value for name, value in self.on_disk.items()}
        change(state)
        if num_files == 1:
            safetensors.torch.save_file(state, directory / "any-name.safetensors")
            return directory
        names = list(state)
        random.Random(0).shuffle(names)
        weight_map = {}
        for number in range(num_files):
            file_name = f"layers-{number}-of-x.safetensors"
            part = {name: state[name] for name in names[number::num_files]}
            safetensors.torch.save_file(part, directory / file_name)
            weight_map |= dict.fromkeys(part, file_name)
        index = {"metadata": {"total_size": 71903645408.0}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Return a function that has transformers write a tiny model, once."""
    made: dict[tuple[str, torch.dtype], Saved] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Saved:
        if (name, dtype) not in made:
            made[name, dtype] = Saved(name, tmp_path_factory.mktemp(name), dtype)
        return made[name, dtype]

    return get


def torch_name(path: tuple[str, ...]) -> str:
    """Return transformers' name of the parameter at a path of our tree, without its suffix."""
    name = ".".join(path).replace("layers_", "layers.")
    name = name.replace("ngram_embedding", "ple_embedding.ngram_embedding")
    return name if name == "lm_head" else f"model.{name}"


def assert_equals_state(params: ParamTree, state: State, *, dtype: torch.dtype) -> None:
    """Check that a tree is transformers' weights, bit for bit after a cast to the dtype."""
    names = {name.removesuffix(".weight"): name for name in state}
    found = {torch_name(path): leaf for path, leaf in leaves(params)}
    assert set(found) == set(names)
    for stem, leaf in found.items():
        value = state[names[stem]]
        is_float32 = stem.endswith(("A_log", "dt_bias", "linear_attn.norm"))
        assert leaf.dtype == (jnp.float32 if is_float32 else jnp.dtype(str(dtype)[6:])), stem
        expected = value.to(torch.float32 if is_float32 else dtype).float().numpy()
        expected = expected.squeeze(1) if stem.endswith("conv1d") else expected
        np.testing.assert_array_equal(np.asarray(leaf).astype(np.float32), expected, stem)


def assert_same(first: ParamTree, second: ParamTree) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, a), (_, b) in zip(leaves(first), leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), "/".join(path))


@pytest.mark.parametrize("name", TINY)
def test_loads_what_transformers_writes(name: str, saved: Callable[..., Saved]):
    """Experts are split and n-gram tables sharded on disk; transformers fuses both."""
    model = saved(name)
    checkpoint = load_checkpoint(model.directory)
    assert_equals_state(checkpoint.params, model.state, dtype=torch.float32)
    # transformers never writes an MTP head.
    has_head = "mtp" in name and name != "q4_mtp_layer"
    assert len(checkpoint.notes) == (1 if has_head else 0)
    assert all("mtp" in note and "left out" in note for note in checkpoint.notes)
    assert checkpoint.config.num_mtp_layers == 0


@pytest.mark.parametrize("on_disk", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_dtypes(dtype: str, on_disk: torch.dtype, saved: Callable[..., Saved]):
    model = saved("q4_ple", on_disk)
    expected = on_disk if dtype == "auto" else getattr(torch, dtype)
    params = load_params(model.directory, model.config, dtype=dtype)
    assert_equals_state(params, model.state, dtype=expected)


def test_half_precision_files_are_read(tmp_path: Path, saved: Callable[..., Saved]):
    model = saved("q35_dense")

    def halve(state: State) -> None:
        state.update({name: value.half() for name, value in state.items()})

    params = load_params(model.rewrite(tmp_path, change=halve), model.config, dtype="float32")
    halved = {name: value.half() for name, value in model.state.items()}
    assert_equals_state(params, halved, dtype=torch.float32)


def test_unknown_dtype_is_refused(saved: Callable[..., Saved]):
    model = saved("q35_dense")
    with pytest.raises(ValueError, match="float16"):
        load_params(model.directory, model.config, dtype="float16")


def renamed(text_prefix: str, head: str) -> Callable[[str], str]:
    def rename(name: str) -> str:
        if name.startswith("lm_head"):
            return head
        return text_prefix + name.removeprefix("model.")

    return rename


@pytest.mark.parametrize(
    ("text_prefix", "head"),
    [
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.", "lm_head.weight"),
    ],
)
def test_prefixes(text_prefix: str, head: str, tmp_path: Path, saved: Callable[..., Saved]):
    model = saved("q4_odd")
    directory = model.rewrite(tmp_path, rename=renamed(text_prefix, head))
    params = load_params(directory, model.config)
    assert_equals_state(params, model.state, dtype=torch.float32)


def test_odd_file_names_and_extra_tensors(tmp_path: Path, saved: Callable[..., Saved]):
    """Shards of any name and order; vision tensors, tables and stray files are passed over."""
    model = saved("q4_all")
    extras = ["model.visual.blocks.0.attn.qkv.weight", "model.rotary_emb.inv_freq"]
    extras.append("model.layers.1.ple.ple_embedding.token_lookup")

    def add(state: State) -> None:
        state.update({name: torch.ones(3) for name in extras})

    directory = model.rewrite(tmp_path, change=add, num_files=7)
    stray = directory / "joint_head.safetensors"
    safetensors.torch.save_file({"stray": torch.ones(1)}, stray)
    assert_equals_state(load_params(directory, model.config), model.state, dtype=torch.float32)


def test_a_table_may_be_in_one_piece(tmp_path: Path, saved: Callable[..., Saved]):
    model = saved("q4_ple")
    stem = "model.layers.1.ple.ple_embedding.ngram_embedding"

    def join(state: State) -> None:
        for number in range(4):
            del state[f"{stem}.shard_{number}.weight"]
        state[f"{stem}.weight"] = model.state[f"{stem}.weight"]

    params = load_params(model.rewrite(tmp_path, change=join), model.config)
    assert_equals_state(params, model.state, dtype=torch.float32)


def test_many_shards_are_ordered_by_number(tmp_path: Path):
    """With more than ten shards the order of names is not that of numbers."""
    hf = hf_config("q4_ple") | {"split_ngram_parts": 24}
    model = make_model(hf, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    params = load_params(tmp_path, HybridConfig.from_hf(hf), dtype="float32")
    assert_equals_state(params, parameters(model), dtype=torch.float32)


def test_unaligned_tensors(tmp_path: Path, saved: Callable[..., Saved]):
    """Offsets are relative to the end of the header and need no alignment."""
    model = saved("q35_dense")
    model.rewrite(tmp_path)
    path = tmp_path / "any-name.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for entry in header.values():
        entry["data_offsets"] = [offset + 1 for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" + data[8 + size :])
    assert_equals_state(load_params(tmp_path, model.config), model.state, dtype=torch.float32)


def test_a_tied_head_may_be_stored_again(tmp_path: Path, saved: Callable[..., Saved]):
    model = saved("q35_dense_ratio3_tied")
    assert "lm_head.weight" not in model.on_disk

    def add(state: State) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()

    def add_other(state: State) -> None:
        add(state)
        state["lm_head.weight"][5, 7] += 1

    params = load_params(model.rewrite(tmp_path / "a", change=add), model.config)
    assert_equals_state(params, model.state, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load_params(model.rewrite(tmp_path / "b", change=add_other), model.config)


NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
PLE = "model.layers.1.ple.ple_embedding."


def drop(name: str) -> Callable[[State], None]:
    return lambda state: state.__delitem__(name)


def put(name: str, value: torch.Tensor) -> Callable[[State], None]:
    return lambda state: state.update({name: value})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q35_dense", drop(NORM), f"missing.*any-name.*{NORM}"),
        ("q35_dense", drop("lm_head.weight"), r"missing.*lm_head\.weight"),
        ("q35_moe", drop(EXPERT), f"missing.*{EXPERT}"),
        ("q4_ple", drop(f"{PLE}ngram_embedding.shard_1.weight"), "missing.*shard_1"),
        ("q4_ple", drop(f"{PLE}ngram_embedding.shard_3.weight"), "shard_0..3?.*rows"),
        ("q4_ple", drop(f"{PLE}layer_multipliers"), "missing.*layer_multipliers"),
        ("q35_dense", put("model.layers.9.x", torch.ones(2)), "not part.*layers.9.x.*any-name"),
        ("q35_dense", put(NORM, torch.ones(65)), rf"{NORM} F32\[65\].*any-name.*\[64\]"),
        ("q35_moe", put(EXPERT, torch.ones(32, 63)), rf"{EXPERT} F32\[32, 63\]"),
        ("q4_ple", put(f"{PLE}ngram_embedding.shard_2.weight", torch.ones(9, 16)), "rows"),
        ("q4_ple", put(f"{PLE}ngram_embedding.shard_2.weight", torch.tensor(1.0)), "shard_2"),
        ("q35_dense", put(NORM, torch.ones(64, dtype=torch.int64)), rf"{NORM} I64"),
        ("q35_dense", put(f"model.language_model{NORM[5:]}", torch.ones(64)), "duplicates"),
        ("q4_ple", put(f"{PLE}layer_multipliers", torch.tensor([1, 3, 5])), "layer_multipliers"),
    ],
)
def test_wrong_tensors(
    name: str,
    change: Callable[[State], None],
    message: str,
    tmp_path: Path,
    saved: Callable[..., Saved],
):
    model = saved(name)
    with pytest.raises(CheckpointError, match=message):
        load_params(model.rewrite(tmp_path, change=change), model.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(NORM, torch.ones(64).to(torch.float8_e4m3fn)), f"{NORM} F8_E4M3"),
        (put(NORM, torch.ones(64, dtype=torch.uint8)), f"{NORM} U8"),
        (put(NORM.replace("weight", "weight_scale_inv"), torch.ones(1)), "weight_scale_inv"),
        (put("model.layers.3.self_attn.k_proj.k_scale", torch.ones(())), "k_scale"),
    ],
)
def test_quantized_tensors_are_refused(
    change: Callable[[State], None], message: str, tmp_path: Path, saved: Callable[..., Saved]
):
    model = saved("q35_dense")
    with pytest.raises(QuantizedCheckpointError, match=message):
        load_params(model.rewrite(tmp_path, change=change), model.config)


def test_quantized_configs_are_refused(saved: Callable[..., Saved]):
    hf = hf_config("q35_dense") | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    with pytest.raises(QuantizedCheckpointError, match="fp8 FP8_BLOCK_SCALES"):
        load_params(saved("q35_dense").directory, HybridConfig.from_hf(hf))


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.5, -1])
def test_truncated_files(keep: float, tmp_path: Path, saved: Callable[..., Saved]):
    """A file cut anywhere is refused by name: before, inside and after its header."""
    model = saved("q35_dense")
    model.rewrite(tmp_path)
    path = tmp_path / "any-name.safetensors"
    data = path.read_bytes()
    count = int(len(data) * keep) if 0 < keep < 1 else int(keep) % len(data)
    path.write_bytes(data[:count])
    message = r"any-name\.safetensors.*truncated" + (r".*model\." if count > 10_000 else "")
    with pytest.raises(CheckpointError, match=message):
        load_params(tmp_path, model.config)


def test_broken_files(tmp_path: Path, saved: Callable[..., Saved]):
    model = saved("q35_dense")
    with pytest.raises(CheckpointError, match="not a directory"):
        load_params(tmp_path / "none", model.config)
    with pytest.raises(CheckpointError, match="must hold an index"):
        load_params(tmp_path, model.config)
    path = tmp_path / "model.safetensors"
    path.write_bytes((5).to_bytes(8, "little") + b"{abc}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*header"):
        load_params(tmp_path, model.config)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_params(tmp_path, model.config)


def test_broken_indices(tmp_path: Path, saved: Callable[..., Saved]):
    model = saved("q35_dense")
    directory = model.rewrite(tmp_path, num_files=3)
    index = directory / "model.safetensors.index.json"
    text = index.read_text(encoding="utf-8")

    def expect(content: str, message: str) -> None:
        index.write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            load_params(directory, model.config)

    expect("{", "index.json is not a checkpoint index")
    expect('{"metadata": {}}', "weight_map")
    expect(text.replace("layers-1-of-x", "../layers-1-of-x"), "outside the directory")
    other = json.loads(text)
    other["weight_map"]["model.absent"] = "layers-0-of-x.safetensors"
    expect(json.dumps(other), r"layers-0-of-x\.safetensors lacks.*model\.absent")
    (directory / "layers-2-of-x.safetensors").unlink()
    expect(text, r"layers-2-of-x\.safetensors does not exist")


def test_few_names_of_many_are_listed(tmp_path: Path, saved: Callable[..., Saved]):
    model = saved("q35_dense")

    def empty(state: State) -> None:
        head = state["lm_head.weight"]
        state.clear()
        state["lm_head.weight"] = head

    with pytest.raises(CheckpointError, match="55 tensors are missing.*and 50 more"):
        load_params(model.rewrite(tmp_path, change=empty), model.config)


def load_with_transformers(directory: Path, *, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Return transformers' model of a directory, having found every tensor and no other."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True
    )
    model, info = loaded
    assert not any(info.values()), info
    return model


def with_mtp(name: str) -> dict[str, Any]:
    return hf_config(name) | {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}


@pytest.mark.parametrize("name", TINY)
def test_transformers_loads_what_we_save(name: str, tmp_path: Path):
    """Random weights through our writer; transformers finds all of them, and so do we."""
    hf = hf_config(name)
    config = HybridConfig.from_hf(hf)
    params = dummy_params(config, dtype="float32", seed=3)
    save_hf(tmp_path, hf, params, dtype="float32")
    model = load_with_transformers(tmp_path, dtype=torch.float32)
    text = {key: value for key, value in params.items() if key != "mtp"}
    assert_equals_state(text, parameters(model), dtype=torch.float32)
    assert_same(load_params(tmp_path, config, dtype="float32"), params)


@pytest.mark.parametrize("max_file_bytes", [10**9, 100_000])
def test_round_trip_in_bfloat16(max_file_bytes: int, tmp_path: Path):
    hf = with_mtp("q4_all")
    config = HybridConfig.from_hf(hf)
    params = dummy_params(config, dtype="bfloat16", seed=1)
    save_hf(tmp_path, hf, params, dtype="bfloat16", max_file_bytes=max_file_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_file_bytes < 10**9)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.notes == ()
    assert checkpoint.config.num_mtp_layers == 1
    assert_same(checkpoint.params, params)
    load_with_transformers(tmp_path, dtype=torch.bfloat16)


def test_fused_and_split_experts_are_equal(tmp_path: Path, saved: Callable[..., Saved]):
    model = saved("q35_moe")
    assert any(".experts.7.up_proj" in name for name in model.on_disk)
    params = load_params(model.directory, model.config)
    save_hf(tmp_path, hf_config("q35_moe"), params, dtype="float32")
    names = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert names["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 64)
    assert not any(".experts.7." in name for name in names)
    assert_same(load_params(tmp_path, model.config), params)


def test_mtp_heads_on_disk(tmp_path: Path):
    """Names of the MTP tensors as the published checkpoints spell them."""
    for name in ("q35_dense", "q4_qsa"):
        hf = with_mtp(name)
        save_hf(tmp_path, hf, dummy_params(HybridConfig.from_hf(hf), dtype="float32"))
        found = safetensors.torch.load_file(tmp_path / "model.safetensors")
        mtp = {n.removeprefix("mtp."): v for n, v in found.items() if n.startswith("mtp.")}
        if name == "q35_dense":
            assert set(mtp) == MTP_NAMES["dense"]
            assert mtp["fc.weight"].shape == (64, 128)
        else:
            assert len(mtp) == 31
            assert set(mtp) >= MTP_NAMES["qwen4_only"]
            assert mtp["pre_fc_norm_hidden.weight"].shape == (4 * 64,)
            assert not {"fc.weight", "norm.weight"} & set(mtp)


def test_an_mtp_head_is_whole_or_absent(tmp_path: Path):
    hf = with_mtp("q35_moe")
    config = HybridConfig.from_hf(hf)
    save_hf(tmp_path, hf, dummy_params(config, dtype="float32"), dtype="float32")
    without = HybridConfig.from_hf(hf_config("q35_moe"))
    checkpoint = load_checkpoint(tmp_path, without)
    assert "mtp" not in checkpoint.params
    assert "19 mtp" in checkpoint.notes[0]
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del state["mtp.fc.weight"]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing.*mtp\.fc\.weight"):
        load_checkpoint(tmp_path, config)


def test_saving_a_wrong_tree_is_refused(tmp_path: Path):
    hf = hf_config("q35_dense")
    params = dummy_params(HybridConfig.from_hf(hf))
    params["norm"] = jnp.zeros(65)
    del params["layers_0"]["linear_attn"]["A_log"]
    with pytest.raises(ValueError, match="2 parameters.*layers_0/linear_attn/A_log.*absent"):
        save_hf(tmp_path, hf, params)


def test_dummy_weights():
    config = HybridConfig.from_hf(with_mtp("q4_all"))
    params = dummy_params(config, seed=5)
    specs = dict(leaves(model_specs(config)))
    for path, value in leaves(params):
        spec = specs[path]
        assert value.shape == spec.shape
        assert value.dtype == (jnp.float32 if spec.dtype == "float32" else jnp.bfloat16)
        values = np.asarray(value).astype(np.float32)
        assert np.isfinite(values).all()
        if spec.init == "normal" and values.size > 1000:
            assert np.std(values) * spec.shape[-1] ** 0.5 == pytest.approx(1, rel=0.1)
    assert_same(dummy_params(config, seed=5), params)
    other = dummy_params(config, seed=6)
    assert not np.array_equal(np.asarray(other["lm_head"]), np.asarray(params["lm_head"]))


def test_dummy_weights_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, saved: Callable[..., Saved]
):
    config = HybridConfig.from_hf(hf_config("Qwen3.8-27B"))
    needed = num_bytes(model_specs(config), "bfloat16")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 12_345)
    with pytest.raises(MemoryError, match=rf"{needed:,} bytes.*12,345 bytes"):
        dummy_params(config)
    model = saved("q35_dense")
    with pytest.raises(MemoryError, match="12,345 bytes"):
        load_params(model.directory, model.config)


def test_available_memory_is_plausible():
    available = host_memory.available_bytes()
    assert available is not None and 10**8 < available < 10**14


def test_loading_holds_one_copy(tmp_path: Path):
    """Peak memory is that of the parameters and a part of one of them."""
    hf = hf_config("q35_dense") | {"hidden_size": 256, "intermediate_size": 4096}
    config = HybridConfig.from_hf(hf)
    params = dummy_params(config, dtype="float32")
    save_hf(tmp_path, hf, params, dtype="float32")
    del params
    needed = num_bytes(model_specs(config), "float32")
    tracemalloc.start()
    loaded = load_params(tmp_path, config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loaded["norm"].shape == (256,)
    assert needed > 50_000_000
    assert peak < 1.15 * needed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals():
    quiet, terminal = io.StringIO(), Terminal()
    for stream in (quiet, terminal):
        with ProgressBar("loading", 2_000_000, stream=stream) as bar:
            bar.advance(1_000_000)
            bar.advance(1_000_000)
    assert quiet.getvalue() == ""
    assert "loading [" in terminal.getvalue()
    assert "2.0 MB of 2.0 MB" in terminal.getvalue()
    with ProgressBar("loading", 1, is_shown=False, stream=terminal) as bar:
        bar.advance(1)
    assert terminal.getvalue().count("\n") == 1


def test_saved_files_replace_older_ones(tmp_path: Path):
    hf = hf_config("q35_dense")
    config = HybridConfig.from_hf(hf)
    params = dummy_params(config, dtype="float32", seed=1)
    save_hf(tmp_path, hf, dummy_params(config), max_file_bytes=20_000)
    save_hf(tmp_path, hf, params, dtype="float32")
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == [
        checkpoint_writer.SINGLE_FILE
    ]
    assert_same(load_params(tmp_path, config, dtype="float32"), params)
