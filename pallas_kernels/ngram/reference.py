"""N-gram table rows of a token sequence, in exact 64-bit integers on the host."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer


@runtime_checkable
class NgramTableLike(Protocol):
    """The constants of one hashed table: exact Python ints.

    Attributes:
      multipliers: One per token of the longest n-gram, current token first.
      moduli: One per head, all heads of the 2-gram first, then those of the 3-gram, ...
      offsets: First table row of each head.
    """

    @property
    def multipliers(self) -> tuple[int, ...]: ...

    @property
    def moduli(self) -> tuple[int, ...]: ...

    @property
    def offsets(self) -> tuple[int, ...]: ...


def ngram_rows(
    ids: Integer[np.ndarray, " T"],
    table: NgramTableLike,
    *,
    ngram_size: int,
    heads_per_ngram: int,
    eos: int,
) -> Int[np.ndarray, "T heads"]:
    """Return the table rows that each token and its predecessors select.

    With tok_s the token s places back (eos if any of the s tokens before this one is eos or lies
    before the sequence), h_n = xor over s < n of tok_s * multiplier_s, and head q of the n-gram
    reads row h_n % modulus_q + offset_q.

    Args:
      ids: Tokens from the start of the sequence, each below the vocabulary size that the
        multipliers were made for (products then fit 63 bits).
      table: Hash constants of the layer.
      ngram_size: Longest n-gram, at least 2.
      heads_per_ngram: Heads per n-gram length.
      eos: The token that ends a document; the current token itself may be eos.
    """
    tokens = np.asarray(ids, np.int64)
    hashed = tokens * table.multipliers[0]
    cut = np.zeros(tokens.shape, bool)
    columns = []
    for back in range(1, ngram_size):
        earlier = np.concatenate([np.full(back, eos, np.int64), tokens])[: tokens.size]
        cut = cut | (earlier == eos)
        hashed = hashed ^ (np.where(cut, eos, earlier) * table.multipliers[back])
        first = (back - 1) * heads_per_ngram
        for head in range(first, first + heads_per_ngram):
            columns.append(hashed % table.moduli[head] + table.offsets[head])
    return np.stack(columns, axis=1)
