"""How the rows of one call are laid out: packed densely, and in tiles at absolute positions.

A call computes `count[b]` new rows for each slot `b`, at positions `start[b] ...`. Row-wise work
sees them packed one after another; work along a sequence sees *segments*: 16-row tiles at
`position mod 16`, so that a row sits at the same place of its tile whatever the call around it.
Both loops have a fixed body and a trip count known only on the device. XLA therefore compiles one
body for one row and for thousands, which is what makes the bits agree on the CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels.index import cut, div, paste, rem, take
from pallas_kernels.struct import static, struct

TILE_ROWS = 16


@struct
class Rows:
    """The rows of one call.

    Attributes:
      slot: sequence slot of each packed row; rows at or beyond `num_rows` repeat a live one.
      position: absolute position of each packed row.
      num_rows: live packed rows.
      start: position of the first new row of each slot.
      row_start: packed index of the first new row of each slot.
      count: new rows of each slot.
      segment_slot, segment_tile: slot and absolute tile (position // 16) of each segment; the
        segments of a slot are consecutive and ascending.
      segment_first: the segment is its slot's first in this call.
      segment_fold: the tile opens past the running state: the block before it is folded in.
      segment_store: where that fold is kept: a state slot, or one past the pool to keep nothing.
      num_segments: live segments.
      block_table: physical block of each logical block of each slot.
      sealed_slot: state slot that each slot starts from.
      sealed_len: the boundary that state stands at.
      block_size: tokens in a block.
    """

    slot: Int[Array, " R"]
    position: Int[Array, " R"]
    num_rows: Int[Array, ""]
    start: Int[Array, " B"]
    row_start: Int[Array, " B"]
    count: Int[Array, " B"]
    segment_slot: Int[Array, " G"]
    segment_tile: Int[Array, " G"]
    segment_first: Bool[Array, " G"]
    segment_fold: Bool[Array, " G"]
    segment_store: Int[Array, " G"]
    num_segments: Int[Array, ""]
    block_table: Int[Array, "B P"]
    sealed_slot: Int[Array, " B"]
    sealed_len: Int[Array, " B"]
    block_size: int = static()

    @property
    def live(self) -> Bool[Array, " R"]:
        """Which packed rows are real."""
        return jnp.arange(self.slot.shape[0]) < self.num_rows


def num_segments_bound(num_rows: int, num_slots: int) -> int:
    """Segments that `num_rows` rows over `num_slots` slots can need at most."""
    return min(num_rows + num_slots, num_rows // TILE_ROWS + 2 * num_slots)


def tiles_of(num_rows: Int[Array, ""]) -> Int[Array, ""]:
    """Tiles that hold `num_rows` packed rows."""
    return div(num_rows + (TILE_ROWS - 1), TILE_ROWS)


def map_tiles(fn: Callable, num_rows: Int[Array, ""], *trees: Any) -> Any:
    """Apply a row-wise function to the first `num_rows` rows, one 16-row tile at a time.

    `fn(*tiles)` gets the trees cut to `[16, ...]` and returns a tree of `[16, ...]` arrays. Rows
    beyond `num_rows` hold arbitrary values: a row's result must not depend on its neighbours.

    Returns:
      The tree of `[R, ...]` results; tiles without live rows are zeros.
    """
    size = jax.tree.leaves(trees)[0].shape[0]

    def spec(a: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((TILE_ROWS, *a.shape[1:]), a.dtype)

    out_spec = jax.eval_shape(fn, *jax.tree.map(spec, trees))
    out = jax.tree.map(lambda s: jnp.zeros((size, *s.shape[1:]), s.dtype), out_spec)

    def body(i: Array, out: Any) -> Any:
        start = (i * TILE_ROWS,)
        tiles = jax.tree.map(lambda a: cut(a, start, (TILE_ROWS,)), trees)
        return jax.tree.map(lambda o, y: paste(o, y, start), out, fn(*tiles))

    return lax.fori_loop(0, tiles_of(num_rows), body, out)


def map_row_tiles(fn: Callable, rows: Rows, *trees: Any) -> Any:
    """`map_tiles` over the packed rows of a call."""
    return map_tiles(fn, rows.num_rows, *trees)


@struct
class Segment:
    """One 16-row tile of one sequence.

    Attributes:
      slot, tile: which sequence, and position // 16.
      position: positions of the tile's rows.
      row: packed index of each, clipped into range.
      live: rows of this call.
      known: rows of this call or committed before it.
    """

    slot: Int[Array, ""]
    tile: Int[Array, ""]
    position: Int[Array, " 16"]
    row: Int[Array, " 16"]
    live: Bool[Array, " 16"]
    known: Bool[Array, " 16"]


def segment_at(rows: Rows, index: Int[Array, ""]) -> Segment:
    """The `index`-th segment of the call."""
    slot, tile = take(rows.segment_slot, index), take(rows.segment_tile, index)
    start, count = take(rows.start, slot), take(rows.count, slot)
    position = tile * TILE_ROWS + jnp.arange(TILE_ROWS, dtype=jnp.int32)
    live = (position >= start) & (position < start + count)
    row = jnp.clip(take(rows.row_start, slot) + position - start, 0, rows.slot.shape[0] - 1)
    return Segment(slot, tile, position, row, live, position < start + count)


def put_rows(out: Array, segment: Segment, values: Array) -> Array:
    """Write the live rows of a segment to their packed places."""
    row = jnp.where(segment.live, segment.row, out.shape[0])
    return out.at[row].set(values, mode="drop", unique_indices=False)


def previous_rows(x: Array, ring: Array, rows: Rows, row: Int[Array, " M"], offset: int) -> Array:
    """Rows `offset` positions before the packed rows `row`: from this call, else from the ring.

    Args:
      x: new rows `[R, ...]`.
      ring: `[B, N, ...]`, position p at p mod N, written up to the call's first row.

    Returns:
      `[M, ...]`; zeros before position 0.
    """
    slot, position = take(rows.slot, row), take(rows.position, row) - offset
    here = position >= take(rows.start, slot)
    old = take(ring, slot, rem(jnp.maximum(position, 0), ring.shape[1]))
    new = take(x, jnp.maximum(row - offset, 0))
    tail = (slice(None),) + (None,) * (x.ndim - 1)
    value = jnp.where(here[tail], new, old)
    return jnp.where((position >= 0)[tail], value, jnp.zeros((), x.dtype))


def write_ring(ring: Array, x: Array, rows: Rows) -> Array:
    """Store the last rows of each slot in its ring."""
    size = ring.shape[1]
    end = take(rows.start + rows.count, rows.slot)
    keep = rows.live & (rows.position >= end - size)
    slot = jnp.where(keep, rows.slot, ring.shape[0])
    return ring.at[slot, rem(rows.position, size)].set(x.astype(ring.dtype), mode="drop")


def write_pages(pages: Array, x: Array, rows: Rows) -> Array:
    """Store rows `[R, ...]` in pages `[P, block_size, ...]` through the block table."""
    block = take(rows.block_table, rows.slot, div(rows.position, rows.block_size))
    block = jnp.where(rows.live, block, pages.shape[0])
    place = rem(rows.position, rows.block_size)
    return pages.at[block, place].set(x.astype(pages.dtype), mode="drop")


@struct
class Seals:
    """What a call does to the running states.

    Attributes:
      stored: the slot's deepest certain boundary is stored by this call.
      boundary: that boundary.
    """

    stored: Bool[Array, " B"]
    boundary: Int[Array, " B"]


def plan_rows(
    *,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    certain: Int[Array, " B"],
    seal_only: Bool[Array, " B"],
    sealed_len: Int[Array, " B"],
    sealed_slot: Int[Array, " B"],
    next_slot: Int[Array, " B"],
    block_table: Int[Array, "B P"],
    max_rows: int,
    num_state_slots: int,
    block_size: int,
) -> tuple[Rows, Seals]:
    """Lay out a call.

    Args:
      start: first new position, equal to the committed length.
      count: new rows.
      certain: leading new rows that will be committed whatever comes: all of a prefill, the first
        of a verify window. Only boundaries at or below start + certain are ever stored.
      seal_only: slots without rows whose due seal is to be stored all the same.
      next_slot: state slot for the next seal, or -1 to let it wait.
      max_rows: packed rows of the program, a multiple of 16.
    """
    num_slots = start.shape[0]
    ends = jnp.cumsum(count)
    num_rows = ends[-1]
    index = jnp.arange(max_rows, dtype=jnp.int32)
    packed = jnp.minimum(index, jnp.maximum(num_rows - 1, 0))
    slot = jnp.minimum(jnp.searchsorted(ends, packed, side="right"), num_slots - 1)
    slot = slot.astype(jnp.int32)
    row_start = ends - count
    position = start[slot] + packed - row_start[slot]

    first_tile = start // TILE_ROWS
    last_tile = jnp.where(count > 0, (start + count - 1) // TILE_ROWS, first_tile)
    tiles = jnp.where((count > 0) | seal_only, last_tile - first_tile + 1, 0)
    tile_ends = jnp.cumsum(tiles)
    segment = jnp.arange(num_segments_bound(max_rows, num_slots), dtype=jnp.int32)
    seg_slot = jnp.minimum(jnp.searchsorted(tile_ends, segment, side="right"), num_slots - 1)
    seg_slot = seg_slot.astype(jnp.int32)
    nth = segment - (tile_ends - tiles)[seg_slot]
    tile = first_tile[seg_slot] + nth
    block_start = tile * TILE_ROWS // block_size * block_size
    opens = jnp.where(
        nth == 0, block_start > sealed_len[seg_slot], tile * TILE_ROWS % block_size == 0
    )
    boundary = jnp.minimum(
        (start + certain) // block_size * block_size,
        last_tile * TILE_ROWS // block_size * block_size,
    )
    stored = (tiles > 0) & (boundary > sealed_len) & (next_slot >= 0)
    keep = opens & stored[seg_slot] & (block_start == boundary[seg_slot])
    rows = Rows(
        slot=slot,
        position=position.astype(jnp.int32),
        num_rows=num_rows,
        start=start,
        row_start=row_start,
        count=count,
        segment_slot=seg_slot,
        segment_tile=tile,
        segment_first=nth == 0,
        segment_fold=opens,
        segment_store=jnp.where(keep, next_slot[seg_slot], num_state_slots),
        num_segments=tile_ends[-1],
        block_table=block_table,
        sealed_slot=sealed_slot,
        sealed_len=sealed_len,
        block_size=block_size,
    )
    return rows, Seals(stored=stored, boundary=boundary)
