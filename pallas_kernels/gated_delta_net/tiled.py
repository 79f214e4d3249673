"""The log form in its canonical order, one tile of each lane at a time.

    u_t = beta_t (v_t - exp(G_t) S^T k_t - sum_{j<t} exp(G_t - G_j) (k_j.k_t) u_j)
    o_t = scale (exp(G_t) S^T q_t + sum_{j<=t} exp(G_t - G_j) (k_j.q_t) u_j)
    seal: S' = exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j^T

with k and q normalised, j over the rows of the block, G the running sum of log-gates since its
boundary. Rows of the block enter by products: those before the row's own 16 (positions that are
equal when divided by 16), those of its 16 before its own group of 4, then its group. In a
pseudo-value the rows of the group enter one after another, each rounded when it is made. Rows that
do not exist are removed by select, never by a zero factor.

Heads come first inside, so that every product is one over a batch of heads, and queries ride behind
keys in the products that both need.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.bits import from_bits, to_bits
from pallas_kernels.gated_delta_net.state_dtype import StateDtype
from pallas_kernels.index import cut, div, paste, rem, take
from pallas_kernels.norm import inverse_length
from pallas_kernels.rounding import product
from pallas_kernels.rows import (
    TILE_ROWS,
    Rows,
    Segment,
    by_lane,
    put_rows,
    segment_rows,
    segments_at,
    with_margin,
    without_margin,
)
from pallas_kernels.struct import static, struct

HIGHEST = lax.Precision.HIGHEST
# Rows whose pseudo-values are made one after another; a segment holds whole groups.
GROUP_ROWS = 4


@struct
class GdnLog:
    """Running state of one Gated DeltaNet layer; bfloat16 entries are kept as their bits.

    Attributes:
      key: raw keys, position p in column p mod N.
      key_scale: float32 factor that makes each key a unit vector.
      value: pseudo-values u, rounded once to the log's type; every reader uses the rounded ones.
      gate: running sum of log-gates since the block's boundary, row included.
      sealed: pool of states at block boundaries; a slot is written once and then only read.
      state_dtype: how `sealed` encodes a state.
    """

    key: Array
    key_scale: Float[Array, "B Hk N"]
    value: Array
    gate: Float[Array, "B Hv N"]
    sealed: Array
    state_dtype: StateDtype = static(StateDtype.FLOAT32)


@struct
class LogInputs:
    """New rows of a Gated DeltaNet layer.

    Attributes:
      query, key: raw, not normalised.
      query_scale, key_scale: float32 factors that make each a unit vector.
      value: as convolved.
      gate: log of the decay, float32, at most 0.
      beta: step size, float32, as it is to be used.
    """

    query: Float[Array, "R Hk dk"]
    key: Float[Array, "R Hk dk"]
    query_scale: Float[Array, "R Hk"]
    key_scale: Float[Array, "R Hk"]
    value: Float[Array, "R Hv dv"]
    gate: Float[Array, "R Hv"]
    beta: Float[Array, "R Hv"]

    @classmethod
    def of(
        cls,
        *,
        query: Float[Array, "R Hk dk"],
        key: Float[Array, "R Hk dk"],
        value: Float[Array, "R Hv dv"],
        gate: Float[Array, "R Hv"],
        beta: Float[Array, "R Hv"],
    ) -> "LogInputs":
        """The rows with the unit factors of their queries and keys; row-wise, for `map_tiles`."""
        return cls(query, key, inverse_length(query), inverse_length(key), value, gate, beta)


@struct
class _Pages:
    """Rows of the log in each lane, float32, or of one lane without the first axis."""

    key: Float[Array, "*lanes Hk dk J"]
    key_scale: Float[Array, "*lanes Hk J"]
    value: Float[Array, "*lanes Hv J dv"]
    gate: Float[Array, "*lanes Hv J"]


# Axis of the rows in each array of the log, the slot axis counted.
_ROW_AXIS = {"key": 3, "key_scale": 2, "value": 2, "gate": 2}


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=HIGHEST, preferred_element_type=jnp.float32)


def _by_value_head(x: Array, heads: int, *, axis: int) -> Array:
    """What each value head reads of an axis of key heads.

    Written out, so that every product is one over a plain batch: XLA orders others as it likes.
    """
    return jnp.repeat(x, heads // x.shape[axis], axis=axis)


def _rows_cut(array: Array, axis: int, slot: Array, position: Array, count: int) -> Array:
    """`count` rows of one slot from a position; they must not pass the end of the ring."""
    sizes = list(array.shape)
    sizes[0], sizes[axis] = 1, count
    at = rem(position, array.shape[axis])
    return cut(array, (slot, *(0,) * (axis - 1), at), tuple(sizes[: axis + 1]))[0]


def _pages(log: GdnLog, slot: Array, start: Array, count: int) -> _Pages:
    """`count` log rows of a slot, which lie in one piece of the ring."""

    def read(name: str) -> Array:
        rows = _rows_cut(getattr(log, name), _ROW_AXIS[name], slot, start, count)
        return from_bits(rows).astype(jnp.float32)

    return _Pages(*(read(name) for name in _ROW_AXIS))


def _write_tile(log: GdnLog, name: str, segments: list[Segment], tiles: Array) -> Array:
    """An array of the log with the live rows of each lane's tile."""
    axis, array = _ROW_AXIS[name], getattr(log, name)
    count = segments[0].live.shape[0]
    old = by_lane(lambda seg: _rows_cut(array, axis, seg.slot, seg.start, count), segments)
    live = jnp.stack([seg.live for seg in segments])
    shape = [1] * old.ndim
    shape[0], shape[axis] = live.shape
    new = jnp.where(live.reshape(shape), to_bits(tiles, array.dtype), old)
    # Empty lanes come last and may repeat the slot of another: theirs are the writes to lose.
    for lane, seg in reversed(list(enumerate(segments))):
        at = rem(seg.start, array.shape[axis])
        array = paste(array, new[lane][None], (seg.slot, *(0,) * (axis - 1), at))
    return array


def _seal(state: Float[Array, "Hv dk dv"], pages: _Pages) -> Float[Array, "Hv dk dv"]:
    """Fold a whole block into the state, tiles in ascending order."""
    heads = state.shape[0]
    last = pages.gate[:, -1:]
    key = _by_value_head(pages.key * pages.key_scale[:, None, :], heads, axis=0)
    value = pages.value * jnp.exp(last - pages.gate)[:, :, None]
    state = product(jnp.exp(last)[:, :, None], state)
    for at in range(0, key.shape[2], TILE_ROWS):
        tile = slice(at, at + TILE_ROWS)
        state = state + _product("hkj,hjv->hkv", key[:, :, tile], value[:, tile])
    return state


def _running_states(
    log: GdnLog, carried: Float[Array, "lanes Hv dk dv"], rows: Rows, step: Array, segs: list
) -> Float[Array, "lanes Hv dk dv"]:
    """State at the boundary below each lane's tile: the slot's or the one carried, the block before
    it folded in where that is due; as it would be read back from the pool."""
    encoding, size = log.state_dtype, rows.block_size
    loaded = by_lane(
        lambda seg: encoding.decode(take(log.sealed, take(rows.sealed_slot, seg.slot))), segs
    )
    first = take(rows.lane_first, step)
    fold = take(rows.lane_fold, step)
    state = jnp.where(first[:, None, None, None], loaded, carried)

    def folded(state: Array) -> Array:
        out = []
        for lane, seg in enumerate(segs):
            before = _pages(log, seg.slot, jnp.maximum(div(seg.start, size) - 1, 0) * size, size)
            out.append(encoding.decode(encoding.encode(_seal(state[lane], before))))
        return jnp.where(fold[:, None, None, None], jnp.stack(out), state)

    return lax.cond(jnp.any(fold), folded, lambda state: state, state)


def _store(log: GdnLog, state: Array, rows: Rows, step: Array) -> Array:
    """The pool with the states that are kept."""
    where = take(rows.lane_store, step)

    def store(sealed: Array) -> Array:
        for lane in range(state.shape[0]):
            encoded = log.state_dtype.encode(state[lane])
            sealed = sealed.at[where[lane]].set(encoded, mode="drop")
        return sealed

    return lax.cond(jnp.any(where < log.sealed.shape[0]), store, lambda sealed: sealed, log.sealed)


@struct
class _Tile:
    """The rows of each lane's tile.

    Attributes:
      both: keys, then queries.
      scale: factor that makes each of them a unit vector.
      gate: running sum of log-gates, also of rows committed before.
      live: rows of this call.
      known: rows of this call or before it.
      place: first row of the tile in its block.
    """

    both: Float[Array, "lanes Hk T2 dk"]
    scale: Float[Array, "lanes Hk T2"]
    gate: Float[Array, "lanes Hv T"]
    live: Bool[Array, "lanes T"]
    known: Bool[Array, "lanes T"]
    place: Int[Array, " lanes"]

    @property
    def size(self) -> int:
        """Rows."""
        return self.live.shape[1]


def _running_gates(
    gate: Float[Array, "lanes T Hv"], log: Float[Array, "lanes Hv T1"], live: Bool[Array, "lanes T"]
) -> Float[Array, "lanes Hv T"]:
    """G of the tile's rows by sequential addition; rows committed before keep theirs.

    The sum starts from the row before the first live one. Adding zeros before and after changes
    nothing, so that the order is that of adding row after row.

    Args:
      log: G of the row before the tile, then of its rows.
    """
    place = jnp.arange(log.shape[2])
    first = jnp.argmax(live, axis=1)
    base = jnp.where((place[None, :] == first[:, None])[:, None, :], log, 0.0)
    new = jnp.where(live[:, :, None], gate, 0.0).swapaxes(1, 2)
    total = jnp.broadcast_to(base[:, :, :1], new.shape)
    for i in range(new.shape[2]):
        term = base[:, :, i + 1] + new[:, :, i]
        total = total + jnp.where((place[1:] > i)[None, None, :], term[:, :, None], 0.0)
    return jnp.where(live[:, None, :], total, log[:, :, 1:])


def _weighted_scores(tile: _Tile, pages: _Pages) -> Float[Array, "lanes Hv T2 J"]:
    """exp(G_t - G_j) (x_t . k_j) for keys, then queries; pairs that do not exist are 0.

    A key meets rows before its own, a query its own as well.
    """
    lanes, heads, width = pages.gate.shape
    raw = _product("lhtk,lhkj->lhtj", tile.both, pages.key)
    raw = raw * tile.scale[:, :, :, None] * pages.key_scale[:, :, None, :]
    raw = raw.reshape(lanes, raw.shape[1], 1, 2, tile.size, width)
    is_query = jnp.arange(2)[None, :, None, None]
    row = tile.place[:, None, None, None] + jnp.arange(tile.size)[None, None, :, None]
    allowed = (jnp.arange(width)[None, None, None, :] < row + is_query)[:, None, None]
    by_group = (lanes, raw.shape[1], -1)
    gap = tile.gate.reshape(*by_group, 1, tile.size, 1) - pages.gate.reshape(*by_group, 1, 1, width)
    weight = jnp.exp(jnp.where(allowed, gap, 0.0))
    return jnp.where(allowed, raw * weight, 0.0).reshape(lanes, heads, 2 * tile.size, width)


def _apply_state(state: Float[Array, "lanes Hv dk dv"], tile: _Tile) -> Array:
    """exp(G_t) S^T x_t for keys, then queries, normalised."""
    lanes, heads = state.shape[:2]
    groups = tile.both.shape[1]
    out = _product("lhtk,lhkv->lhtv", _by_value_head(tile.both, heads, axis=1), state)
    gate = jnp.exp(tile.gate).reshape(lanes, groups, -1, 1, tile.size)
    factor = tile.scale.reshape(lanes, groups, 1, 2, tile.size) * gate
    return product(out, factor.reshape(lanes, heads, -1, 1))


def _cut_lanes(x: Array, axis: int, place: Int[Array, " lanes"], count: int) -> Array:
    """`count` entries of an axis from each lane's own place."""
    parts = []
    for lane in range(x.shape[0]):
        start = (*(0,) * (axis - 1), place[lane])
        parts.append(cut(x[lane], start, (*x.shape[1:axis], count)))
    return jnp.stack(parts)


def _solve_group(
    rhs: Float[Array, "lanes Hv 4 dv"],
    pairs: Float[Array, "lanes Hv 4 4"],
    beta: Float[Array, "lanes Hv 4"],
    logged: Float[Array, "lanes Hv 4 dv"],
    live: Bool[Array, "lanes 4"],
    dtype: Any,
) -> Float[Array, "lanes Hv 4 dv"]:
    """Pseudo-values of one group, row after row, each rounded when it is made."""
    u: list[Array] = []
    for i in range(GROUP_ROWS):
        total = rhs[:, :, i]
        for j in range(i):
            total = total - product(pairs[:, :, i, j, None], u[j])
        new = from_bits(to_bits(beta[:, :, i, None] * total, dtype)).astype(jnp.float32)
        u.append(jnp.where(live[:, i, None, None], new, logged[:, :, i]))
    return jnp.stack(u, axis=2)


@struct
class _Sixteen:
    """The 16 rows at multiples of 16 that hold each lane's tile, as seen from the block.

    Attributes:
      pairs: weighted scores of the tile's keys, then queries, with them.
      value: pseudo-values of those that came before this call; the others are 0.
      offset: of the tile in them.
    """

    pairs: Float[Array, "lanes Hv T2 16"]
    value: Float[Array, "lanes Hv 16 dv"]
    offset: Int[Array, " lanes"]


def _sixteen(scores: Array, value: Float[Array, "lanes Hv J dv"], tile: _Tile) -> _Sixteen:
    start = div(tile.place, TILE_ROWS) * TILE_ROWS
    first_live = tile.place + jnp.argmax(tile.live, axis=1)
    row = start[:, None] + jnp.arange(TILE_ROWS)[None, :]
    before = (row < first_live[:, None])[:, None, :, None]
    return _Sixteen(
        _cut_lanes(scores, 3, start, TILE_ROWS),
        jnp.where(before, _cut_lanes(value, 2, start, TILE_ROWS), 0.0),
        tile.place - start,
    )


def _own_group(
    pairs: Float[Array, "lanes Hv 4 4"], u: Float[Array, "lanes Hv 4 dv"]
) -> Float[Array, "lanes Hv 4 dv"]:
    """What the queries of a group take of its rows."""
    # A row that is not finite is seen only by those at or after it, but zero times NaN is NaN.
    is_bad = ~jnp.all(jnp.isfinite(u), axis=(1, 3))
    place = jnp.arange(GROUP_ROWS)
    upto = place[None, :] <= place[:, None]
    spoiled = jnp.any(upto[None] & is_bad[:, None, :], axis=2)
    out = _product("lhtj,lhjv->lhtv", pairs, jnp.where(is_bad[:, None, :, None], 0.0, u))
    return jnp.where(spoiled[:, None, :, None], jnp.nan, out)


def _solve(
    rhs: Float[Array, "lanes Hv T dv"],
    sixteen: _Sixteen,
    beta: Float[Array, "lanes Hv T"],
    tile: _Tile,
    dtype: Any,
) -> tuple[Float[Array, "lanes Hv T dv"], Float[Array, "lanes Hv T dv"]]:
    """Pseudo-values of the tile, group after group, and what its queries take of their 16.

    Args:
      rhs: beta is still to be applied, and the rows of the 16 to be taken off.
    """
    size = tile.size
    # In a tile of one group the earlier rows are logged; in one of four they are made here.
    logged = jnp.arange(TILE_ROWS)[None, :] < sixteen.offset[:, None]
    before = jnp.where(logged[:, None, :, None], sixteen.value, 0.0)

    def rows_at(x: Array, at: Any) -> Array:
        return cut(x, (0, 0, at), (*x.shape[:2], GROUP_ROWS))

    def group(at: Any, value: Float[Array, "lanes Hv 16 dv"]) -> tuple[Array, Array]:
        offset = sixteen.offset + at
        keys, queries = rows_at(sixteen.pairs, at), rows_at(sixteen.pairs, size + at)
        pairs = jnp.concatenate((keys, queries), axis=2)
        taken = _product("lhtj,lhjv->lhtv", pairs, value)
        inside = _cut_lanes(pairs, 3, offset, GROUP_ROWS)
        u = _solve_group(
            rows_at(rhs, at) - taken[:, :, :GROUP_ROWS],
            inside[:, :, :GROUP_ROWS],
            rows_at(beta[..., None], at)[..., 0],
            _cut_lanes(sixteen.value, 2, offset, GROUP_ROWS),
            cut(tile.live, (0, at), (tile.live.shape[0], GROUP_ROWS)),
            dtype,
        )
        return u, taken[:, :, GROUP_ROWS:] + _own_group(inside[:, :, GROUP_ROWS:], u)

    def next_group(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        value, outputs = carry
        at = index * GROUP_ROWS
        u, out = group(at, value)
        return paste(value, u, (0, 0, at)), paste(outputs, out, (0, 0, at))

    if size == GROUP_ROWS:
        return group(0, before)
    return lax.fori_loop(0, size // GROUP_ROWS, next_group, (before, jnp.zeros_like(rhs)))


def _tile_values(
    packed: LogInputs, tile: _Tile, pages: _Pages, state: Array, segs: list[Segment], dtype: Any
) -> tuple[Float[Array, "lanes Hv T dv"], Float[Array, "lanes Hv T dv"]]:
    """(u, o) of the tiles' rows: from the state, then the block's earlier 16s, then their own."""
    size = tile.size
    value = _read(packed.value, segs).astype(jnp.float32).swapaxes(1, 2)
    beta = _read(packed.beta, segs).swapaxes(1, 2)
    from_state = _apply_state(state, tile)
    scores = _weighted_scores(tile, pages)
    column = jnp.arange(pages.gate.shape[2])[None, :]
    earlier = (column < (div(tile.place, TILE_ROWS) * TILE_ROWS)[:, None])[:, None, :, None]
    from_block = _product("lhtj,lhjv->lhtv", scores, jnp.where(earlier, pages.value, 0.0))
    sixteen = _sixteen(scores, pages.value, tile)
    rhs = value - from_state[:, :, :size] - from_block[:, :, :size]
    u, from_sixteen = _solve(rhs, sixteen, beta, tile, dtype)
    out = from_state[:, :, size:] + from_block[:, :, size:] + from_sixteen
    return u, out * (tile.both.shape[-1] ** -0.5)


def log_step(inputs: LogInputs, log: GdnLog, rows: Rows) -> tuple[Float[Array, "R Hv dv"], GdnLog]:
    """Compute the rows of a call: prefill, decode and verify alike.

    Returns:
      Outputs in float32, and the log with the new rows and the stored seals.
    """
    packed = LogInputs(*(with_margin(getattr(inputs, f)) for f in LogInputs.__dataclass_fields__))
    size, block = rows.shape.segment, rows.block_size

    def step(index: Array, carry: tuple[GdnLog, Array, Array, Array]):
        log, carried, out, pending = carry
        segs = segments_at(rows, index)
        log = _write_pending(log, rows, index, pending)
        # Every read of the log comes after its writes, so that XLA need not copy it: pseudo-values
        # wait for the next step. The rows of a due fold are not among those written.
        log, tile = _new_rows(packed, log, rows, segs)
        state = _running_states(log, carried, rows, index, segs)
        log = dataclasses.replace(log, sealed=_store(log, state, rows, index))
        pages = _lane_pages(log, segs, block)
        u, o = _tile_values(packed, tile, pages, state, segs, log.value.dtype)
        for lane, seg in enumerate(segs):
            out = put_rows(out, seg, o[lane].swapaxes(0, 1))
        return log, state, out, u

    heads, dk, dv = inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2]
    carry = (
        log,
        jnp.zeros((rows.shape.lanes, heads, dk, dv), jnp.float32),
        jnp.zeros(packed.value.shape, jnp.float32),
        jnp.zeros((rows.shape.lanes, heads, size, dv), jnp.float32),
    )
    log, _, out, pending = lax.fori_loop(0, rows.num_steps, step, carry)
    return without_margin(out), _write_pending(log, rows, rows.num_steps, pending)


def _write_pending(log: GdnLog, rows: Rows, step: Int[Array, ""], u: Array) -> GdnLog:
    """The log with the pseudo-values of the step before."""
    segs = [
        dataclasses.replace(seg, live=seg.live & (step > 0))
        for seg in segments_at(rows, jnp.maximum(step - 1, 0))
    ]
    return dataclasses.replace(log, value=_write_tile(log, "value", segs, u))


def _lane_pages(log: GdnLog, segs: list[Segment], block: int) -> _Pages:
    """The block of each lane's tile."""
    lanes = [_pages(log, seg.slot, div(seg.start, block) * block, block) for seg in segs]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *lanes)


def _read(x: Array, segs: list[Segment]) -> Array:
    return by_lane(lambda seg: segment_rows(x, seg), segs)


def _new_rows(
    packed: LogInputs, log: GdnLog, rows: Rows, segs: list[Segment]
) -> tuple[GdnLog, _Tile]:
    """The log with the keys and gates of each lane's tile, and the tile."""
    size = rows.shape.segment
    both = jnp.concatenate((_read(packed.key, segs), _read(packed.query, segs)), axis=1)
    both = both.astype(jnp.float32).swapaxes(1, 2)
    scale = jnp.concatenate(
        (_read(packed.key_scale, segs), _read(packed.query_scale, segs)), axis=1
    )
    scale = scale.swapaxes(1, 2)
    live = jnp.stack([seg.live for seg in segs])
    place = jnp.stack([rem(seg.start, rows.block_size) for seg in segs])
    gate = _running_gates(_read(packed.gate, segs), _gates_around(log, segs, place), live)
    written = {
        "key": both[:, :, :size].swapaxes(2, 3),
        "key_scale": scale[:, :, :size],
        "gate": gate,
    }
    arrays = {name: _write_tile(log, name, segs, x) for name, x in written.items()}
    known = jnp.stack([seg.known for seg in segs])
    return dataclasses.replace(log, **arrays), _Tile(both, scale, gate, live, known, place)


def _gates_around(
    log: GdnLog, segs: list[Segment], place: Int[Array, " lanes"]
) -> Float[Array, "lanes Hv T1"]:
    """G of the row before each lane's tile, 0 at a boundary, then of the tile's rows."""
    size, ring = segs[0].live.shape[0], log.gate.shape[2]

    def last(seg: Segment) -> Array:
        return _rows_cut(log.gate, 2, seg.slot, seg.start + ring - 1, 1)

    before = jnp.where((place == 0)[:, None, None], 0.0, by_lane(last, segs))
    own = by_lane(lambda seg: _rows_cut(log.gate, 2, seg.slot, seg.start, size), segs)
    return jnp.concatenate((before, own), axis=2)
