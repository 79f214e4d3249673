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
# sequences the ratio of two equally good implementations runs from 0.1 to 2. Hence the limits
# hold for rows pooled over NUM_POOLED sequences, where it stays below 1.02.
BFLOAT16 = BFloat16Parity(rms_ratio=1.25, agreement_loss=0.03)
NUM_POOLED = 8


def float32_parity(name: str) -> Float32Parity:
    """Choose the float32 limits of a small configuration or of a trained demo model."""
    large = name.startswith("demo") or name.endswith("_tied")
    return FLOAT32_LARGE_LOGITS if large else FLOAT32
