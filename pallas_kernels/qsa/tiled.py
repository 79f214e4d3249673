"""QSA in its canonical order.

Groups are ranked by (score, lower index first); a row's chosen tokens are packed in ascending
order, the unfinished group last, and attention runs over spans of that packed list. There is one
path, also when every group is kept.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.online import HIGHEST, empty_partial, finish, merge, span_partial
from pallas_kernels.attention.tiled import SPAN
from pallas_kernels.bits import from_bits
from pallas_kernels.index import div, paste, rem, take
from pallas_kernels.rows import (
    TILE_ROWS,
    Rows,
    Segments,
    map_row_tiles,
    output_rows,
    packed_output,
    previous_rows,
    put_rows,
    segment_rows,
    segments_at,
)
from pallas_kernels.struct import struct


@struct
class Selection:
    """Tokens each row attends to.

    Attributes:
      position: ascending positions, valid up to `count`; then arbitrary but in range.
      count: how many.
    """

    position: Int[Array, "R S"]
    count: Int[Array, " R"]


def pool_raw_keys(
    raw: Float[Array, "R D"],
    ring: Shaped[Array, "B N D"],
    rows: Rows,
    row: Int[Array, " M"],
    *,
    ratio: int,
) -> Float[Array, "M D"]:
    """Float32 mean of the `ratio` raw keys that end at each row, added oldest first.

    Meaningful only where the row completes a group: (position + 1) % ratio == 0.
    """
    total = jnp.zeros((row.shape[0], raw.shape[1]), jnp.float32)
    for offset in reversed(range(ratio)):
        total = total + previous_rows(raw, ring, rows, row, offset).astype(jnp.float32)
    return total / ratio


def _group_scores(
    query: Float[Array, "lanes T N D"], pages: Array, rows: Rows, segs: Segments
) -> Float[Array, "lanes T G"]:
    """Scores of all groups of each lane's table; those not complete yet are arbitrary."""
    head_dim, groups_per_block = query.shape[-1], pages.shape[1]
    num_blocks = rows.block_table.shape[1]
    out = jnp.zeros((*query.shape[:2], num_blocks * groups_per_block), jnp.float32)
    by_head = query.swapaxes(1, 2)

    def block(i: Array, out: Array) -> Array:
        stored = take(pages, take(rows.block_table, segs.slot, i))
        key = from_bits(stored).astype(jnp.float32)
        score = jnp.einsum("lntd,lgd->lntg", by_head, key, precision=HIGHEST)
        total = jnp.sum(jnp.maximum(score, 0.0), axis=1) / head_dim**0.5
        return paste(out, total, (0, 0, i * groups_per_block))

    ends = take(rows.start, segs.slot) + take(rows.count, segs.slot)
    end = jnp.max(jnp.where(segs.is_filled, ends, 0))
    return lax.fori_loop(0, div(end + (rows.block_size - 1), rows.block_size), block, out)


def _pack(
    scores: Float[Array, "M G"], position: Int[Array, " M"], *, ratio: int, budget: int
) -> Selection:
    """The packed token list of each row."""
    num_groups = scores.shape[1]
    complete = div(position + 1, ratio)
    group = jnp.arange(num_groups, dtype=jnp.int32)
    candidate = group[None, :] < complete[:, None]
    # top_k ranks -0.0 below +0.0, and XLA drops an added zero: only a select makes them tie.
    ranked = jnp.where(candidate, jnp.where(scores == 0.0, 0.0, scores), -jnp.inf)
    kept = min(budget // ratio, num_groups)
    _, chosen = lax.top_k(ranked, kept)
    num_chosen = jnp.minimum(complete, kept)
    valid = jnp.arange(kept)[None, :] < num_chosen[:, None]
    chosen = jnp.sort(jnp.where(valid, chosen, num_groups).astype(jnp.int32), axis=1)
    place = jnp.arange(kept * ratio + ratio - 1, dtype=jnp.int32)
    nth = jnp.minimum(div(place, ratio), kept - 1)
    from_group = jnp.take(chosen, nth, axis=1, mode="clip") * ratio + rem(place, ratio)[None, :]
    packed = (num_chosen * ratio)[:, None]
    tail = (complete * ratio)[:, None] + place[None, :] - packed
    token = jnp.where(place[None, :] < packed, from_group, tail)
    count = num_chosen * ratio + (position + 1) - complete * ratio
    return Selection(jnp.clip(token, 0, position[:, None]), count)


def select_tokens(
    query: Float[Array, "R N D"],
    pooled_pages: Shaped[Array, "P groups D"],
    rows: Rows,
    *,
    ratio: int,
    budget: int,
) -> Selection:
    """Choose the tokens of each new row.

    Args:
      query: index queries, normed and rotated.
      pooled_pages: pooled index keys by block, the groups completed by this call included.

    Numerics: score = sum over heads of relu(q . k) / sqrt(D), float32.
    """
    num_groups = rows.block_table.shape[1] * pooled_pages.shape[1]
    width = min(budget // ratio, num_groups) * ratio + ratio - 1

    def step(index: Array, out: Selection) -> Selection:
        segs = segments_at(rows, index)
        q = segment_rows(query, segs).astype(jnp.float32)
        scores = _group_scores(q, pooled_pages, rows, segs)
        position = segs.position.reshape(-1)
        chosen = _pack(scores.reshape(-1, num_groups), position, ratio=ratio, budget=budget)
        by_lane = segs.position.shape
        return Selection(
            put_rows(out.position, rows, index, chosen.position.reshape(*by_lane, width)),
            put_rows(out.count, rows, index, chosen.count.reshape(by_lane)),
        )

    start = Selection(output_rows(rows, width, dtype=jnp.int32), output_rows(rows, dtype=jnp.int32))
    chosen = lax.fori_loop(0, rows.num_steps, step, start)
    return Selection(packed_output(chosen.position, rows), packed_output(chosen.count, rows))


def sparse_attention(
    query: Float[Array, "R N H"],
    key_pages: Shaped[Array, "P K H block"],
    value_pages: Shaped[Array, "P K block H"],
    selection: Selection,
    rows: Rows,
    *,
    scale: float,
) -> Float[Array, "R N H"]:
    """Attend from each new row to its chosen tokens.

    Numerics: float32; spans of the packed list merged in ascending order.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, block = key_pages.shape[1], rows.block_size
    width = selection.position.shape[1]
    span = min(SPAN, -(-width // TILE_ROWS) * TILE_ROWS)
    padding = -width % span
    head = jnp.arange(kv_heads)[None, :, None]
    entry = jnp.arange(head_dim)[None, None, :, None]

    def tile(query: Array, position: Array, count: Array, slot: Array) -> Array:
        shape = (query.shape[0], kv_heads, heads // kv_heads, head_dim)
        q = query.astype(jnp.float32).reshape(shape)
        position = jnp.pad(position, ((0, 0), (0, padding)))
        partial = empty_partial(shape)
        for at in range(0, width + padding, span):
            token = position[:, at : at + span]
            mask = at + jnp.arange(span)[None, :] < count[:, None]
            page = take(rows.block_table, slot[:, None], div(token, block))[:, None, :]
            place = rem(token, block)[:, None, :]

            chosen = take(
                key_pages, page[..., None, :], head[..., None], entry, place[..., None, :]
            )
            key = from_bits(chosen).astype(jnp.float32)
            value = from_bits(take(value_pages, page, head, place)).astype(jnp.float32)
            value = jnp.where(mask[:, None, :, None], value, 0.0)
            scores = jnp.einsum("tkgh,tkhs->tkgs", q, key, precision=HIGHEST) * scale

            def weigh(w: Array, value: Array = value) -> Array:
                return jnp.einsum("tkgs,tksh->tkgh", w, value, precision=HIGHEST)

            partial = merge(partial, span_partial(scores, mask[:, None, None, :], weigh))
        return finish(partial).reshape(query.shape)

    return map_row_tiles(tile, rows, query, selection.position, selection.count, rows.slot)
