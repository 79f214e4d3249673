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
from pallas_kernels.index import cut, div, rem, take
from pallas_kernels.rows import (
    Rows,
    Segment,
    by_lane,
    put_rows,
    segment_rows,
    segments_at,
    with_margin,
    without_margin,
)
from pallas_kernels.struct import struct

SPAN = 128


def _span(pages: Array, rows: Rows, seg: Segment, span: Array, axis: int) -> Array:
    """`SPAN` positions of a sequence along an axis; beyond the table its last block repeats."""
    blocks = SPAN // rows.block_size
    last = rows.block_table.shape[1] - 1
    parts = []
    for i in range(blocks):
        block = take(rows.block_table, seg.slot, jnp.minimum(span * blocks + i, last))
        parts.append(cut(pages, (block,), (1,))[0])
    return from_bits(jnp.concatenate(parts, axis=axis)).astype(jnp.float32)


@struct
class _Queries:
    """The rows of each lane's tile.

    Attributes:
      query: by key head and query head of its group.
      position: of each row.
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
    written = (at[None, :] < tile.end[:, None])[:, None, :, None]
    scores = jnp.einsum("lkgth,lkhs->lkgts", tile.query, key, precision=HIGHEST)
    mask = at[None, None, :] <= tile.position[:, :, None]
    # Zero times NaN is NaN: of the rows written, only those of the tile itself are unseen by some.
    is_bad = (at[None, None, :] == tile.position[:, :, None]) & ~tile.value_is_finite[:, :, None]
    # Worked out once: fused into the select it would be worked out for every element.
    use = lax.optimization_barrier(written & ~jnp.any(is_bad, axis=1)[:, None, :, None])
    spoiled = jnp.any(mask & jnp.any(is_bad, axis=1)[:, None, :], axis=2)[:, None, None, :, None]
    clean = jnp.where(use, value, 0.0)

    def weigh(w: Array) -> Array:
        total = jnp.einsum("lkgts,lksh->lkgth", w, clean, precision=HIGHEST)
        return jnp.where(spoiled, jnp.nan, total)

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
    packed = with_margin(query)
    lanes, size = rows.shape.lanes, rows.shape.segment
    shape = (lanes, kv_heads, heads // kv_heads, size, head_dim)

    def step(index: Array, out: Array) -> Array:
        segs = segments_at(rows, index)
        tile = _queries(packed, value_pages, rows, segs, shape)

        def span(s: Array, partial: Partial) -> Partial:
            key = by_lane(lambda seg: _span(key_pages, rows, seg, s, 2), segs)
            value = by_lane(lambda seg: _span(value_pages, rows, seg, s, 1), segs)
            at = s * SPAN + jnp.arange(SPAN)
            return merge(partial, _attend_span(tile, key, value, at, scale))

        spans = div(jnp.max(tile.end) + (SPAN - 1), SPAN)
        mixed = finish(lax.fori_loop(0, spans, span, empty_partial(shape)))
        for lane, seg in enumerate(segs):
            by_row = jnp.moveaxis(mixed[lane], 2, 0).reshape(size, heads, head_dim)
            out = put_rows(out, seg, by_row)
        return out

    start = jnp.zeros(packed.shape, jnp.float32)
    return without_margin(lax.fori_loop(0, rows.num_steps, step, start))


def _queries(
    packed: Array, value_pages: Array, rows: Rows, segs: list[Segment], shape: tuple[int, ...]
) -> _Queries:
    lanes, kv_heads, group, size, head_dim = shape
    query = by_lane(lambda seg: segment_rows(packed, seg), segs).astype(jnp.float32)
    query = jnp.moveaxis(query.reshape(lanes, size, kv_heads, group, head_dim), 1, 3)

    def value(seg: Segment) -> Array:
        block = take(rows.block_table, seg.slot, div(seg.start, rows.block_size))
        place = rem(seg.start, rows.block_size)
        return cut(value_pages, (block, 0, place), (1, kv_heads, size))[0]

    finite = jnp.isfinite(from_bits(by_lane(value, segs)).astype(jnp.float32))
    ends = [jnp.max(jnp.where(seg.live, seg.position + 1, 0)) for seg in segs]
    position = jnp.stack([seg.position for seg in segs])
    return _Queries(query, position, jnp.stack(ends), jnp.all(finite, axis=(1, 3)))
