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
from pallas_kernels.index import blocks, cut, div, paste, rem, take
from pallas_kernels.norm import inverse_length
from pallas_kernels.rounding import product
from pallas_kernels.rows import (
    TILE_ROWS,
    Rows,
    Segments,
    output_rows,
    packed_output,
    put_rows,
    segment_rows,
    segments_at,
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
class _NewRows:
    """The same as the loop reads them.

    Attributes:
      both: keys and queries side by side, so that one read gives those of a tile.
      scale: of each.
      value, gate, beta: as they are.
    """

    both: Float[Array, "R Hk 2 dk"]
    scale: Float[Array, "R Hk 2"]
    value: Float[Array, "R Hv dv"]
    gate: Float[Array, "R Hv"]
    beta: Float[Array, "R Hv"]

    @classmethod
    def of(cls, new: LogInputs) -> "_NewRows":
        """Of a layer's new rows."""
        both = jnp.stack((new.key, new.query), axis=2)
        scale = jnp.stack((new.key_scale, new.query_scale), axis=2)
        return cls(both, scale, new.value, new.gate, new.beta)


@struct
class _Pages:
    """Rows of the log in each lane, float32."""

    key: Float[Array, "lanes Hk dk J"]
    key_scale: Float[Array, "lanes Hk J"]
    value: Float[Array, "lanes Hv J dv"]
    gate: Float[Array, "lanes Hv J"]


# Axis of the rows in each array of the log, the slot axis counted.
_ROW_AXIS = {"key": 3, "key_scale": 2, "value": 2, "gate": 2}


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=HIGHEST, preferred_element_type=jnp.float32)


def _by_value_head(x: Array, heads: int, *, axis: int) -> Array:
    """What each value head reads of an axis of key heads.

    Written out, so that every product is one over a plain batch: XLA orders others as it likes.
    """
    return jnp.repeat(x, heads // x.shape[axis], axis=axis)


@struct
class _Places:
    """Where the rows of each lane's segment lie, for every step or for one.

    Worked out before the loop, so that its reads only look them up.

    Attributes:
      tile, before, sixteen, block, last: (slot, row of the ring) where the tile, the row before
        it, its 16, its block and the block before begin.
      scores: (lane, row of the block) where its 16 begin.
      offset: (lane, row of its 16) where the tile begins.
      inside: first row of the tile in its block.
    """

    tile: Int[Array, "*G lanes 2"]
    before: Int[Array, "*G lanes 2"]
    sixteen: Int[Array, "*G lanes 2"]
    block: Int[Array, "*G lanes 2"]
    last: Int[Array, "*G lanes 2"]
    scores: Int[Array, "*G lanes 2"]
    offset: Int[Array, "*G lanes 2"]
    inside: Int[Array, "*G lanes"]


def _places(rows: Rows, ring: int) -> _Places:
    """Of every step, in a log of `ring` rows."""
    segs, size = rows.segments, rows.block_size
    block = div(segs.start, size) * size
    inside = segs.start - block
    lane = lax.broadcasted_iota(jnp.int32, inside.shape, 1)

    def in_ring(position: Array) -> Array:
        return jnp.stack((segs.slot, rem(position, ring)), axis=-1)

    return _Places(
        tile=in_ring(segs.start),
        before=in_ring(segs.start + ring - 1),
        sixteen=in_ring(segs.start - rem(inside, TILE_ROWS)),
        block=in_ring(block),
        last=in_ring(jnp.maximum(block - size, 0)),
        scores=jnp.stack((lane, inside - rem(inside, TILE_ROWS)), axis=-1),
        offset=jnp.stack((lane, rem(inside, TILE_ROWS)), axis=-1),
        inside=inside,
    )


def _at(places: _Places, step: Int[Array, ""]) -> _Places:
    return jax.tree.map(lambda a: take(a, step), places)


def _log_rows(log: GdnLog, name: str, index: Int[Array, "lanes 2"], count: int) -> Array:
    """`count` rows of each lane's slot; they must not pass the end of the ring."""
    array, axis = getattr(log, name), _ROW_AXIS[name]
    sizes = (1, *array.shape[1:axis], count, *array.shape[axis + 1 :])
    return blocks(array, index, axes=(0, axis), sizes=sizes)[:, 0]


def _pages(log: GdnLog, index: Int[Array, "lanes 2"], count: int) -> _Pages:
    """`count` log rows of each lane's slot, which lie in one piece of the ring."""

    def read(name: str) -> Array:
        return from_bits(_log_rows(log, name, index, count)).astype(jnp.float32)

    return _Pages(*(read(name) for name in _ROW_AXIS))


def _write_tile(
    log: GdnLog,
    name: str,
    index: Int[Array, "lanes 2"],
    live: Bool[Array, "lanes T"],
    tiles: Array,
) -> Array:
    """An array of the log with the live rows of each lane's tile."""
    axis, array = _ROW_AXIS[name], getattr(log, name)
    old = _log_rows(log, name, index, live.shape[1])
    shape = [1] * old.ndim
    shape[0], shape[axis] = live.shape
    new = jnp.where(live.reshape(shape), to_bits(tiles, array.dtype), old)
    # Empty lanes come last and may repeat the slot of another: theirs are the writes to lose.
    for lane in reversed(range(old.shape[0])):
        slot, row = index[lane, 0], index[lane, 1]
        array = paste(array, new[lane][None], (slot, *(0,) * (axis - 1), row))
    return array


def _seal(state: Float[Array, "lanes Hv dk dv"], pages: _Pages) -> Float[Array, "lanes Hv dk dv"]:
    """Fold a whole block into each lane's state, tiles in ascending order."""
    heads = state.shape[1]
    last = pages.gate[:, :, -1:]
    key = _by_value_head(pages.key * pages.key_scale[:, :, None, :], heads, axis=1)
    value = pages.value * jnp.exp(last - pages.gate)[..., None]
    state = product(jnp.exp(last)[..., None], state)
    for at in range(0, key.shape[3], TILE_ROWS):
        tile = slice(at, at + TILE_ROWS)
        state = state + _product("lhkj,lhjv->lhkv", key[..., tile], value[:, :, tile])
    return state


def _running_states(
    log: GdnLog,
    carried: Float[Array, "lanes Hv dk dv"],
    rows: Rows,
    step: Int[Array, ""],
    places: _Places,
) -> Float[Array, "lanes Hv dk dv"]:
    """State at the boundary below each lane's tile: the slot's or the one carried, the block before
    it folded in where that is due; as it would be read back from the pool."""
    decode, size = jax.vmap(log.state_dtype.decode), rows.block_size
    loaded = decode(take(log.sealed, take(rows.sealed_slot, places.tile[:, 0])))
    first = take(rows.lane_first, step)
    fold = take(rows.lane_fold, step)
    state = jnp.where(first[:, None, None, None], loaded, carried)

    def folded(state: Array) -> Array:
        sealed = _seal(state, _pages(log, places.last, size))
        out = decode(jax.vmap(log.state_dtype.encode)(sealed))
        return jnp.where(fold[:, None, None, None], out, state)

    return lax.cond(jnp.any(fold), folded, lambda state: state, state)


def _store(log: GdnLog, state: Array, rows: Rows, step: Array) -> Array:
    """The pool with the states that are kept."""
    where = take(rows.lane_store, step)

    def store(sealed: Array) -> Array:
        return sealed.at[where].set(jax.vmap(log.state_dtype.encode)(state), mode="drop")

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
      places: where they lie.
    """

    both: Float[Array, "lanes Hk T2 dk"]
    scale: Float[Array, "lanes Hk T2"]
    gate: Float[Array, "lanes Hv T"]
    live: Bool[Array, "lanes T"]
    known: Bool[Array, "lanes T"]
    places: _Places

    @property
    def size(self) -> int:
        """Rows."""
        return self.live.shape[1]

    @property
    def place(self) -> Int[Array, " lanes"]:
        """First row of the tile in its block."""
        return self.places.inside


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


def _cut_lanes(x: Array, axis: int, index: Int[Array, "lanes 2"], count: int) -> Array:
    """`count` entries of an axis for each lane, from where `index` (lane, entry) says."""
    sizes = (1, *x.shape[1:axis], count, *x.shape[axis + 1 :])
    return blocks(x, index, axes=(0, axis), sizes=sizes)[:, 0]


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
      offset: (lane, row) of the tile in them.
    """

    pairs: Float[Array, "lanes Hv T2 16"]
    value: Float[Array, "lanes Hv 16 dv"]
    offset: Int[Array, "lanes 2"]


def _sixteen(scores: Array, value: Float[Array, "lanes Hv 16 dv"], tile: _Tile) -> _Sixteen:
    """Of the scores with the block, and the logged values of the 16 rows."""
    offset = tile.places.offset[:, 1]
    first_live = offset + jnp.argmax(tile.live, axis=1)
    before = jnp.arange(TILE_ROWS)[None, :] < first_live[:, None]
    return _Sixteen(
        _cut_lanes(scores, 3, tile.places.scores, TILE_ROWS),
        jnp.where(before[:, None, :, None], value, 0.0),
        tile.places.offset,
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
    logged = jnp.arange(TILE_ROWS)[None, :] < sixteen.offset[:, 1:]
    before = jnp.where(logged[:, None, :, None], sixteen.value, 0.0)

    def rows_at(x: Array, at: Any) -> Array:
        return cut(x, (0, 0, at), (*x.shape[:2], GROUP_ROWS))

    def group(at: Any, value: Float[Array, "lanes Hv 16 dv"]) -> tuple[Array, Array]:
        offset = jnp.stack((sixteen.offset[:, 0], sixteen.offset[:, 1] + at), axis=-1)
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
    new: _NewRows, log: GdnLog, tile: _Tile, pages: _Pages, state: Array, segs: Segments
) -> tuple[Float[Array, "lanes Hv T dv"], Float[Array, "lanes Hv T dv"]]:
    """(u, o) of the tiles' rows: from the state, then the block's earlier 16s, then their own."""
    size = tile.size
    value = segment_rows(new.value, segs).astype(jnp.float32).swapaxes(1, 2)
    beta = segment_rows(new.beta, segs).swapaxes(1, 2)
    from_state = _apply_state(state, tile)
    scores = _weighted_scores(tile, pages)
    column = jnp.arange(pages.gate.shape[2])[None, :]
    earlier = (column < tile.places.scores[:, 1:])[:, None, :, None]
    from_block = _product("lhtj,lhjv->lhtv", scores, jnp.where(earlier, pages.value, 0.0))
    logged = _log_rows(log, "value", tile.places.sixteen, TILE_ROWS)
    sixteen = _sixteen(scores, from_bits(logged).astype(jnp.float32), tile)
    rhs = value - from_state[:, :, :size] - from_block[:, :, :size]
    u, from_sixteen = _solve(rhs, sixteen, beta, tile, log.value.dtype)
    out = from_state[:, :, size:] + from_block[:, :, size:] + from_sixteen
    return u, out * (tile.both.shape[-1] ** -0.5)


def log_step(inputs: LogInputs, log: GdnLog, rows: Rows) -> tuple[Float[Array, "R Hv dv"], GdnLog]:
    """Compute the rows of a call: prefill, decode and verify alike.

    Returns:
      Outputs in float32, and the log with the new rows and the stored seals.
    """
    new, all_places = _NewRows.of(inputs), _places(rows, log.gate.shape[2])

    def step(index: Array, carry: tuple[GdnLog, Array, Array, Array]):
        log, carried, out, pending = carry
        segs, places = segments_at(rows, index), _at(all_places, index)
        log = _write_pending(log, rows, all_places, index, pending)
        # Every read of the log comes after its writes, so that XLA need not copy it: pseudo-values
        # wait for the next step. The rows of a due fold are not among those written.
        log, tile = _new_rows(new, log, segs, places)
        state = _running_states(log, carried, rows, index, places)
        log = dataclasses.replace(log, sealed=_store(log, state, rows, index))
        pages = _pages(log, places.block, rows.block_size)
        u, o = _tile_values(new, log, tile, pages, state, segs)
        return log, state, put_rows(out, rows, index, o.swapaxes(1, 2)), u

    heads, dk, dv = inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2]
    carry = (
        log,
        jnp.zeros((rows.shape.lanes, heads, dk, dv), jnp.float32),
        output_rows(rows, heads, dv),
        jnp.zeros((rows.shape.lanes, heads, rows.shape.segment, dv), jnp.float32),
    )
    log, _, out, pending = lax.fori_loop(0, rows.num_steps, step, carry)
    log = _write_pending(log, rows, all_places, rows.num_steps, pending)
    return packed_output(out, rows), log


def _write_pending(
    log: GdnLog, rows: Rows, places: _Places, step: Int[Array, ""], u: Array
) -> GdnLog:
    """The log with the pseudo-values of the step before."""
    before = jnp.maximum(step - 1, 0)
    live = segments_at(rows, before).live & (step > 0)
    written = _write_tile(log, "value", take(places.tile, before), live, u)
    return dataclasses.replace(log, value=written)


def _new_rows(rows: _NewRows, log: GdnLog, segs: Segments, places: _Places) -> tuple[GdnLog, _Tile]:
    """The log with the keys and gates of each lane's tile, and the tile."""
    size = segs.live.shape[1]
    both, scale = segment_rows(rows.both, segs), segment_rows(rows.scale, segs)
    both = jnp.moveaxis(both.astype(jnp.float32), 1, 3)
    both = both.reshape(*both.shape[:2], 2 * size, both.shape[4])
    scale = jnp.moveaxis(scale, 1, 3).reshape(both.shape[:3])
    gates = segment_rows(rows.gate, segs)
    gate = _running_gates(gates, _gates_around(log, places, size), segs.live)
    written = {
        "key": both[:, :, :size].swapaxes(2, 3),
        "key_scale": scale[:, :, :size],
        "gate": gate,
    }
    arrays = {n: _write_tile(log, n, places.tile, segs.live, x) for n, x in written.items()}
    tile = _Tile(both, scale, gate, segs.live, segs.known, places)
    return dataclasses.replace(log, **arrays), tile


def _gates_around(log: GdnLog, places: _Places, size: int) -> Float[Array, "lanes Hv T1"]:
    """G of the row before each lane's tile, 0 at a boundary, then of the tile's rows."""
    before = _log_rows(log, "gate", places.before, 1)
    before = jnp.where((places.inside == 0)[:, None, None], 0.0, before)
    return jnp.concatenate((before, _log_rows(log, "gate", places.tile, size)), axis=2)
