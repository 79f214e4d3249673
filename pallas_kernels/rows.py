"""How the rows of one call are laid out: packed densely, and in tiles at absolute positions.

A call computes `count[b]` new rows for each slot `b`, at positions `start[b] ...`. Row-wise work
sees them packed one after another; work along a sequence sees *segments*: tiles at absolute
positions, so that a row sits at the same place of its tile whatever the call around it. A step of
that loop computes one segment in each lane, always of different slots. Both loops have a fixed body
and a trip count known only on the device: one body serves a program's every call. A program for
one tile of rows needs no loop over them.

Programs for few rows compute fewer at a time than programs for many (`Shape`). On the CPU that
changes no bit: XLA's small products (`x W`, `W` stored by rows of the contracted axis) add in the
same order for 2 to 32 rows, which `tests/pallas_kernels/test_row_invariance.py` checks on every
machine.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.bits import from_bits, storage_dtype, to_bits
from pallas_kernels.index import cut, div, paste, rem, take
from pallas_kernels.struct import static, struct

TILE_ROWS = 16
# Rows before and after packed rows, so that a segment's window never leaves the array.
MARGIN = TILE_ROWS


@dataclasses.dataclass(frozen=True)
class Shape:
    """How much one trip of each loop computes.

    Attributes:
      rows: packed rows of a row-wise tile.
      few: rows that are computed of a tile with no more live ones; 0 computes all always.
      segment: rows of a segment; it divides 16.
      lanes: segments of a step. They share the cost of many small kernels; an empty one wastes its
        arithmetic.
    """

    rows: int
    few: int
    segment: int
    lanes: int


DECODE = Shape(rows=TILE_ROWS, few=8, segment=4, lanes=4)
PREFILL = Shape(rows=TILE_ROWS, few=0, segment=TILE_ROWS, lanes=1)
DECODE_ROWS = 64


def shape_of(num_rows: int) -> Shape:
    """The shape of a program for at most that many packed rows."""
    return DECODE if num_rows <= DECODE_ROWS else PREFILL


@struct
class Segments:
    """One tile of one sequence in each lane; an empty lane has no live rows.

    Attributes:
      slot, start: which sequence, and the tile's first position.
      position: positions of the tile's rows.
      row: packed indices of the tile's rows; arbitrary but valid for those that are not live.
      window: packed index of the tile's first row, counted with the margin.
      is_filled: the lane has a segment.
      live: rows of this call.
      known: rows of this call or committed before it.
    """

    slot: Int[Array, "*G lanes"]
    start: Int[Array, "*G lanes"]
    position: Int[Array, "*G lanes T"]
    row: Int[Array, "*G lanes T"]
    window: Int[Array, "*G lanes"]
    is_filled: Bool[Array, "*G lanes"]
    live: Bool[Array, "*G lanes T"]
    known: Bool[Array, "*G lanes T"]


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
      segments: those of each step. A slot keeps its lane; its segments come in consecutive steps.
      place: of each packed row among the rows of all segments, those of a step side by side.
      lane_first: the segment is its slot's first in this call.
      lane_fold: the tile opens past the running state: the block before it is folded in.
      lane_store: where that fold is kept: a state slot, or one past the pool to keep nothing.
      num_steps: live steps.
      block_table: physical block of each logical block of each slot.
      sealed_slot: state slot that each slot starts from.
      sealed_len: the boundary that state stands at.
      block_size: tokens in a block.
      shape: of the program's loops.
    """

    slot: Int[Array, " R"]
    position: Int[Array, " R"]
    num_rows: Int[Array, ""]
    start: Int[Array, " B"]
    row_start: Int[Array, " B"]
    count: Int[Array, " B"]
    segments: Segments
    place: Int[Array, " R"]
    lane_first: Bool[Array, "G lanes"]
    lane_fold: Bool[Array, "G lanes"]
    lane_store: Int[Array, "G lanes"]
    num_steps: Int[Array, ""]
    block_table: Int[Array, "B P"]
    sealed_slot: Int[Array, " B"]
    sealed_len: Int[Array, " B"]
    block_size: int = static()
    shape: Shape = static(PREFILL)

    @property
    def live(self) -> Bool[Array, " R"]:
        """Which packed rows are real."""
        return jnp.arange(self.slot.shape[0]) < self.num_rows

    @property
    def is_small(self) -> bool:
        """Whether the program is one for few rows."""
        return self.slot.shape[0] <= DECODE_ROWS


def num_segments_bound(num_rows: int, num_slots: int, segment: int) -> int:
    """Segments that `num_rows` rows over `num_slots` slots can need at most."""
    return min(num_rows + num_slots, num_rows // segment + 2 * num_slots)


def map_tiles(fn: Callable, num_rows: Int[Array, ""], *trees: Any) -> Any:
    """Apply a row-wise function to the first `num_rows` rows, one tile at a time.

    `fn(*tiles)` gets the trees cut to `[tile, ...]` and returns a tree of such arrays. Rows beyond
    `num_rows` hold arbitrary values: a row's result must not depend on its neighbours.
    """
    size = jax.tree.leaves(trees)[0].shape[0]
    tile = shape_of(size).rows
    if size == tile:
        return jax.tree.map(from_bits, _tile_bits(fn, num_rows, trees, shape_of(size).few))

    def of_tile(start: Array) -> Any:
        tiles = jax.tree.map(lambda a: cut(a, (start,), (tile,)), trees)
        return _tile_bits(fn, num_rows - start, tiles, shape_of(size).few)

    def body(i: Array, out: Any) -> Any:
        return jax.tree.map(lambda o, y: paste(o, y, (i * tile,)), out, of_tile(i * tile))

    def empty(s: jax.ShapeDtypeStruct) -> Array:
        return jnp.zeros((size, *s.shape[1:]), s.dtype)

    out = jax.tree.map(empty, jax.eval_shape(of_tile, jnp.zeros((), jnp.int32)))
    trips = div(num_rows + (tile - 1), tile)
    return jax.tree.map(from_bits, lax.fori_loop(0, trips, body, out))


def _tile_bits(fn: Callable, num_live: Int[Array, ""], tiles: Any, few: int) -> Any:
    """`fn` of one tile, as it is stored; rows from `few` on are zeros if no live one is there."""

    def whole(tiles: Any) -> Any:
        return jax.tree.map(lambda y: to_bits(y, storage_dtype(y.dtype)), fn(*tiles))

    def first(tiles: Any) -> Any:
        out = whole(jax.tree.map(lambda a: a[:few], tiles))
        size = jax.tree.leaves(tiles)[0].shape[0]
        return jax.tree.map(lambda y: jnp.zeros((size, *y.shape[1:]), y.dtype).at[:few].set(y), out)

    return lax.cond(num_live <= few, first, whole, tiles) if few else whole(tiles)


def map_row_tiles(fn: Callable, rows: Rows, *trees: Any) -> Any:
    """`map_tiles` over the packed rows of a call."""
    return map_tiles(fn, rows.num_rows, *trees)


def segments_at(rows: Rows, step: Int[Array, ""]) -> Segments:
    """The segments of a step, one for each lane."""
    return jax.tree.map(lambda a: take(a, step), rows.segments)


def segment_rows(x: Shaped[Array, "R *_"], segs: Segments) -> Shaped[Array, "lanes T *_"]:
    """The rows of each lane's segment; those that are not live are arbitrary."""
    return from_bits(take(to_bits(x, storage_dtype(x.dtype)), segs.row))


def output_rows(rows: Rows, *entry: int, dtype: Any = jnp.float32) -> Array:
    """Zeros for `put_rows` to fill; `packed_output` gives the rows in the end."""
    margin = 0 if rows.is_small else MARGIN
    return jnp.zeros((rows.slot.shape[0] + 2 * margin, *entry), dtype)


def put_rows(
    out: Array, rows: Rows, step: Int[Array, ""], values: Shaped[Array, "lanes T *_"]
) -> Array:
    """Write the live rows of a step's segments to their places."""
    lanes, size = values.shape[:2]
    if rows.is_small:
        # One pass over the rows of the program costs less than a write for each lane.
        at = rows.place - step * (lanes * size)
        is_here = (at >= 0) & (at < lanes * size)
        at = jnp.clip(at, 0, lanes * size - 1)
        new = take(values, div(at, size), rem(at, size))
        return jnp.where(_along_first(is_here, out.ndim), new, out)
    segs = segments_at(rows, step)
    for lane in range(lanes):
        old = cut(out, (segs.window[lane],), (size,))
        live = _along_first(segs.live[lane], out.ndim)
        out = paste(out, jnp.where(live, values[lane], old), (segs.window[lane],))
    return out


def _along_first(x: Array, ndim: int) -> Array:
    return x.reshape(-1, *(1,) * (ndim - 1))


def packed_output(out: Array, rows: Rows) -> Array:
    """The packed rows of an array that `put_rows` filled."""
    return out if rows.is_small else out[MARGIN:-MARGIN]


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
    old = from_bits(take(ring, slot, rem(jnp.maximum(position, 0), ring.shape[1])))
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
    return ring.at[slot, rem(rows.position, size)].set(to_bits(x, ring.dtype), mode="drop")


def write_pages(pages: Array, x: Array, rows: Rows, *, row_axis: int) -> Array:
    """Store rows `[R, K, H]` in pages through the block table.

    Args:
      pages: `[P, K, block_size, H]` with `row_axis` 2, or `[P, K, H, block_size]` with 3.
    """
    block = take(rows.block_table, rows.slot, div(rows.position, rows.block_size))
    block = jnp.where(rows.live, block, pages.shape[0])[:, None, None]
    place = rem(rows.position, rows.block_size)[:, None, None]
    head = jnp.arange(x.shape[1])[None, :, None]
    entry = jnp.arange(x.shape[2])[None, None, :]
    where = (block, head, place, entry) if row_axis == 2 else (block, head, entry, place)
    return pages.at[where].set(to_bits(x, pages.dtype), mode="drop")


@struct
class Seals:
    """What a call does to the running states.

    Attributes:
      stored: the slot's deepest certain boundary is stored by this call.
      boundary: that boundary.
    """

    stored: Bool[Array, " B"]
    boundary: Int[Array, " B"]


@struct
class _Lanes:
    """Which segment each lane computes in each step.

    Attributes:
      slot, tile, live: slot and absolute tile (position // rows of a segment) of the segment in
        each lane of each step, and whether there is one.
      nth: how many segments of the slot come before.
      num_steps: steps with a live lane.
      tiles, first_tile, last_tile: segments of each slot, its first tile and its last.
      lane, first_step: the lane of each slot, and the step of its first segment.
    """

    slot: Int[Array, "G lanes"]
    tile: Int[Array, "G lanes"]
    live: Bool[Array, "G lanes"]
    nth: Int[Array, "G lanes"]
    num_steps: Int[Array, ""]
    tiles: Int[Array, " B"]
    first_tile: Int[Array, " B"]
    last_tile: Int[Array, " B"]
    lane: Int[Array, " B"]
    first_step: Int[Array, " B"]


def _plan_lanes(
    *,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    seal_only: Bool[Array, " B"],
    max_rows: int,
    shape: Shape,
) -> _Lanes:
    """Give the slots that have segments lanes in turn; those of one group step together."""
    num_slots, width = start.shape[0], shape.lanes
    first_tile = start // shape.segment
    last_tile = jnp.where(count > 0, (start + count - 1) // shape.segment, first_tile)
    tiles = jnp.where((count > 0) | seal_only, last_tile - first_tile + 1, 0)
    has_segments = tiles > 0
    rank = jnp.cumsum(has_segments) - 1
    num_groups = -(-num_slots // width)
    place = jnp.where(has_segments, rank, num_groups * width)
    # A lane without a slot repeats slot 0 and is never live.
    slot_of = jnp.zeros(num_groups * width, jnp.int32)
    slot_of = slot_of.at[place].set(jnp.arange(num_slots, dtype=jnp.int32), mode="drop")
    tiles_of_lane = jnp.zeros(num_groups * width, jnp.int32).at[place].set(tiles, mode="drop")
    slot_of, tiles_of_lane = slot_of.reshape(-1, width), tiles_of_lane.reshape(-1, width)
    steps = jnp.max(tiles_of_lane, axis=1)
    ends = jnp.cumsum(steps)
    bound = num_segments_bound(max_rows, num_slots, shape.segment)
    step = jnp.arange(bound, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, step, side="right"), num_groups - 1)
    nth = jnp.broadcast_to((step - (ends - steps)[group])[:, None], (bound, width))
    slot, length = slot_of[group], tiles_of_lane[group]
    tile = first_tile[slot] + jnp.clip(nth, 0, jnp.maximum(length - 1, 0))
    return _Lanes(
        slot=slot,
        tile=tile.astype(jnp.int32),
        live=nth < length,
        nth=nth,
        num_steps=ends[-1],
        tiles=tiles,
        first_tile=first_tile,
        last_tile=last_tile,
        lane=rank % width,
        first_step=(ends - steps)[jnp.maximum(rank, 0) // width],
    )


def _segments(
    lanes: _Lanes,
    *,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    row_start: Int[Array, " B"],
    max_rows: int,
    size: int,
) -> Segments:
    first = lanes.tile * size
    own_start = start[lanes.slot]
    nth = jnp.arange(size, dtype=jnp.int32)[None, None, :]
    position = first[..., None] + nth
    known = position < (own_start + count[lanes.slot])[..., None]
    window = row_start[lanes.slot] + first - own_start
    return Segments(
        slot=lanes.slot,
        start=first,
        position=position,
        row=jnp.clip(window[..., None] + nth, 0, max_rows - 1),
        window=jnp.clip(window + MARGIN, 0, max_rows + MARGIN),
        is_filled=lanes.live,
        live=known & (position >= own_start[..., None]) & lanes.live[..., None],
        known=known,
    )


def _row_places(
    lanes: _Lanes, slot: Int[Array, " R"], position: Int[Array, " R"], shape: Shape
) -> Int[Array, " R"]:
    nth = position // shape.segment - lanes.first_tile[slot]
    segment = (lanes.first_step[slot] + nth) * shape.lanes + lanes.lane[slot]
    return segment * shape.segment + position % shape.segment


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

    shape = shape_of(max_rows)
    size = shape.segment
    lanes = _plan_lanes(
        start=start, count=count, seal_only=seal_only, max_rows=max_rows, shape=shape
    )
    boundary = jnp.minimum(
        (start + certain) // block_size * block_size,
        lanes.last_tile * size // block_size * block_size,
    )
    stored = (lanes.tiles > 0) & (boundary > sealed_len) & (next_slot >= 0)
    block_start = lanes.tile * size // block_size * block_size
    opens = jnp.where(
        lanes.nth == 0,
        block_start > sealed_len[lanes.slot],
        lanes.tile * size % block_size == 0,
    )
    opens = opens & lanes.live
    keep = opens & stored[lanes.slot] & (block_start == boundary[lanes.slot])
    rows = Rows(
        slot=slot,
        position=position.astype(jnp.int32),
        num_rows=num_rows,
        start=start,
        row_start=row_start,
        count=count,
        segments=_segments(
            lanes, start=start, count=count, row_start=row_start, max_rows=max_rows, size=size
        ),
        place=_row_places(lanes, slot, position, shape),
        lane_first=lanes.nth == 0,
        lane_fold=opens,
        lane_store=jnp.where(keep, next_slot[lanes.slot], num_state_slots),
        num_steps=lanes.num_steps,
        block_table=block_table,
        sealed_slot=sealed_slot,
        sealed_len=sealed_len,
        block_size=block_size,
        shape=shape,
    )
    return rows, Seals(stored=stored, boundary=boundary)
