"""Attention of a draft block: to its sequence's context in pages, and to its own rows."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.bits import from_bits
from pallas_kernels.index import cut, div, paste, take
from pallas_kernels.struct import static, struct
from qwen_hybrid.state import AttentionState
from spec.dspark.layers import BlockProjection

HIGHEST = lax.Precision.HIGHEST


@struct
class Seats:
    """The sequences that draft, packed: those that do not cost nothing.

    Attributes:
      slot: batch slot of each seat; seats at or beyond `count` repeat some slot.
      count: seats that are taken.
      length: context of each seat's sequence: tokens before the anchor.
      block_table: pages of each seat's sequence.
      num_rows: rows of a block, which lie side by side.
    """

    slot: Int[Array, " B"]
    count: Int[Array, ""]
    length: Int[Array, " B"]
    block_table: Int[Array, "B P"]
    num_rows: int = static()


def block_mask(num_rows: int, *, is_causal: bool, window: int | None) -> Bool[Array, "T T"]:
    """Which rows of its own block each row reads."""
    ahead = jnp.arange(num_rows)[None, :] - jnp.arange(num_rows)[:, None]
    mask = ahead <= 0 if is_causal else jnp.ones((num_rows, num_rows), bool)
    return mask if window is None else mask & (ahead > -window)


@struct
class _Sum:
    """A softmax-weighted sum under way: largest score, sum of weights, weighted sum of values."""

    peak: Float[Array, "K G T"]
    mass: Float[Array, "K G T"]
    out: Float[Array, "K G T H"]


def _first(scores: Array, mask: Bool[Array, "T S"], value: Float[Array, "K S H"]) -> _Sum:
    """Start with keys of which every row reads one at least."""
    peak = jnp.max(jnp.where(mask[None, None], scores, -jnp.inf), axis=-1)
    weight = jnp.where(mask[None, None], jnp.exp(scores - peak[..., None]), 0.0)
    out = jnp.einsum("kgts,ksh->kgth", weight, value, precision=HIGHEST)
    return _Sum(peak, jnp.sum(weight, axis=-1), out)


def _then(
    left: _Sum, scores: Array, mask: Bool[Array, "T S"], value: Float[Array, "K S H"]
) -> _Sum:
    """Add keys, of which a row may read none."""
    visible = mask[None, None]
    peak = jnp.maximum(left.peak, jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1))
    weight = jnp.where(visible, jnp.exp(jnp.where(visible, scores - peak[..., None], 0.0)), 0.0)
    old = jnp.exp(left.peak - peak)
    out = jnp.einsum("kgts,ksh->kgth", weight, value, precision=HIGHEST)
    return _Sum(
        peak,
        left.mass * old + jnp.sum(weight, axis=-1),
        left.out * old[..., None] + out,
    )


def _own_rows(x: Float[Array, "R K H"], seat: Array, num_rows: int) -> Float[Array, "K T H"]:
    rows = cut(x, (seat * num_rows,), (num_rows,)).astype(jnp.float32)
    return jnp.moveaxis(rows, 0, 1)


def _attend_seat(
    projection: BlockProjection,
    pages: AttentionState,
    seats: Seats,
    seat: Int[Array, ""],
    *,
    is_causal: bool,
    window: int | None,
) -> Float[Array, "T N H"]:
    """Attention of one block's rows."""
    num_rows, block = seats.num_rows, pages.value_pages.shape[2]
    heads, width = projection.query.shape[1:]
    kv_heads = projection.key.shape[1]
    query = _own_rows(projection.query, seat, num_rows) * width**-0.5
    query = query.reshape(kv_heads, heads // kv_heads, num_rows, width)
    key, value = (_own_rows(x, seat, num_rows) for x in (projection.key, projection.value))
    scores = jnp.einsum("kgth,ksh->kgts", query, key, precision=HIGHEST)
    mask = block_mask(num_rows, is_causal=is_causal, window=window)
    length = take(seats.length, seat)
    # How far back the block's first row reads, which reads furthest.
    first = jnp.zeros_like(length) if window is None else jnp.maximum(length - window + 1, 0)

    def page(index: Array, total: _Sum) -> _Sum:
        at = index * block + jnp.arange(block)
        written = at < length
        physical = take(seats.block_table, seat, jnp.minimum(index, last))
        keys = from_bits(cut(pages.key_pages, (physical,), (1,))[0]).astype(jnp.float32)
        values = from_bits(cut(pages.value_pages, (physical,), (1,))[0]).astype(jnp.float32)
        # What lies at or beyond the committed length may be anything, NaN too.
        values = jnp.where(written[None, :, None], values, 0.0)
        back = length + jnp.arange(num_rows)[:, None] - at[None, :]
        seen = jnp.broadcast_to(written[None, :], back.shape)
        seen = seen if window is None else seen & (back < window)
        scores = jnp.einsum("kgth,khs->kgts", query, keys, precision=HIGHEST)
        return _then(total, scores, seen, values)

    last = seats.block_table.shape[1] - 1
    start = _first(scores, mask, value)
    total = lax.fori_loop(div(first, block), div(length + (block - 1), block), page, start)
    mixed = total.out / total.mass[..., None]
    return jnp.moveaxis(mixed.reshape(heads, num_rows, width), 0, 1)


def block_attention(
    projection: BlockProjection,
    pages: AttentionState,
    seats: Seats,
    *,
    is_causal: bool,
    window: int | None,
) -> Float[Array, "R N H"]:
    """Attend from each row to its sequence's context and to the rows of its own block.

    Args:
      projection: rows of the blocks side by side, seat after seat.
      pages: context of this layer.
      seats: which sequences.
      is_causal: a row reads no later row of its block.
      window: a row reads so many tokens up to its own; None for all.

    Numerics: float32, the own block first, then pages in ascending order. What a seat gets depends
    on its own rows and pages alone.
    """

    def one(seat: Array, out: Array) -> Array:
        rows = _attend_seat(projection, pages, seats, seat, is_causal=is_causal, window=window)
        return paste(out, rows, (seat * seats.num_rows,))

    start = jnp.zeros(projection.query.shape, jnp.float32)
    return lax.fori_loop(0, seats.count, one, start)
