"""Architecture of a DSpark draft model, read from its ``config.json``."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.config_hf import as_flag, as_number
from qwen_hybrid.layer_config import check, check_positive

ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")
NESTED_KEYS = ("dspark_config", "dflash_config")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
# The embedding, as a layer that can be tapped.
EMBEDDING_LAYER = -1
MAX_BLOCK_SIZE = 16
# How several residual streams become one tapped row.
STREAM_REDUCTIONS = ("mean",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN scaling of rotary frequencies.

    Attributes:
        factor: how much longer sequences are than those of ``original_max_positions``.
        beta_fast: rotations over the original length above which a frequency is kept.
        beta_slow: rotations over the original length below which a frequency is divided.
        original_max_positions: sequence length before scaling.
        attention_factor: factor on cosine and sine.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float

    def __post_init__(self) -> None:
        check_positive(self, "original_max_positions")
        check(self.factor >= 1, "rope_scaling.factor must be >= 1", factor=self.factor)
        check(
            self.beta_fast > self.beta_slow > 0,
            "rope_scaling needs beta_fast > beta_slow > 0",
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )
        check(
            self.attention_factor > 0,
            "rope_scaling.attention_factor must be > 0",
            attention_factor=self.attention_factor,
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
        block_size: tokens drafted at once.
        sample_from_anchor: row j gives the token after its own position, the anchor's row the
            first draft; otherwise there is one row more and each gives its own position's token.
        mask_token_id: embedded in the rows after the anchor.
        layer_is_causal: for each layer, whether a block row reads only its own and earlier rows.
        layer_windows: for each layer, the tokens up to its own that a row reads, or None for all.
        target_layer_ids: zero-based target layers whose output is tapped, ascending;
            EMBEDDING_LAYER for the embedding.
        num_target_layers: layers of the target.
        stream_reduction: how a target's several residual streams become one row, one of
            STREAM_REDUCTIONS; None for a target with one stream.
        markov_rank: rank of the head that conditions on the previous token.
        markov_head_type: kind of that head, one of MARKOV_HEADS.
        has_confidence_head: whether a head predicts acceptance.
        confidence_reads_markov: whether that head also reads the previous token's row.
        confidence_temperatures: for each draft, what its confidence logit is divided by.
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
    sample_from_anchor: bool
    mask_token_id: int
    layer_is_causal: tuple[bool, ...]
    layer_windows: tuple[int | None, ...]
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    stream_reduction: str | None
    markov_rank: int
    markov_head_type: str
    has_confidence_head: bool
    confidence_reads_markov: bool
    confidence_temperatures: tuple[float, ...]
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
        self._check_taps()
        check(
            self.markov_head_type in MARKOV_HEADS,
            f"markov_head_type must be one of {', '.join(MARKOV_HEADS)}",
            markov_head_type=self.markov_head_type,
        )
        self._check_block()

    def _check_taps(self) -> None:
        layers = range(EMBEDDING_LAYER, self.num_target_layers)
        ids = self.target_layer_ids
        check(
            len(ids) > 0 and list(ids) == sorted({*ids} & {*layers}),
            "target_layer_ids must ascend, from -1 (the embedding) to below num_target_layers",
            target_layer_ids=ids,
            num_target_layers=self.num_target_layers,
        )
        check(
            self.stream_reduction in (None, *STREAM_REDUCTIONS),
            f"target_stream_reduction must be one of {', '.join(STREAM_REDUCTIONS)}, or absent",
            target_stream_reduction=self.stream_reduction,
        )

    def _check_block(self) -> None:
        check(
            self.block_size <= MAX_BLOCK_SIZE,
            f"block_size must be at most {MAX_BLOCK_SIZE}",
            block_size=self.block_size,
        )
        check(
            self.head_dim % 2 == 0, "head_dim must be even: it is rotated", head_dim=self.head_dim
        )
        for name in ("layer_is_causal", "layer_windows"):
            values = getattr(self, name)
            check(
                len(values) == self.num_layers, f"{name} needs one value a layer", **{name: values}
            )
        check(
            all(window is None or window >= 1 for window in self.layer_windows),
            "sliding_window must be at least 1",
            sliding_window=self.layer_windows,
        )
        temperatures = self.confidence_temperatures
        check(
            len(temperatures) == self.block_size and all(t > 0 for t in temperatures),
            "confidence_temperatures needs one positive value for each of block_size drafts",
            confidence_temperatures=temperatures,
            block_size=self.block_size,
        )

    @property
    def num_rows(self) -> int:
        """Rows of a block: the anchor and masks."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    @property
    def tap_width(self) -> int:
        """Width of the tapped rows of a token, side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    def check_target(self, target: HybridConfig) -> None:
        """Raise an error unless the drafter fits this target.

        Raises:
            ValueError: another width, vocabulary or depth, or residual streams that the drafter
                was not trained on; the message has both values.
        """
        for name, given, mine in (
            ("hidden_size", target.hidden_size, self.hidden_size),
            ("vocab_size", target.vocab_size, self.vocab_size),
            ("num_target_layers", target.num_layers, self.num_target_layers),
        ):
            check(given == mine, f"{name} of draft and target differ", target=given, draft=mine)
        has_streams = target.hyper_connection is not None
        check(
            (self.stream_reduction is not None) == has_streams,
            "the draft's target_stream_reduction must be given exactly for a target with several "
            "residual streams",
            target_stream_reduction=self.stream_reduction,
            target_streams=target.hyper_connection.count if target.hyper_connection else 1,
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
        num_layers, depth = keys.need("num_hidden_layers"), keys.need("num_target_layers")
        block_size = keys.need("block_size", "dspark_block_size")
        taps = keys.get("target_layer_ids", None, "dspark_target_layer_ids")
        return cls(
            vocab_size=keys.need("vocab_size"),
            hidden_size=keys.need("hidden_size"),
            num_layers=num_layers,
            num_heads=keys.need("num_attention_heads"),
            num_kv_heads=keys.need("num_key_value_heads"),
            head_dim=keys.need("head_dim"),
            intermediate_size=keys.need("intermediate_size"),
            rms_norm_eps=as_number("rms_norm_eps", keys.get("rms_norm_eps", 1e-6)),
            block_size=block_size,
            sample_from_anchor=keys.flag("sample_from_anchor", True),
            mask_token_id=keys.need("mask_token_id", "dspark_noise_token_id"),
            layer_is_causal=tuple(kind.is_causal for kind in keys.layers(num_layers)),
            layer_windows=tuple(kind.window for kind in keys.layers(num_layers)),
            target_layer_ids=default_taps(num_layers, depth) if taps is None else tuple(taps),
            num_target_layers=depth,
            stream_reduction=keys.get("target_stream_reduction", None),
            markov_rank=keys.need("markov_rank"),
            markov_head_type=keys.get("markov_head_type", "vanilla"),
            has_confidence_head=keys.flag("enable_confidence_head", False),
            confidence_reads_markov=keys.flag("confidence_head_with_markov", False),
            confidence_temperatures=tuple(
                as_number("confidence_temperatures", value)
                for value in keys.get("confidence_temperatures", [1.0] * block_size)
            ),
            rope_theta=as_number("rope_theta", keys.rope().get("rope_theta")),
            yarn=_yarn(keys.rope()),
            max_position_embeddings=keys.need("max_position_embeddings"),
        )


def default_taps(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Return the layers that a draft of so many layers taps if its config names none.

    They spread evenly from the second to the fourth last; one alone is the middle one.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + index * step) for index in range(num_layers))


@dataclasses.dataclass(frozen=True)
class _LayerKind:
    """What a layer's block rows read: earlier rows only, and how many tokens."""

    is_causal: bool
    window: int | None


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

    def get(self, key: str, default: Any, *aliases: str) -> Any:
        names = (key, *aliases)
        given = [lv[name] for lv in self._levels for name in names if lv.get(name) is not None]
        check(
            all(value == given[0] for value in given),
            f"config key {key} differs between the top level and {' or '.join(NESTED_KEYS)}",
            **{key: given},
        )
        return given[0] if given else default

    def need(self, key: str, *aliases: str) -> Any:
        value = self.get(key, None, *aliases)
        if value is None:
            raise ValueError(
                f"config key {key} is missing, at the top level and in {' and '.join(NESTED_KEYS)}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        return as_flag(key, self.get(key, default))

    def layers(self, num_layers: int) -> list[_LayerKind]:
        """Return the kind of each layer: an explicit `is_causal` holds for all of them."""
        kinds = self.get("layer_types", [LAYER_TYPES[0]] * num_layers)
        check(
            {*kinds} <= {*LAYER_TYPES},
            f"layer_types must be {' or '.join(LAYER_TYPES)}",
            layer_types=kinds,
        )
        sliding = [kind == "sliding_attention" for kind in kinds]
        window = self.need("sliding_window") if any(sliding) else None
        causal = self.get("is_causal", None)
        return [
            _LayerKind(slides if causal is None else as_flag("is_causal", causal), width)
            for slides, width in zip(sliding, [window if s else None for s in sliding], strict=True)
        ]

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
    for key, only in (("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        check(rope.get(key, only) == only, f"rope_scaling.{key} is not supported", **{key: rope})
    factor = as_number("factor", rope["factor"])
    given = rope.get("attention_factor")
    return YarnConfig(
        factor=factor,
        beta_fast=as_number("beta_fast", rope.get("beta_fast", 32)),
        beta_slow=as_number("beta_slow", rope.get("beta_slow", 1)),
        original_max_positions=rope["original_max_position_embeddings"],
        attention_factor=(
            0.1 * math.log(factor) + 1.0 if given is None else as_number("attention_factor", given)
        ),
    )
