"""Architecture of a DSpark draft model, read from its ``config.json``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qwen_hybrid.config_hf import as_flag, as_number
from qwen_hybrid.layer_config import check, check_positive

ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")
NESTED_KEYS = ("dspark_config", "dflash_config")
MARKOV_HEADS = ("vanilla",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN scaling of rotary frequencies.

    Attributes:
        factor: how much longer sequences are than those of ``original_max_positions``.
        beta_fast: rotations over the original length above which a frequency is kept.
        beta_slow: rotations over the original length below which a frequency is divided.
        original_max_positions: sequence length before scaling.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int

    def __post_init__(self) -> None:
        check_positive(self, "original_max_positions")
        check(self.factor >= 1, "rope_scaling.factor must be >= 1", factor=self.factor)
        check(
            self.beta_fast > self.beta_slow > 0,
            "rope_scaling needs beta_fast > beta_slow > 0",
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Architecture of a DSpark draft model. Embedding and head are the target's.

    Attributes:
        vocab_size: vocabulary, that of the target.
        hidden_size: width of the residual stream, that of the target.
        num_layers: decoder layers.
        num_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: key and value heads.
        head_dim: width of a head, all of it rotated.
        intermediate_size: width of the MLP.
        rms_norm_eps: epsilon of every norm; the norms are plain, not zero-centred.
        block_size: tokens drafted at once, and query rows.
        mask_token_id: embedded in the rows after the anchor.
        target_layer_ids: zero-based target layers whose output is tapped, in order.
        num_target_layers: layers of the target.
        markov_rank: rank of the head that conditions on the previous token.
        markov_head_type: kind of that head, one of MARKOV_HEADS.
        has_confidence_head: whether a head predicts acceptance.
        confidence_reads_markov: whether that head also reads the previous token's row.
        rope_theta: base of the rotary frequencies.
        yarn: scaling of the rotary frequencies, or None.
        max_position_embeddings: longest sequence.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_rank: int
    markov_head_type: str
    has_confidence_head: bool
    confidence_reads_markov: bool
    rope_theta: float
    yarn: YarnConfig | None
    max_position_embeddings: int

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_layers", "num_heads")
        check_positive(self, "num_kv_heads", "head_dim", "intermediate_size", "block_size")
        check_positive(self, "num_target_layers", "markov_rank", "max_position_embeddings")
        check(
            self.num_heads % self.num_kv_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
        )
        check(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id must be a token id below vocab_size",
            mask_token_id=self.mask_token_id,
            vocab_size=self.vocab_size,
        )
        check(
            len(self.target_layer_ids) > 0
            and all(0 <= layer < self.num_target_layers for layer in self.target_layer_ids),
            "target_layer_ids must be zero-based layers below num_target_layers",
            target_layer_ids=self.target_layer_ids,
            num_target_layers=self.num_target_layers,
        )
        check(
            self.markov_head_type in MARKOV_HEADS,
            f"markov_head_type must be one of {', '.join(MARKOV_HEADS)}",
            markov_head_type=self.markov_head_type,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DSparkConfig":
        """Return the architecture that a parsed ``config.json`` describes.

        Drafter keys may stand at the top level, in ``dspark_config`` or in ``dflash_config``.

        Raises:
            NotImplementedError: another draft architecture, such as DFlash2.
            ValueError: a missing, contradictory or impossible key; the message names it.
        """
        keys = _Keys(config)
        keys.check_architecture()
        return cls(
            vocab_size=keys.need("vocab_size"),
            hidden_size=keys.need("hidden_size"),
            num_layers=keys.need("num_hidden_layers"),
            num_heads=keys.need("num_attention_heads"),
            num_kv_heads=keys.need("num_key_value_heads"),
            head_dim=keys.need("head_dim"),
            intermediate_size=keys.need("intermediate_size"),
            rms_norm_eps=as_number("rms_norm_eps", keys.get("rms_norm_eps", 1e-6)),
            block_size=keys.need("block_size"),
            mask_token_id=keys.need("mask_token_id"),
            target_layer_ids=tuple(keys.need("target_layer_ids")),
            num_target_layers=keys.need("num_target_layers"),
            markov_rank=keys.need("markov_rank"),
            markov_head_type=keys.get("markov_head_type", "vanilla"),
            has_confidence_head=keys.flag("enable_confidence_head"),
            confidence_reads_markov=keys.flag("confidence_head_with_markov"),
            rope_theta=as_number("rope_theta", keys.rope().get("rope_theta")),
            yarn=_yarn(keys.rope()),
            max_position_embeddings=keys.need("max_position_embeddings"),
        )


class _Keys:
    """Keys of a draft config at any of the levels where writers put them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._levels = [config, *(config.get(key) or {} for key in NESTED_KEYS)]

    def check_architecture(self) -> None:
        names = self.need("architectures")
        if not set(names) & set(ARCHITECTURES):
            raise NotImplementedError(
                f"draft architecture {', '.join(names)} is not supported; "
                f"architectures must name one of {', '.join(ARCHITECTURES)}"
            )
        for key, only in (("hidden_act", "silu"), ("attention_bias", False)):
            value = self.get(key, only)
            check(value == only, f"config key {key} must be {only!r}", **{key: value})

    def get(self, key: str, default: Any) -> Any:
        given = [level[key] for level in self._levels if level.get(key) is not None]
        check(
            all(value == given[0] for value in given),
            f"config key {key} differs between the top level and {' or '.join(NESTED_KEYS)}",
            **{key: given},
        )
        return given[0] if given else default

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise ValueError(
                f"config key {key} is missing, at the top level and in {' and '.join(NESTED_KEYS)}"
            )
        return value

    def flag(self, key: str) -> bool:
        return as_flag(key, self.get(key, False))

    def rope(self) -> dict[str, Any]:
        """Return the rotary keys, which stand at the top level or in one of two mappings."""
        nested = self.get("rope_parameters", None) or self.get("rope_scaling", None) or {}
        theta = nested.get("rope_theta", self.get("rope_theta", None))
        if theta is None:
            raise ValueError("config key rope_theta is missing")
        return {**nested, "rope_theta": theta}


def _yarn(rope: Mapping[str, Any]) -> YarnConfig | None:
    """Return the scaling record; None for plain rotary embeddings."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check(
        rope_type in ("default", "yarn"), "rope_type must be default or yarn", rope_type=rope_type
    )
    if rope_type == "default":
        return None
    for key in ("factor", "original_max_position_embeddings"):
        check(key in rope, f"yarn rope_scaling needs {key}", keys=[*rope])
    return YarnConfig(
        factor=as_number("factor", rope["factor"]),
        beta_fast=as_number("beta_fast", rope.get("beta_fast", 32)),
        beta_slow=as_number("beta_slow", rope.get("beta_slow", 1)),
        original_max_positions=rope["original_max_position_embeddings"],
    )
