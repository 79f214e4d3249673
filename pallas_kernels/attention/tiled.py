"""Causal attention over paged keys: query tiles and key spans at absolute positions."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.attention.online import (
    HIGHEST,
    Partial,
    empty_partial,
    finish,
    merge,
    span_partial,
)
from pallas_kernels.bits import from_bits
from pallas_kernels.index import blocks, div, rem, take
from pallas_kernels.rows import (
    Rows,
    Segments,
    output_rows,
    packed_output,
    put_rows,
    segment_rows,
    segments_at,
)
from pallas_kernels.struct import struct

SPAN = 128


def _span(
    pages: Shaped[Array, "P K _ _"], rows: Rows, segs: Segments, span: Int[Array, ""], *, axis: int
) -> Float[Array, "lanes K _ _"]:
    """`SPAN` positions of each lane's sequence along an axis; beyond the table its last block
    repeats."""
    count, last = SPAN // rows.block_size, rows.block_table.shape[1] - 1
    parts = []
    # A read for each block of the span: XLA joins arrays fast, but not what it reads on the way.
    for i in range(count):
        block = take(rows.block_table, segs.slot, jnp.minimum(span * count + i, last))
        parts.append(from_bits(take(pages, block)).astype(jnp.float32))
    return jnp.concatenate(parts, axis=axis)


@struct
class _Queries:
    """The rows of each lane's tile.

    Attributes:
      query: by key head and query head of its group.
      position: of each row; the first is a multiple of their number.
      end: one past the last of them; a lane without rows ends at 0.
      value_is_finite: of each row.
    """

    query: Float[Array, "lanes K G T H"]
    position: Int[Array, "lanes T"]
    end: Int[Array, " lanes"]
    value_is_finite: Bool[Array, "lanes T"]


def _attend_span(
    tile: _Queries, key: Array, value: Array, at: Int[Array, " S"], scale: float
) -> Partial:
    """Attention of each lane's rows to one span at positions `at`.

    Args:
      key, value: `[lanes, K, H, S]` and `[lanes, K, S, H]`.
    """
    scores = jnp.einsum("lkgth,lkhs->lkgts", tile.query, key, precision=HIGHEST)
    is_bad = ~tile.value_is_finite
    # Zero times NaN is NaN: of the rows written, only those of the tile itself are unseen by some.
    nth = at[None, :] - tile.position[:, :1]
    is_own = (nth >= 0) & (nth < is_bad.shape[1])
    own = jnp.take_along_axis(is_bad, jnp.clip(nth, 0, is_bad.shape[1] - 1), axis=1)
    use = (at[None, :] < tile.end[:, None]) & ~(is_own & own)
    is_here = (tile.position[:, :1] >= at[0]) & (tile.position[:, :1] <= at[-1])
    seen = jnp.tril(jnp.ones((is_bad.shape[1],) * 2, bool))
    spoiled = is_here & jnp.any(seen[None] & is_bad[:, None, :], axis=2)
    mask = at[None, None, :] <= tile.position[:, :, None]
    clean = jnp.where(use[:, None, :, None], value, 0.0)

    def weigh(w: Array) -> Array:
        total = jnp.einsum("lkgts,lksh->lkgth", w, clean, precision=HIGHEST)
        return jnp.where(spoiled[:, None, None, :, None], jnp.nan, total)

    return span_partial(scores * scale, mask[:, None, None], weigh)


def paged_attention(
    query: Float[Array, "R N H"],
    key_pages: Shaped[Array, "P K H block"],
    value_pages: Shaped[Array, "P K block H"],
    rows: Rows,
    *,
    scale: float,
) -> Float[Array, "R N H"]:
    """Attend from each new row to every position at or below its own.

    Args:
      key_pages, value_pages: the rows of this call already written.

    Numerics: float32 products and softmax; spans of 128 positions merged in ascending order.
    """
    heads, head_dim = query.shape[1:]
    kv_heads = key_pages.shape[1]
    lanes, size = rows.shape.lanes, rows.shape.segment
    shape = (lanes, kv_heads, heads // kv_heads, size, head_dim)

    def step(index: Array, out: Array) -> Array:
        segs = segments_at(rows, index)
        tile = _queries(query, value_pages, rows, segs, shape)

        def span(s: Array, partial: Partial) -> Partial:
            key = _span(key_pages, rows, segs, s, axis=3)
            value = _span(value_pages, rows, segs, s, axis=2)
            at = s * SPAN + jnp.arange(SPAN)
            return merge(partial, _attend_span(tile, key, value, at, scale))

        spans = div(jnp.max(tile.end) + (SPAN - 1), SPAN)
        mixed = finish(lax.fori_loop(0, spans, span, empty_partial(shape)))
        by_row = jnp.moveaxis(mixed, 3, 1).reshape(lanes, size, heads, head_dim)
        return put_rows(out, rows, index, by_row)

    out = lax.fori_loop(0, rows.num_steps, step, output_rows(rows, heads, head_dim))
    return packed_output(out, rows)


def _queries(
    query: Array, value_pages: Array, rows: Rows, segs: Segments, shape: tuple[int, ...]
) -> _Queries:
    lanes, kv_heads, group, size, head_dim = shape
    own = segment_rows(query, segs).astype(jnp.float32)
    own = jnp.moveaxis(own.reshape(lanes, size, kv_heads, group, head_dim), 1, 3)
    block = take(rows.block_table, segs.slot, div(segs.start, rows.block_size))
    index = jnp.stack((block, rem(segs.start, rows.block_size)), axis=-1)
    sizes = (1, kv_heads, size, head_dim)
    value = blocks(value_pages, index, axes=(0, 2), sizes=sizes)[:, 0]
    finite = jnp.isfinite(from_bits(value).astype(jnp.float32))
    end = jnp.max(jnp.where(segs.live, segs.position + 1, 0), axis=1)
    return _Queries(own, segs.position, end, jnp.all(finite, axis=(1, 3)))
