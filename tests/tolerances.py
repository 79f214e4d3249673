"""How far our results may be from another implementation's, by dtype. Never loosened.

The laws have no tolerance: there, two runs of our own code agree in every bit.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Float32Parity:
    """Limits against transformers in float32.

    Attributes:
        max_difference: largest difference of any logit.
        decided_margin: a row whose two best logits are further apart has the same argmax.
    """

    max_difference: float
    decided_margin: float


@dataclass(frozen=True)
class BFloat16Parity:
    """Limits relative to what transformers in bfloat16 does to its own float32 result.

    Attributes:
        rms_ratio: our rms error over transformers' rms error.
        agreement_loss: how much smaller our share of rows with the float32 argmax may be.
    """

    rms_ratio: float
    agreement_loss: float


# Two float32 implementations that add in different orders differ by 1e-5 to 9e-5 on logits of
# standard deviation 1 to 2 (transformers against itself in chunks, or against float64).
FLOAT32 = Float32Parity(max_difference=2e-4, decided_margin=1e-3)

# A head tied to embeddings of unit variance makes logits of standard deviation 10, where
# transformers against itself differs by 4.6e-4. Trained models have peaked logits as well.
FLOAT32_LARGE_LOGITS = Float32Parity(max_difference=1e-3, decided_margin=1e-3)

# Both round activations at about the same places, so neither may be much worse. The error of one
# sequence comes mostly from a few rows where a router or a selection flips: over single
# sequences the ratio of two equally good implementations runs from 0.4 to 2.3. Hence the limits
# hold for rows pooled over several sequences, where it runs from 0.8 to 1.07.
BFLOAT16 = BFloat16Parity(rms_ratio=1.25, agreement_loss=0.03)


def float32_parity(name: str) -> Float32Parity:
    """Choose the float32 limits of a small configuration or of a trained demo model."""
    large = name.startswith("demo") or name.endswith("_tied")
    return FLOAT32_LARGE_LOGITS if large else FLOAT32


# Operators against float64, on inputs of unit scale.

# Sums of a few dozen float32 products, and functions of them: measured up to 2e-6.
FLOAT32_SUM = 1e-5

# Softmax and its weighted sum over some hundred keys: measured up to 2e-6.
ATTENTION = 1e-5

# A probability, and the log of one, of a few thousand: one or two units in the last place.
PROBABILITY = 1e-6
LOG_PROBABILITY = 1e-6

# Equal keys without decay: errors of earlier rows add up. Measured 2e-5.
GDN_HARD_INPUTS = 1e-4

# Three roundings to bfloat16 inside an expert, on outputs of standard deviation 0.7.
EXPERTS_BFLOAT16 = 2e-2


@dataclass(frozen=True)
class GdnLimits:
    """Limits on the relative rms error of the log form.

    Attributes:
        output: of the outputs.
        state: of the sealed state.
    """

    output: float
    state: float


# With a bfloat16 log, each pseudo-value is rounded once: 1.7e-3. A state rounded to bfloat16 as
# well has 2.5e-3; rounded to a pair, no more than it had. Half as much again is allowed, as for
# the table of errors over long sequences.
_GDN_LIMITS = {
    ("float32", "float32"): GdnLimits(output=5e-7, state=6e-7),
    ("float32", "bfloat16"): GdnLimits(output=2.7e-3, state=2.8e-3),
    ("bfloat16", "bfloat16"): GdnLimits(output=2.7e-3, state=3.7e-3),
    ("bfloat16_pair", "bfloat16"): GdnLimits(output=2.7e-3, state=2.8e-3),
}


def gdn_limits(state_dtype: str, log_dtype: str) -> GdnLimits:
    """Choose the limits for a type of sealed states and a type of the log."""
    return _GDN_LIMITS[state_dtype, log_dtype]


def rounding(dtype: str) -> float:
    """Relative error of an elementwise result in `dtype`: one rounding of a float32 result."""
    # Half a unit in the last place of bfloat16; the float32 result itself is 1e-6 off.
    return 1e-6 + (2**-8 if dtype == "bfloat16" else 0.0)


def product_error(width: int) -> float:
    """Largest error of a float32 sum of `width` products of unit variance.

    Partial sums grow as the root of their length, so rounding errors of 2^-24 relative to them add
    up to about 2^-24 width; the largest of many is a few times that.
    """
    return 2.0**-23 * (width + 8)


def num_pooled(name: str) -> int:
    """Choose over how many sequences of 134 tokens the bfloat16 limits hold."""
    # With one layer, one row in a hundred flips: eight sequences hold too few of them.
    return 32 if name == "q4_mtp_layer" else 8
