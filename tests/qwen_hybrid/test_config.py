"""Configs: every published one is read, and every broken one is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from qwen_hybrid.config import HybridConfig, LayerKind, QuantizationRecord
from qwen_hybrid.dspark_config import DSparkConfig
from tests.vector_configs import REAL_TEXT, TINY, hf_config

KINDS = {kind.value: kind for kind in LayerKind}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def without_names(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in ("model_type", "architectures")}


@pytest.mark.parametrize("name", [*TINY, *REAL_TEXT])
def test_matches_transformers(name: str):
    """Expected values: the config class of transformers, built from the same file."""
    hf = text_part(hf_config(name))
    reference = transformers.AutoConfig.for_model(hf["model_type"], **without_names(hf))
    config = HybridConfig.from_hf(hf_config(name))
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert config.layer_kinds == tuple(KINDS[kind] for kind in reference.layer_types)
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    gdn = config.gdn
    assert gdn.num_key_heads == reference.linear_num_key_heads
    assert gdn.num_value_heads == reference.linear_num_value_heads
    assert (gdn.key_dim, gdn.value_dim) == (
        reference.linear_key_head_dim,
        reference.linear_value_head_dim,
    )
    assert gdn.conv_width == reference.linear_conv_kernel_dim
    rope = reference.rope_parameters
    assert config.attention.num_heads == reference.num_attention_heads
    assert config.attention.num_kv_heads == reference.num_key_value_heads
    assert config.attention.head_dim == reference.head_dim
    assert config.attention.rope_theta == rope["rope_theta"]
    assert config.attention.rotary_dim == int(reference.head_dim * rope["partial_rotary_factor"])


@pytest.mark.parametrize("name", ["q4_all", "q4_odd", "q4_qsa", "Qwen3.8-Flash-Next"])
def test_qwen4_matches_transformers(name: str):
    hf = text_part(hf_config(name))
    reference = transformers.AutoConfig.for_model("qwen4_exp_text", **without_names(hf))
    config = HybridConfig.from_hf(hf_config(name))
    assert config.moe and config.hyper_connection and config.qsa
    assert config.moe.num_experts == reference.num_experts
    assert config.moe.top_k == reference.num_experts_per_tok
    assert config.moe.intermediate_size == reference.moe_intermediate_size
    assert config.moe.shared_intermediate_size == reference.shared_expert_intermediate_size
    assert config.moe.renormalize == reference.norm_topk_prob
    assert config.hyper_connection.count == reference.hc_count
    assert config.hyper_connection.lowrank == reference.hc_lowrank
    assert config.qsa.num_heads == reference.indexer_n_heads
    assert config.qsa.head_dim == reference.indexer_head_dim
    assert config.qsa.budget == reference.indexer_budget
    assert config.qsa.ratio == reference.indexer_compress_ratio
    assert config.gdn.gate == (reference.output_gate_type or reference.hidden_act)
    if not reference.ple_layer_ids:
        assert config.ple is None
        return
    assert config.ple is not None
    assert config.ple.layers == tuple(layer - 1 for layer in reference.ple_layer_ids)
    assert config.ple.embed_dim == reference.ple_embed_dim
    assert config.ple.num_shards == reference.split_ngram_parts
    assert config.ple.seed == reference.seed


def test_defaults_match_transformers():
    """A qwen4_exp config with nothing but what has no default."""
    keys = {
        "vocab_size": 64,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [3, 2, 2],
        "eos_token_id": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    reference = transformers.AutoConfig.for_model("qwen4_exp_text", **keys)
    config = HybridConfig.from_hf({"model_type": "qwen4_exp_text", **keys})
    assert config.layer_kinds == tuple(KINDS[kind] for kind in reference.layer_types)
    # The factor that this family alone takes as 1.
    assert "partial_rotary_factor" not in reference.rope_parameters
    assert config.attention.rotary_dim == config.attention.head_dim == reference.head_dim
    assert config.gdn.gate == reference.hidden_act
    assert config.ple and config.hyper_connection and config.moe
    assert config.ple.layers == (1, 2)
    assert config.ple.embed_dim == reference.ple_embed_dim
    assert config.ple.conv_width == reference.ple_conv_kernel_size
    assert config.ple.ngram_size == reference.ngram_size
    assert config.ple.heads_per_ngram == reference.heads_per_ngram
    assert config.ple.vocab_base == reference.ngram_vocab_size_base
    assert config.ple.divisor == reference.make_ngram_vocab_size_divisible_by
    assert (config.ple.seed, config.ple.num_shards) == (reference.seed, reference.split_ngram_parts)
    assert config.hyper_connection.count == reference.hc_count
    assert config.hyper_connection.lowrank == reference.hc_lowrank
    assert config.moe.renormalize == reference.norm_topk_prob
    assert config.max_position_embeddings == reference.max_position_embeddings


def test_rotary_default_of_the_older_families():
    hf = hf_config("q35_dense")
    del hf["rope_parameters"]["partial_rotary_factor"]
    reference = transformers.AutoConfig.for_model(hf["model_type"], **without_names(hf))
    expected = int(32 * reference.rope_parameters["partial_rotary_factor"])
    assert HybridConfig.from_hf(hf).attention.rotary_dim == expected == 8


def test_spellings():
    """Spellings that mean the same give the same record."""
    plain = HybridConfig.from_hf(hf_config("q4_qsa"))
    for spelling in ("indexed_attention", "qwen_sparse_attention"):
        hf = hf_config("q4_qsa")
        hf["layer_types"] = [spelling if k[0] == "f" else k for k in hf["layer_types"]]
        assert HybridConfig.from_hf(hf) == plain
    hf = hf_config("q4_qsa")
    del hf["layer_types"]
    assert HybridConfig.from_hf(hf) == plain
    assert HybridConfig.from_hf(hf | {"full_attention_interval": 4}) == plain
    rope = hf.pop("rope_parameters")
    flat = hf | {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    assert HybridConfig.from_hf(flat) == plain
    assert HybridConfig.from_hf(
        {"model_type": "qwen4_exp", "text_config": hf_config("q4_qsa")}
    ) == (plain)
    mtp = HybridConfig.from_hf(hf_config("q35_dense_mtp"))
    hf = hf_config("q35_dense_mtp")
    hf["mtp_num_hidden_layers"] = hf.pop("num_mtp_layers")
    assert mtp.num_mtp_layers == 1
    assert HybridConfig.from_hf(hf) == mtp
    assert hash(mtp) == hash(HybridConfig.from_hf(hf))


@pytest.mark.parametrize(
    ("value", "gate"), [(None, "silu"), ("swish", "silu"), ("silu", "silu"), ("sigmoid", "sigmoid")]
)
def test_output_gate(value: str | None, gate: str):
    hf = hf_config("q4_qsa") | {"output_gate_type": value}
    assert HybridConfig.from_hf(hf).gdn.gate == gate


def test_annotations_are_ignored():
    hf = hf_config("q35_dense")
    plain = HybridConfig.from_hf(hf)
    assert HybridConfig.from_hf(hf | {"_source": {"model_type": "nonsense"}}) == plain


def test_end_of_text_ids():
    config = HybridConfig.from_hf(hf_config("q4_odd"))
    assert config.eos_token_ids == (7, 11)
    # The n-gram hash of transformers cuts at the first id of a list.
    assert config.ple is not None and config.ple.eos_token_id == 7
    hf = hf_config("q35_dense") | {"eos_token_id": None}
    assert HybridConfig.from_hf(hf).eos_token_ids == ()


def change(name: str, **values: Any) -> dict[str, Any]:
    """Return a config with the text keys changed; "absent" removes one."""
    hf = hf_config(name)
    text = text_part(hf)
    for key, value in values.items():
        text[key] = value
        if value == "absent":
            del text[key]
    return hf


INDEXER = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    *(("q35_dense", {key: "absent"}, key) for key in ("hidden_size", "num_hidden_layers")),
    *(("q35_dense", {key: "absent"}, key) for key in ("vocab_size", "intermediate_size")),
    *(("q35_dense", {key: "absent"}, key) for key in ("num_attention_heads", "model_type")),
    ("q35_dense", {"rope_parameters": "absent"}, "rope_theta"),
    *(("q35_moe", {key: "absent"}, key) for key in ("num_experts", "num_experts_per_tok")),
    *(("q4_qsa", {f"indexer_{key}": "absent"}, f"indexer_{key}") for key in INDEXER),
    ("q4_qsa", {f"indexer_{key}": "absent" for key in INDEXER}, "indexer_budget"),
    ("q4_ple", {"eos_token_id": None}, "eos_token_id"),
    ("q35_dense", {"model_type": "llama"}, "llama"),
    ("q35_dense", {"hidden_act": "gelu"}, "hidden_act.*gelu"),
    ("q35_dense", {"attention_bias": True}, "attention_bias"),
    ("q35_dense", {"attn_output_gate": False}, "attn_output_gate"),
    ("q35_dense", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ("q35_dense", {"num_experts": 8}, "num_experts"),
    ("q35_dense", {"hidden_size": "64"}, "hidden_size.*'64'"),
    ("q35_dense", {"hidden_size": 0}, "hidden_size"),
    ("q35_dense", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ("q35_dense", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("q35_dense", {"linear_num_value_heads": 3}, "linear_num_value_heads=3"),
    ("q35_dense", {"dtype": "int8"}, "dtype.*int8"),
    ("q35_dense", {"layer_types": ["linear_attention"]}, "layer_types.*num_hidden_layers=4"),
    ("q35_dense", {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding"),
    ("q35_dense", {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"]}, "indexed"),
    ("q35_dense", {"full_attention_interval": 2}, "full_attention_interval"),
    ("q35_dense", {"rope_theta": 5.0}, "rope_theta"),
    ("q35_dense", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("q35_dense", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type.*yarn"),
    ("q35_dense_mtp", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers.*num_mtp_layers"),
    ("q35_dense_mtp", {"num_mtp_layers": 2, "mtp_layer_types": None}, "num_mtp_layers"),
    ("q35_dense_mtp", {"mtp_layer_types": ["linear_attention"]}, "mtp_layer_types"),
    ("q35_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("q35_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    ("q4_qsa", {"hc_count": 1}, "hc_count=1"),
    ("q4_qsa", {"indexer_kv_heads": 2}, "indexer_kv_heads=2"),
    ("q4_qsa", {"indexer_budget": 10}, "indexer_budget=10"),
    ("q4_qsa", {"indexer_head_dim": 4}, "indexer_head_dim=4"),
    ("q4_qsa", {"output_gate_type": "relu"}, "output_gate_type.*relu"),
    ("q4_ple", {"ple_embed_dim": 65}, "ple_embed_dim=65"),
    ("q4_ple", {"ple_layer_ids": [0]}, "ple_layer_ids"),
    ("q4_ple", {"ple_layer_ids": [5]}, "ple_layer_ids"),
    ("q4_ple", {"ple_layer_ids": [4]}, "ple_layer_ids.*linear_attention"),
    ("q4_ple", {"ngram_size": 1}, "ngram_size"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BROKEN)
def test_broken_configs_are_refused(name: str, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        HybridConfig.from_hf(change(name, **changes))


def set_top(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda hf: hf.__setitem__(key, value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (set_top("tie_word_embeddings", True), "tie_word_embeddings"),
        (set_top("model_type", "qwen3_5_moe"), "model_type"),
        (set_top("text_config", None), "text_config"),
        (lambda hf: hf["text_config"]["mtp"].update(num_hidden_layers=2), "mtp.num_hidden_layers"),
        (lambda hf: hf["text_config"]["mtp"].update(rope_theta=1e4), "mtp.rope_theta"),
    ],
)
def test_contradictions_between_levels(damage: Callable[[dict[str, Any]], None], message: str):
    hf = hf_config("Qwen3.8-Flash-Next")
    damage(hf)
    with pytest.raises(ValueError, match=message):
        HybridConfig.from_hf(hf)


def test_directory_errors_name_the_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        HybridConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json"):
        HybridConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config("q4_all")), encoding="utf-8")
    assert HybridConfig.from_directory(tmp_path) == HybridConfig.from_hf(hf_config("q4_all"))


# The hash constants published for Qwen3.8-Flash-Next.
FLASH_NEXT_MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
FLASH_NEXT_MODULI = tuple(
    20_000_000 + k for k in (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
)


def test_ngram_table_of_flash_next():
    config = HybridConfig.from_hf(hf_config("Qwen3.8-Flash-Next"))
    assert config.ple is not None
    table = config.ple.table(0, config.vocab_size)
    assert table.multipliers == FLASH_NEXT_MULTIPLIERS
    assert table.moduli == FLASH_NEXT_MODULI
    assert table.offsets[:3] == (0, 20000003, 40000026)
    assert table.offsets[-1] == 300001275
    assert table.num_rows == 320001536
    assert (config.ple.row_width, config.ple.conv_window) == (160, 9)


@pytest.mark.parametrize("name", ["q4_all", "q4_odd", "q4_ple"])
def test_ngram_tables_match_transformers(name: str):
    hf = hf_config(name)
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(hf["model_type"], **without_names(hf))
    )
    config = HybridConfig.from_hf(hf)
    assert config.ple is not None
    for rank, layer in enumerate(config.ple.layers):
        embedding = reference.model.layers[layer].ple.ple_embedding
        table = config.ple.table(rank, config.vocab_size)
        assert list(table.multipliers) == embedding.layer_multipliers.tolist()
        assert list(table.moduli) == embedding.ngram_heads_vocab_sizes.tolist()
        assert list(table.offsets) == embedding.ngram_heads_offsets.tolist()
        assert (table.num_rows, config.ple.row_width) == embedding.ngram_embedding.weight.shape


# Method, algorithm, and how many modules are listed as left alone and as quantised.
QUANTIZED = {
    "Qwen3.8-27B-FP8": ("fp8", "FP8_BLOCK_SCALES", 259, 0),
    "Qwen3.8-Flash-Next-FP8": ("fp8", "FP8_BLOCK_SCALES", 1, 0),
    "RadixArk-Qwen3.8-27B-NVFP4": ("modelopt", "MIXED_PRECISION", 0, 401),
    "RadixArk-Qwen3.8-Flash-Next-NVFP4": ("modelopt", "NVFP4", 10, 0),
    "nvidia-Qwen3.8-27B-NVFP4": ("modelopt", "MIXED_PRECISION", 0, 401),
    "nvidia-Qwen3.8-Flash-Next-NVFP4": ("modelopt", "MIXED_PRECISION", 292, 50),
}


@pytest.mark.parametrize("name", REAL_TEXT)
def test_quantization_records(name: str):
    record = HybridConfig.from_hf(hf_config(name)).quantization
    if name not in QUANTIZED:
        assert record is None
        return
    assert record is not None
    counts = len(record.ignore), len(record.quantized_layers)
    assert (record.method, record.algorithm, *counts) == QUANTIZED[name]


def test_quantization_details():
    record = HybridConfig.from_hf(hf_config("nvidia-Qwen3.8-Flash-Next-NVFP4")).quantization
    assert record is not None
    layers = dict(record.quantized_layers)
    assert layers["model.language_model.layers.0.mlp.experts"] == "NVFP4"
    # Two spellings of one algorithm.
    assert layers["mtp.layers.0.mlp.experts"] == "FP8_BLOCK_SCALES"
    assert record.group_size == 16
    record = HybridConfig.from_hf(hf_config("Qwen3.8-27B-FP8")).quantization
    assert record is not None and record.weight_block_size == (128, 128)
    record = HybridConfig.from_hf(hf_config("RadixArk-Qwen3.8-27B-NVFP4")).quantization
    assert record is not None and record.kv_cache_algorithm == "FP8"
    packed = QuantizationRecord.from_hf(
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["a"]}
    )
    assert (packed.algorithm, packed.ignore) == ("nvfp4-pack-quantized", ("a",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_method"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "modelopt"}, "quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "INT4"}, "INT4"),
        ({"quant_method": "compressed-tensors"}, "format"),
    ],
)
def test_unknown_quantization_is_refused(config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        QuantizationRecord.from_hf(config)


def test_dspark():
    hf = hf_config("RadixArk-Qwen3.8-27B-DSpark")
    config = DSparkConfig.from_hf(hf)
    assert config.block_size == 7
    assert config.target_layer_ids == (5, 19, 33, 47, 61)
    assert (config.mask_token_id, config.markov_rank) == (248070, 256)
    assert config.yarn is not None
    assert (config.yarn.factor, config.yarn.original_max_positions) == (32.0, 8192)
    for key in ("dspark_config", "dflash_config"):
        nested = {k: v for k, v in hf.items() if k != "dspark_config"}
        nested[key] = {k: nested.pop(k) for k in ("markov_rank", "mask_token_id", "block_size")}
        assert DSparkConfig.from_hf(nested) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 128}, "markov_rank"),
        ({"mask_token_id": None, "dspark_config": {}}, "mask_token_id"),
        ({"target_layer_ids": [64], "dspark_config": {}}, "target_layer_ids"),
        ({"markov_head_type": "transformer"}, "markov_head_type.*transformer"),
        ({"rope_theta": None}, "rope_theta"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_broken_dspark_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_hf(hf_config("RadixArk-Qwen3.8-27B-DSpark") | changes)


def test_dflash2_is_refused_by_name():
    hf = hf_config("z-lab-Qwen3.8-27B-DFlash2")
    with pytest.raises(NotImplementedError, match="DFlash2DraftModel"):
        DSparkConfig.from_hf(hf)
    with pytest.raises(ValueError, match="DFlash2DraftModel"):
        HybridConfig.from_hf(hf)
