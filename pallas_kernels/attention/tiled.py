"""Causal attention over paged keys: 16-row query tiles, key spans at absolute positions."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention.online import HIGHEST, empty_partial, finish, merge, span_partial
from pallas_kernels.index import div, take
from pallas_kernels.masked import sum_seen
from pallas_kernels.rows import TILE_ROWS, Rows, Segment, put_rows, segment_at

SPAN = 256


def _span(pages: Array, rows: Rows, seg: Segment, span: Array) -> Array:
    """`SPAN` consecutive positions of a sequence, rows beyond the table repeat its last block."""
    blocks = SPAN // rows.block_size
    logical = jnp.minimum(span * blocks + jnp.arange(blocks), rows.block_table.shape[1] - 1)
    table = take(rows.block_table, seg.slot, logical)
    return take(pages, table).reshape(SPAN, *pages.shape[2:]).astype(jnp.float32)


def paged_attention(
    query: Float[Array, "R N H"],
    key_pages: Float[Array, "P block K H"],
    value_pages: Float[Array, "P block K H"],
    rows: Rows,
    *,
    scale: float,
) -> Float[Array, "R N H"]:
    """Attend from each new row to every position at or below its own.

    Args:
      key_pages, value_pages: the rows of this call already written.

    Numerics: float32 products and softmax; spans of 256 positions merged in ascending order.
    """
    heads, head_dim = query.shape[1:]
    kv_heads = key_pages.shape[2]
    shape = (TILE_ROWS, kv_heads, heads // kv_heads, head_dim)

    def segment(index: Array, out: Array) -> Array:
        seg = segment_at(rows, index)
        q = take(query, seg.row).astype(jnp.float32).reshape(shape)
        end = take(rows.start, seg.slot) + take(rows.count, seg.slot)

        def span(s: Array, partial):
            position = s * SPAN + jnp.arange(SPAN)
            written = (position < end)[:, None, None]
            key = jnp.where(written, _span(key_pages, rows, seg, s), 0.0)
            value = jnp.where(written, _span(value_pages, rows, seg, s), 0.0)
            scores = jnp.einsum("tkgh,skh->tkgs", q, key, precision=HIGHEST) * scale
            mask = position[None, :] <= seg.position[:, None]

            def weigh(w: Array) -> Array:
                def product(v: Array) -> Array:
                    return jnp.einsum("tkgs,skh->tkgh", w, v, precision=HIGHEST)

                return sum_seen(product, value, mask)

            return merge(partial, span_partial(scores, mask, weigh))

        last = jnp.minimum(seg.tile * TILE_ROWS + TILE_ROWS, end)
        spans = div(last + (SPAN - 1), SPAN)
        partial = lax.fori_loop(0, spans, span, empty_partial(shape))
        return put_rows(out, seg, finish(partial).reshape(TILE_ROWS, heads, head_dim))

    return lax.fori_loop(0, rows.num_segments, segment, jnp.zeros(query.shape, jnp.float32))
