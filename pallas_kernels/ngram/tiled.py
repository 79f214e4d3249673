"""The n-gram hash on the device, without 64-bit integers.

A 63-bit value is kept as two uint32 (high, low). Exact for token ids below 2^18 and moduli below
2^25; `check_bounds` refuses others.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

MAX_VOCAB = 1 << 18
MAX_MODULUS = 1 << 25
_LOW_PIECES = ((25, 7), (18, 7), (11, 7), (4, 7), (0, 4))


def check_bounds(vocab_size: int, moduli: Sequence[int]) -> None:
    """Raise ValueError where the 32-bit arithmetic would not be exact."""
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"n-gram hash needs vocab_size <= {MAX_VOCAB}, got {vocab_size}")
    if max(moduli) >= MAX_MODULUS:
        raise ValueError(f"n-gram hash needs moduli below {MAX_MODULUS}, got {max(moduli)}")


def _times(token: UInt32[Array, " M"], factor: int) -> tuple[Array, Array]:
    """(high, low) words of token * factor, token below 2^18, factor below 2^63."""
    mask = jnp.uint32(0xFFFF)
    words = [jnp.uint32((factor >> shift) & 0xFFFF) for shift in (0, 16, 32, 48)]
    low_token, high_token = token & mask, token >> 16
    column = [jnp.zeros_like(token) for _ in range(5)]
    for i, word in enumerate(words):
        for j, part in enumerate((low_token, high_token)):
            product = part * word
            column[i + j] = column[i + j] + (product & mask)
            if i + j + 1 < 5:
                column[i + j + 1] = column[i + j + 1] + (product >> 16)
    digits, carry = [], jnp.zeros_like(token)
    for total in column[:4]:
        total = total + carry
        digits.append(total & mask)
        carry = total >> 16
    return digits[2] | (digits[3] << 16), digits[0] | (digits[1] << 16)


def _remainder(high: Array, low: Array, modulus: int) -> Array:
    rest = high % jnp.uint32(modulus)
    for shift, width in _LOW_PIECES:
        piece = (low >> shift) & jnp.uint32((1 << width) - 1)
        rest = ((rest << width) | piece) % jnp.uint32(modulus)
    return rest


def ngram_rows(
    tokens: Sequence[Int[Array, " R"]],
    position: Int[Array, " R"],
    *,
    multipliers: Sequence[int],
    moduli: Sequence[int],
    offsets: Sequence[int],
    heads_per_ngram: int,
    eos: int,
) -> Int[Array, "R heads"]:
    """Table rows of each token: heads of the 2-gram, then of the 3-gram, ...

    A predecessor counts as `eos` once any token between it and the current one is eos, or it lies
    before the sequence. h_n = tok_0 m_0 ^ ... ^ tok_{n-1} m_{n-1}; row = h_n mod modulus + offset.

    Args:
      tokens: the current token, the one before it, ...: as many as the longest n-gram. What
        stands before position 0 is ignored.

    Source: the published hash of the n-gram embedding (docs/design.md).
    """
    high, low = _times(tokens[0].astype(jnp.uint32), multipliers[0])
    cut = jnp.zeros(position.shape, bool)
    columns = []
    for back in range(1, len(multipliers)):
        cut = cut | (tokens[back] == eos) | (position < back)
        token = jnp.where(cut, eos, tokens[back]).astype(jnp.uint32)
        more_high, more_low = _times(token, multipliers[back])
        high, low = high ^ more_high, low ^ more_low
        for head in range((back - 1) * heads_per_ngram, back * heads_per_ngram):
            columns.append(_remainder(high, low, moduli[head]).astype(jnp.int32) + offsets[head])
    return jnp.stack(columns, axis=1)
