"""Readers of the key names in a checkpoint's ``config.json``; each returns one layer record.

A key that sizes the model and that every writer writes has no default: its absence is an error.
The other defaults are those of the transformers classes. A value given twice must agree.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qwen_hybrid.layer_config import (
    AttentionConfig,
    GdnConfig,
    HyperConnectionConfig,
    LayerKind,
    MoeConfig,
    PleConfig,
    QsaConfig,
    check,
)

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
QSA_KEYS = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
QSA_SPELLINGS = ("full_attention", "indexed_attention", "qwen_sparse_attention")
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
# Architecture switches of which the engine offers one position.
FIXED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "mtp_use_dedicated_embeddings": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """A ``config.json`` with its text part found.

    Attributes:
        family: one of FAMILIES.
        text: keys of the text model.
        outer: keys of the enclosing vision-language config; empty for a text-only one.
    """

    family: str
    text: Mapping[str, Any]
    outer: Mapping[str, Any]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "HfConfig":
        """Return the config with annotations (keys that start with "_") removed."""
        config = _without_annotations(config)
        drafts = [name for name in config.get("architectures") or [] if "Draft" in name]
        check(not drafts, "a draft model is not a text model", architectures=drafts)
        family = _family(config)
        if "text_config" not in config:
            return cls(family, config, {})
        text = config["text_config"]
        check(isinstance(text, dict), "text_config must be a mapping", text_config=text)
        if text.get("model_type") is not None:
            check(
                _family(text) == family,
                "text_config.model_type must be of the family of model_type",
                model_type=config["model_type"],
                text_model_type=text["model_type"],
            )
        return cls(family, text, config)

    def get(self, key: str, default: Any) -> Any:
        """Return the text model's value of a key, or the default if absent or null."""
        value = self.text.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """Return the text model's value of a key that has no default."""
        value = self.text.get(key)
        if value is None:
            raise ValueError(f"config key {key} is missing; {self.family} has no default for it")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a key's value as an integer."""
        value = self.need(key) if default is None else self.get(key, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        check(is_integer, f"config key {key} must be an integer", **{key: value})
        return value

    def number(self, key: str, default: float) -> float:
        """Return a key's value as a float."""
        return as_number(key, self.get(key, default))

    def agreed(self, key: str, default: Any) -> Any:
        """Return a key that the text config, the outer config or both may give."""
        given = [part[key] for part in (self.text, self.outer) if part.get(key) is not None]
        check(
            len(given) < 2 or given[0] == given[1],
            f"config key {key} differs between text_config and the top level",
            text_config=given[:1],
            top_level=given[1:],
        )
        return given[0] if given else default


def as_flag(key: str, value: Any) -> bool:
    """Return the value if it is true or false, or raise an error that names the key."""
    check(isinstance(value, bool), f"config key {key} must be true or false", **{key: value})
    return value


def as_number(key: str, value: Any) -> float:
    """Return the value as a float, or raise an error that names the key."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    check(is_number, f"config key {key} must be a number", **{key: value})
    return float(value)


def _without_annotations(config: Any) -> Any:
    if isinstance(config, Mapping):
        kept = {k: v for k, v in config.items() if not str(k).startswith("_")}
        return {key: _without_annotations(value) for key, value in kept.items()}
    return config


def _family(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("config key model_type is missing; it names the family")
    family = str(model_type).removesuffix("_text")
    known = ", ".join(f"{name}, {name}_text" for name in FAMILIES)
    check(family in FAMILIES, f"model_type must be one of {known}", model_type=model_type)
    return family


def check_fixed_values(hf: HfConfig) -> None:
    """Raise a ValueError for an architecture switch in a position that is not offered."""
    for key, only in FIXED_VALUES.items():
        check(
            hf.get(key, only) == only,
            f"config key {key} must be {only!r}",
            **{key: hf.get(key, only)},
        )
    if hf.family != "qwen4_exp":
        check(
            hf.get("norm_topk_prob", True) is True,
            f"{hf.family} always renormalises its router weights: norm_topk_prob must be true",
            norm_topk_prob=hf.get("norm_topk_prob", True),
        )
    if hf.family == "qwen3_5":
        check(
            hf.get("num_experts", 0) == 0,
            "model_type qwen3_5 is dense: num_experts must be absent",
            num_experts=hf.get("num_experts", 0),
        )


def layer_kinds(hf: HfConfig) -> tuple[LayerKind, ...]:
    """Return the token mixer of every layer, from the list or from the interval."""
    num_layers = hf.count("num_hidden_layers")
    interval = hf.count("full_attention_interval", 4)
    check(interval >= 1, "full_attention_interval must be >= 1", full_attention_interval=interval)
    attention = LayerKind.QSA if hf.family == "qwen4_exp" else LayerKind.ATTENTION
    by_interval = tuple(
        LayerKind.GDN if (index + 1) % interval else attention for index in range(num_layers)
    )
    names = hf.get("layer_types", None)
    if names is None:
        return by_interval
    check(
        len(names) == num_layers,
        "layer_types must have num_hidden_layers entries",
        layer_types=len(names),
        num_hidden_layers=num_layers,
    )
    kinds = tuple(_layer_kind(name, index, hf.family) for index, name in enumerate(names))
    check(
        "full_attention_interval" not in hf.text or kinds == by_interval,
        "layer_types and full_attention_interval contradict each other",
        layer_types=names,
        full_attention_interval=interval,
    )
    return kinds


def _layer_kind(name: Any, index: int, family: str) -> LayerKind:
    if name == LayerKind.GDN.value:
        return LayerKind.GDN
    spellings = QSA_SPELLINGS if family == "qwen4_exp" else (LayerKind.ATTENTION.value,)
    check(
        name in spellings,
        f"layer_types of {family} must be {LayerKind.GDN.value} or {' or '.join(spellings)}",
        **{f"layer_types[{index}]": name},
    )
    return LayerKind.QSA if family == "qwen4_exp" else LayerKind.ATTENTION


def gdn_config(hf: HfConfig) -> GdnConfig:
    """Return the Gated DeltaNet record."""
    gate = hf.get("output_gate_type", hf.get("hidden_act", "silu"))
    check(
        gate in GATES, f"output_gate_type must be one of {', '.join(GATES)}", output_gate_type=gate
    )
    return GdnConfig(
        num_key_heads=hf.count("linear_num_key_heads", 16),
        num_value_heads=hf.count("linear_num_value_heads", 32),
        key_dim=hf.count("linear_key_head_dim", 128),
        value_dim=hf.count("linear_value_head_dim", 128),
        conv_width=hf.count("linear_conv_kernel_dim", 4),
        gate=GATES[gate],
    )


def attention_config(hf: HfConfig) -> AttentionConfig:
    """Return the attention record, with the rotary width resolved."""
    rope = _rope_parameters(hf)
    head_dim = hf.count("head_dim", 256)
    # The two older classes rotate a quarter of each head by default, the newest all of it.
    default_factor = 1.0 if hf.family == "qwen4_exp" else 0.25
    factor = _rope_value(hf, rope, "partial_rotary_factor", default_factor)
    return AttentionConfig(
        num_heads=hf.count("num_attention_heads"),
        num_kv_heads=hf.count("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * factor),
        rope_theta=_rope_value(hf, rope, "rope_theta", None),
    )


def _rope_parameters(hf: HfConfig) -> Mapping[str, Any]:
    """Return the nested rope keys; "rope_scaling" is their older name."""
    given = [hf.get(key, None) for key in ("rope_parameters", "rope_scaling")]
    given = [rope for rope in given if rope is not None]
    check(
        len(given) < 2 or given[0] == given[1],
        "rope_parameters and rope_scaling contradict each other",
        rope=given,
    )
    rope = given[0] if given else {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    # "mrope" is the older name of the plain type with sections, which text does not use.
    check(rope_type in ("default", "mrope"), "rope_type must be default", rope_type=rope_type)
    return rope


def _rope_value(hf: HfConfig, rope: Mapping[str, Any], key: str, default: float | None) -> float:
    given = [part[key] for part in (rope, hf.text) if part.get(key) is not None]
    check(
        len(given) < 2 or given[0] == given[1],
        f"config key {key} differs between rope_parameters and the level above",
        **{key: given},
    )
    if not given and default is None:
        raise ValueError(f"config key {key} is missing, in rope_parameters and above it")
    return as_number(key, given[0] if given else default)


def moe_config(hf: HfConfig) -> MoeConfig | None:
    """Return the mixture-of-experts record; None for the dense family."""
    if hf.family == "qwen3_5":
        return None
    return MoeConfig(
        num_experts=hf.count("num_experts"),
        top_k=hf.count("num_experts_per_tok"),
        intermediate_size=hf.count("moe_intermediate_size"),
        shared_intermediate_size=hf.count("shared_expert_intermediate_size"),
        renormalize=as_flag("norm_topk_prob", hf.get("norm_topk_prob", True)),
    )


def hyper_connection_config(hf: HfConfig) -> HyperConnectionConfig | None:
    """Return the hyper-connection record; None outside ``qwen4_exp``."""
    if hf.family != "qwen4_exp":
        return None
    return HyperConnectionConfig(count=hf.count("hc_count", 4), lowrank=hf.count("hc_lowrank", 320))


def qsa_config(hf: HfConfig) -> QsaConfig | None:
    """Return the indexer record; None outside ``qwen4_exp`` or if no indexer key is given."""
    if hf.family != "qwen4_exp" or all(hf.get(key, None) is None for key in QSA_KEYS):
        return None
    kv_heads = hf.count("indexer_kv_heads")
    check(kv_heads == 1, "indexer_kv_heads must be 1", indexer_kv_heads=kv_heads)
    return QsaConfig(
        num_heads=hf.count("indexer_n_heads"),
        head_dim=hf.count("indexer_head_dim"),
        budget=hf.count("indexer_budget"),
        ratio=hf.count("indexer_compress_ratio"),
    )


def ple_config(hf: HfConfig) -> PleConfig | None:
    """Return the n-gram embedding record; None if no layer has one."""
    layer_ids = hf.get("ple_layer_ids", [])
    if hf.family != "qwen4_exp" or not layer_ids:
        return None
    num_layers = hf.count("num_hidden_layers")
    check(
        all(isinstance(i, int) and 1 <= i <= num_layers for i in layer_ids),
        "ple_layer_ids are one-based and at most num_hidden_layers",
        ple_layer_ids=layer_ids,
        num_hidden_layers=num_layers,
    )
    eos_ids = eos_token_ids(hf)
    check(
        len(eos_ids) > 0, "eos_token_id must be set when PLE layers are used", eos_token_id=eos_ids
    )
    return PleConfig(
        layers=tuple(sorted({layer_id - 1 for layer_id in layer_ids})),
        embed_dim=hf.count("ple_embed_dim", hf.count("hidden_size")),
        conv_width=hf.count("ple_conv_kernel_size", 4),
        ngram_size=hf.count("ngram_size", 3),
        heads_per_ngram=hf.count("heads_per_ngram", 8),
        vocab_base=hf.count("ngram_vocab_size_base", 20_000_000),
        divisor=hf.count("make_ngram_vocab_size_divisible_by", 128),
        seed=hf.count("seed", 1234),
        num_shards=hf.count("split_ngram_parts", 512),
        eos_token_id=eos_ids[0],
    )


def eos_token_ids(hf: HfConfig) -> tuple[int, ...]:
    """Return the end-of-text ids: the text model's if given, else the outer config's."""
    value = hf.get("eos_token_id", hf.outer.get("eos_token_id"))
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    is_ids = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
    check(is_ids, "eos_token_id must be a token id or a list of them", eos_token_id=value)
    return ids


def num_mtp_layers(hf: HfConfig) -> int:
    """Return the MTP layers; the three spellings of the key must agree."""
    nested = hf.get("mtp", {})
    given = {key: hf.text.get(key) for key in ("mtp_num_hidden_layers", "num_mtp_layers")}
    given["mtp.num_hidden_layers"] = nested.get("num_hidden_layers")
    given = {key: value for key, value in given.items() if value is not None}
    check(
        len(set(given.values())) < 2,
        "mtp_num_hidden_layers, num_mtp_layers and mtp.num_hidden_layers must agree",
        **given,
    )
    count = next(iter(given.values()), 0)
    check(count in (0, 1), f"{' and '.join(given)} must be 0 or 1", **given)
    for key, kinds in (
        ("mtp_layer_types", hf.get("mtp_layer_types", None)),
        ("mtp.layer_types", nested.get("layer_types")),
    ):
        is_attention = kinds is None or (
            len(kinds) == count and all(kind in QSA_SPELLINGS for kind in kinds)
        )
        check(is_attention, f"{key} must be one attention layer per MTP layer", **{key: kinds})
    theta = nested.get("rope_theta")
    if theta is not None:
        target = _rope_value(hf, _rope_parameters(hf), "rope_theta", None)
        check(
            theta == target,
            "mtp.rope_theta must equal rope_theta",
            mtp_rope_theta=theta,
            rope_theta=target,
        )
    return count


def dtype_name(hf: HfConfig) -> str:
    """Return the checkpoint's dtype; bfloat16 if not stated."""
    given = [
        str(part[key]).removeprefix("torch.")
        for part in (hf.text, hf.outer)
        for key in ("dtype", "torch_dtype")
        if part.get(key) is not None
    ]
    name = given[0] if given else "bfloat16"
    check(name in DTYPES, f"config key dtype must be one of {', '.join(DTYPES)}", dtype=name)
    return name
