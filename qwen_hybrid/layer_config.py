"""Frozen records of what one layer type is made of, validated when they are made.

Every record is hashable, so that it can be a static argument of a jitted function. Reading the
key names of a checkpoint's ``config.json`` is the business of :mod:`qwen_hybrid.config_hf`.
"""

import dataclasses
import enum

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK_64 = 2**64 - 1
MAX_INT64 = 2**63 - 1
# Distance between the hash seeds of two n-gram tables of one model.
TABLE_SEED_STEP = 10007


def check(is_valid: bool, rule: str, **values: object) -> None:
    """Raise a ValueError that states the rule and the values that break it."""
    if not is_valid:
        got = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ValueError(f"{rule}; got {got}")


def check_positive(record: object, *names: str) -> None:
    """Raise a ValueError unless every named field of the record is an integer >= 1."""
    for name in names:
        value = getattr(record, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        check(is_count, f"{type(record).__name__}.{name} must be an integer >= 1", **{name: value})


class LayerKind(enum.Enum):
    """Token mixer of a layer; the value is the spelling used in ``layer_types``."""

    GDN = "linear_attention"
    ATTENTION = "full_attention"
    QSA = "indexed_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GdnConfig:
    """Gated DeltaNet mixer.

    Attributes:
        num_key_heads: heads of q and k.
        num_value_heads: heads of v, a multiple of the key heads; value head j reads key head
            ``j // (num_value_heads // num_key_heads)``.
        key_dim: width of a key head.
        value_dim: width of a value head.
        conv_width: taps of the causal convolution, the current row included.
        gate: activation of the output gate, ``"silu"`` or ``"sigmoid"``.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate: str

    def __post_init__(self) -> None:
        check_positive(self, "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        check_positive(self, "conv_width")
        check(
            self.num_value_heads % self.num_key_heads == 0,
            "linear_num_value_heads must be a multiple of linear_num_key_heads",
            linear_num_value_heads=self.num_value_heads,
            linear_num_key_heads=self.num_key_heads,
        )
        check(
            self.gate in ("silu", "sigmoid"),
            "output_gate_type must be silu (swish) or sigmoid",
            output_gate_type=self.gate,
        )

    @property
    def key_width(self) -> int:
        """Columns of all key heads together."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Columns of all value heads together."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_width + self.value_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Gated softmax attention, also the attention inside a QSA layer.

    Attributes:
        num_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        rotary_dim: leading columns of a head that are rotated; even, may be 0.
        rope_theta: base of the rotary frequencies.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "num_kv_heads", "head_dim")
        check(
            self.num_heads % self.num_kv_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
        )
        check(
            0 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            "int(head_dim * partial_rotary_factor) must be even and within 0..head_dim",
            rotary_dim=self.rotary_dim,
            head_dim=self.head_dim,
        )
        check(self.rope_theta > 0, "rope_theta must be positive", rope_theta=self.rope_theta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts with one shared expert.

    Attributes:
        num_experts: routed experts.
        top_k: routed experts per token.
        intermediate_size: width of a routed expert.
        shared_intermediate_size: width of the shared expert.
        renormalize: whether the chosen router weights are divided by their sum.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    renormalize: bool

    def __post_init__(self) -> None:
        check_positive(self, "num_experts", "top_k", "intermediate_size")
        check_positive(self, "shared_intermediate_size")
        check(
            self.top_k <= self.num_experts,
            "num_experts_per_tok must be at most num_experts",
            num_experts_per_tok=self.top_k,
            num_experts=self.num_experts,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnectionConfig:
    """Hyper-connections: several residual streams instead of one.

    Attributes:
        count: residual streams, at least 2.
        lowrank: rank of the input mix.
    """

    count: int
    lowrank: int

    def __post_init__(self) -> None:
        check_positive(self, "count", "lowrank")
        check(self.count > 1, "hc_count must be greater than 1", hc_count=self.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QsaConfig:
    """Indexer of Qwen Sparse Attention.

    Attributes:
        num_heads: index query heads; there is one index key head.
        head_dim: width of an index head.
        budget: tokens selected per query, a multiple of ``ratio``.
        ratio: tokens of a group, which share one index key.
    """

    num_heads: int
    head_dim: int
    budget: int
    ratio: int

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim", "budget", "ratio")
        check(
            self.budget % self.ratio == 0,
            "indexer_budget must be a multiple of indexer_compress_ratio",
            indexer_budget=self.budget,
            indexer_compress_ratio=self.ratio,
        )

    @property
    def budget_groups(self) -> int:
        """Groups selected per query."""
        return self.budget // self.ratio

    @property
    def max_tokens(self) -> int:
        """Most tokens one query attends to: the budget and an unfinished group."""
        return self.budget + self.ratio - 1


@dataclasses.dataclass(frozen=True)
class NgramTable:
    """Hash constants of one n-gram table, as exact Python integers.

    Attributes:
        multipliers: one odd multiplier per token of the longest n-gram, the current token first.
        moduli: one prime per head, heads of the 2-gram first.
        offsets: first row of each head.
        num_rows: rows of the table, padding included.
    """

    multipliers: tuple[int, ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PleConfig:
    """Per-layer embedding of n-grams.

    Attributes:
        layers: zero-based indices of the layers that have one, ascending. The checkpoint key
            ``ple_layer_ids`` is one-based.
        embed_dim: columns of the concatenated table rows of a token.
        conv_width: taps of the dilated causal convolution.
        ngram_size: longest n-gram; also the dilation.
        heads_per_ngram: hash heads of each n-gram order.
        vocab_base: the heads' moduli are the primes from this number on.
        divisor: the rows of a table are padded to a multiple of this.
        seed: seed of the hash multipliers.
        num_shards: pieces in which checkpoints store a table.
        eos_token_id: the token that cuts n-grams.
    """

    layers: tuple[int, ...]
    embed_dim: int
    conv_width: int
    ngram_size: int
    heads_per_ngram: int
    vocab_base: int
    divisor: int
    seed: int
    num_shards: int
    eos_token_id: int

    def __post_init__(self) -> None:
        check_positive(self, "embed_dim", "conv_width", "heads_per_ngram", "vocab_base")
        check_positive(self, "divisor", "num_shards")
        check(self.ngram_size >= 2, "ngram_size must be at least 2", ngram_size=self.ngram_size)
        check(
            len(self.layers) > 0 and list(self.layers) == sorted(set(self.layers)),
            "PLE layers must be non-empty, ascending and distinct",
            layers=self.layers,
        )
        check(
            self.embed_dim % self.num_heads == 0,
            "ple_embed_dim must be a multiple of (ngram_size - 1) * heads_per_ngram",
            ple_embed_dim=self.embed_dim,
            ngram_size=self.ngram_size,
            heads_per_ngram=self.heads_per_ngram,
        )
        check(
            self.eos_token_id >= 0,
            "eos_token_id must be set when PLE layers are used",
            eos_token_id=self.eos_token_id,
        )

    @property
    def num_heads(self) -> int:
        """Table rows of a token."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def row_width(self) -> int:
        """Columns of a table row."""
        return self.embed_dim // self.num_heads

    @property
    def conv_window(self) -> int:
        """Earlier rows that the dilated convolution reads."""
        return (self.conv_width - 1) * self.ngram_size

    def table(self, rank: int, vocab_size: int) -> NgramTable:
        """Return the hash constants of the table of the PLE layer with this rank.

        Args:
            rank: index of the layer in ``layers``.
            vocab_size: vocabulary of the text model.

        Source: the hash of the n-gram embedding in transformers' ``qwen4_exp`` model.
        """
        moduli = _primes_from(self.vocab_base, rank * self.num_heads, self.num_heads)
        offsets = tuple(sum(moduli[:head]) for head in range(self.num_heads))
        num_rows = -(-sum(moduli) // self.divisor) * self.divisor
        # Products of an odd multiplier below 2 * half and a token id stay below 2**63.
        half = max(1, (MAX_INT64 // vocab_size) // 2)
        base = self.seed + TABLE_SEED_STEP * rank
        multipliers = tuple(
            2 * (_splitmix64(base + GOLDEN_GAMMA * (index + 1)) % half) + 1
            for index in range(self.ngram_size)
        )
        return NgramTable(multipliers, moduli, offsets, num_rows)


def _splitmix64(value: int) -> int:
    """Return the output of one step of the splitmix64 generator started at ``value``."""
    value = (value + GOLDEN_GAMMA) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _primes_from(start: int, skip: int, count: int) -> tuple[int, ...]:
    """Return ``count`` consecutive primes >= ``start``, after the first ``skip`` of them."""
    primes: list[int] = []
    candidate = max(start, 2)
    while len(primes) < skip + count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return tuple(primes[skip:])


def _is_prime(number: int) -> bool:
    """Return whether the number (>= 2) is prime, by trial division."""
    if number % 2 == 0:
        return number == 2
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
    return True
