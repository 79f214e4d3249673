"""The log form in its canonical order, one 16-row tile at a time.

    u_t = beta_t (v_t - exp(G_t) S^T k_t - sum_{j<t} exp(G_t - G_j) (k_j.k_t) u_j)
    o_t = scale (exp(G_t) S^T q_t + sum_{j<=t} exp(G_t - G_j) (k_j.q_t) u_j)
    seal: S' = exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j^T

with k and q normalised, j over the rows of the block, G the running sum of log-gates since its
boundary. Rows of earlier tiles enter by a product of fixed width, rows of the same tile one after
another. Rows that do not exist are removed by select, never by a zero factor.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.gated_delta_net.state_dtype import StateDtype
from pallas_kernels.index import cut, div, paste, rem, take
from pallas_kernels.masked import sum_seen
from pallas_kernels.norm import inverse_length
from pallas_kernels.rows import TILE_ROWS, Rows, Segment, put_rows, segment_at
from pallas_kernels.struct import static, struct

HIGHEST = lax.Precision.HIGHEST


@struct
class GdnLog:
    """Running state of one Gated DeltaNet layer.

    Attributes:
      key: raw keys, position p at p mod N.
      key_scale: float32 factor that makes each key a unit vector.
      value: pseudo-values u, rounded once to the log's type; every reader uses the rounded ones.
      gate: running sum of log-gates since the block's boundary, row included.
      sealed: pool of states at block boundaries; a slot is written once and then only read.
      state_dtype: how `sealed` encodes a state.
    """

    key: Float[Array, "B N Hk dk"]
    key_scale: Float[Array, "B N Hk"]
    value: Float[Array, "B N Hv dv"]
    gate: Float[Array, "B N Hv"]
    sealed: Float[Array, "slots planes Hv dk dv"]
    state_dtype: StateDtype = static(StateDtype.FLOAT32)


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=HIGHEST, preferred_element_type=jnp.float32)


@struct
class _Pages:
    """Rows of one block's log, float32."""

    key: Float[Array, "J Hk dk"]
    key_scale: Float[Array, "J Hk"]
    value: Float[Array, "J Hv dv"]
    gate: Float[Array, "J Hv"]


def _pages(log: GdnLog, slot: Array, first_tile: Array, num_tiles: int) -> _Pages:
    """Log rows of `num_tiles` tiles of a slot, oldest first."""
    ring_tiles = log.key.shape[1] // TILE_ROWS

    def read(array: Array) -> Array:
        cuts = []
        for i in range(num_tiles):
            at = rem(first_tile + i, ring_tiles) * TILE_ROWS
            cuts.append(cut(array, (slot, at), (1, TILE_ROWS))[0].astype(jnp.float32))
        return jnp.concatenate(cuts)

    return _Pages(read(log.key), read(log.key_scale), read(log.value), read(log.gate))


def _seal(state: Float[Array, "Hv dk dv"], pages: _Pages) -> Float[Array, "Hv dk dv"]:
    """Fold a whole block into the state, tiles in ascending order."""
    heads, dk, dv = state.shape
    group = heads // pages.key.shape[1]
    last = pages.gate[-1]
    weight = jnp.exp(last[None, :] - pages.gate)
    state = (jnp.exp(last)[:, None, None] * state).reshape(-1, group, dk, dv)
    key = pages.key * pages.key_scale[:, :, None]
    value = (pages.value * weight[:, :, None]).reshape(-1, state.shape[0], group, dv)
    for at in range(0, key.shape[0], TILE_ROWS):
        tile = slice(at, at + TILE_ROWS)
        state = state + _einsum("jhk,jhrv->hrkv", key[tile], value[tile])
    return state.reshape(heads, dk, dv)


def _running_gates(
    gate: Float[Array, "16 Hv"],
    log: Float[Array, "16 Hv"],
    before: Float[Array, " Hv"],
    seg: Segment,
) -> Float[Array, "16 Hv"]:
    """G of the tile's rows by sequential addition; rows committed before keep theirs."""
    total, rows = before, []
    for i in range(TILE_ROWS):
        total = jnp.where(seg.live[i], total + gate[i], log[i])
        rows.append(total)
    return jnp.stack(rows)


def _pair_weights(
    gate: Float[Array, "16 Hv"], other: Float[Array, "J Hv"], mask: Bool[Array, "16 J"]
) -> Float[Array, "16 Hv J"]:
    """exp(G_t - G_j) where the mask allows the pair, else 0."""
    allowed = mask[:, None, :]
    gap = gate[:, :, None] - other.T[None, :, :]
    return jnp.where(allowed, jnp.exp(jnp.where(allowed, gap, 0.0)), 0.0)


def _by_value_head(x: Float[Array, "T Hk J"], group: int) -> Float[Array, "T Hv J"]:
    return jnp.repeat(x, group, axis=1)


def _scores(x: Array, scale: Array, keys: Array, key_scale: Array, group: int) -> Array:
    """(x_t . k_j) with both unit factors applied to the product, per value head."""
    raw = _einsum("thk,jhk->thj", x, keys) * scale[:, :, None] * key_scale.T[None, :, :]
    return _by_value_head(raw, group)


def _apply_state(state: Array, x: Array, scale: Array, gate: Array) -> Float[Array, "16 Hv dv"]:
    """exp(G_t) S^T x_t, x normalised by `scale`."""
    heads, dk, dv = state.shape
    grouped = state.reshape(x.shape[1], -1, dk, dv)
    out = _einsum("thk,hrkv->thrv", x, grouped).reshape(x.shape[0], heads, dv)
    factor = jnp.repeat(scale, heads // x.shape[1], axis=1) * jnp.exp(gate)
    return out * factor[:, :, None]


def _solve(
    rhs: Float[Array, "16 Hv dv"],
    pairs: Float[Array, "16 Hv 16"],
    beta: Float[Array, "16 Hv"],
    logged: Float[Array, "16 Hv dv"],
    seg: Segment,
    dtype,
) -> Float[Array, "16 Hv dv"]:
    """Pseudo-values of the tile, row after row, each rounded when it is made."""
    place = jnp.arange(TILE_ROWS)
    known = jnp.where((seg.known & ~seg.live)[:, None, None], logged, 0.0)

    def row(i: Array, u: Array) -> Array:
        before = (place < i)[:, None, None]
        terms = jnp.where(before, take(pairs, i).T[:, :, None] * u, 0.0)
        new = take(beta, i)[:, None] * (take(rhs, i) - jnp.sum(terms, axis=0))
        return paste(u, new.astype(dtype).astype(jnp.float32)[None], (i,))

    first = jnp.argmax(seg.live).astype(jnp.int32)
    count = jnp.sum(seg.live, dtype=jnp.int32)
    return lax.fori_loop(first, first + count, row, known)


@struct
class _Tile:
    """The rows of one tile: this call's where live, the log's where committed before."""

    query: Float[Array, "16 Hk dk"]
    key: Float[Array, "16 Hk dk"]
    key_scale: Float[Array, "16 Hk"]
    gate: Float[Array, "16 Hv"]
    logged: Float[Array, "16 Hv dv"]


def _tile_values(
    tile: _Tile, pages: _Pages, state: Array, value: Array, beta: Array, seg: Segment, dtype
) -> tuple[Float[Array, "16 Hv dv"], Float[Array, "16 Hv dv"]]:
    """(u, o) of the tile's rows."""
    group = value.shape[1] // tile.key.shape[1]
    width = pages.key.shape[0]
    place = jnp.arange(TILE_ROWS)
    earlier = jnp.broadcast_to(
        (jnp.arange(width) < rem(seg.tile, width // TILE_ROWS) * TILE_ROWS)[None, :],
        (TILE_ROWS, width),
    )
    inside = (place[None, :] < place[:, None]) & seg.known[None, :]
    to_self = (place[None, :] <= place[:, None]) & seg.known[None, :]
    page_value = jnp.where(earlier[0][:, None, None], pages.value, 0.0)

    def from_earlier(x: Array, scale: Array) -> Array:
        weight = _pair_weights(tile.gate, pages.gate, earlier)
        score = _scores(x, scale, pages.key, pages.key_scale, group)
        return _einsum(
            "thj,jhv->thv", jnp.where(earlier[:, None, :], score * weight, 0.0), page_value
        )

    def in_tile(x: Array, scale: Array, mask: Array) -> Array:
        score = _scores(x, scale, tile.key, tile.key_scale, group)
        return jnp.where(mask[:, None, :], score * _pair_weights(tile.gate, tile.gate, mask), 0.0)

    rhs = (
        value
        - _apply_state(state, tile.key, tile.key_scale, tile.gate)
        - from_earlier(tile.key, tile.key_scale)
    )
    u = _solve(rhs, in_tile(tile.key, tile.key_scale, inside), beta, tile.logged, seg, dtype)
    query_scale = inverse_length(tile.query)
    own = in_tile(tile.query, query_scale, to_self)
    out = (
        _apply_state(state, tile.query, query_scale, tile.gate)
        + from_earlier(tile.query, query_scale)
        + sum_seen(lambda u: _einsum("thj,jhv->thv", own, u), u, to_self)
    )
    return u, out * (tile.key.shape[-1] ** -0.5)


def _write_tile(log: GdnLog, tile: _Pages, sealed: Array, seg: Segment) -> GdnLog:
    """The log with the live rows of a tile, and the pool as it now is."""
    at = rem(seg.tile, log.key.shape[1] // TILE_ROWS) * TILE_ROWS

    def put(array: Array, values: Array) -> Array:
        old = cut(array, (seg.slot, at), (1, TILE_ROWS))[0]
        live = seg.live[(slice(None),) + (None,) * (old.ndim - 1)]
        new = jnp.where(live, values.astype(array.dtype), old)
        return paste(array, new[None], (seg.slot, at))

    return GdnLog(
        key=put(log.key, tile.key),
        key_scale=put(log.key_scale, tile.key_scale),
        value=put(log.value, tile.value),
        gate=put(log.gate, tile.gate),
        sealed=sealed,
        state_dtype=log.state_dtype,
    )


def _running_state(log: GdnLog, carried: Array, rows: Rows, index: Array, seg: Segment) -> Array:
    """State at the boundary below the tile: the slot's or the one carried, the block before it
    folded in where that is due; as it would be read back from the pool."""
    loaded = log.state_dtype.decode(take(log.sealed, take(rows.sealed_slot, seg.slot)))
    state = jnp.where(take(rows.segment_first, index), loaded, carried)
    tiles = rows.block_size // TILE_ROWS

    def fold(state: Array) -> Array:
        previous = _pages(log, seg.slot, (div(seg.tile, tiles) - 1) * tiles, tiles)
        return log.state_dtype.decode(log.state_dtype.encode(_seal(state, previous)))

    return lax.cond(take(rows.segment_fold, index), fold, lambda state: state, state)


def log_step(
    query: Float[Array, "R Hk dk"],
    key: Float[Array, "R Hk dk"],
    value: Float[Array, "R Hv dv"],
    gate: Float[Array, "R Hv"],
    beta: Float[Array, "R Hv"],
    log: GdnLog,
    rows: Rows,
) -> tuple[Float[Array, "R Hv dv"], GdnLog]:
    """Compute the rows of a call: prefill, decode and verify alike.

    Args:
      query, key: raw, not normalised.
      gate: log of the decay, float32, at most 0.
      beta: step size, float32, as it is to be used.

    Returns:
      Outputs in float32, and the log with the new rows and the stored seals.
    """
    tiles = rows.block_size // TILE_ROWS

    def segment(index: Array, carry: tuple[GdnLog, Array, Array]):
        log, carried, out = carry
        seg = segment_at(rows, index)
        state = _running_state(log, carried, rows, index, seg)
        sealed = log.sealed.at[take(rows.segment_store, index)].set(
            log.state_dtype.encode(state), mode="drop"
        )
        pages = _pages(log, seg.slot, div(seg.tile, tiles) * tiles, tiles)
        old = _pages(log, seg.slot, seg.tile, 1)
        live = seg.live[:, None, None]
        new_key = jnp.where(live, take(key, seg.row).astype(jnp.float32), old.key)
        scale = jnp.where(seg.live[:, None], inverse_length(new_key), old.key_scale)
        place = rem(seg.tile, tiles) * TILE_ROWS
        before = jnp.where(place > 0, take(pages.gate, jnp.maximum(place - 1, 0)), 0.0)
        total = _running_gates(take(gate, seg.row), old.gate, before, seg)
        tile = _Tile(take(query, seg.row).astype(jnp.float32), new_key, scale, total, old.value)
        u, o = _tile_values(
            tile,
            pages,
            state,
            take(value, seg.row).astype(jnp.float32),
            take(beta, seg.row),
            seg,
            log.value.dtype,
        )
        written = _Pages(new_key, scale, u, total)
        return _write_tile(log, written, sealed, seg), state, put_rows(out, seg, o)

    heads, dk, dv = value.shape[1], key.shape[2], value.shape[2]
    carry = (
        log,
        jnp.zeros((heads, dk, dv), jnp.float32),
        jnp.zeros(value.shape, jnp.float32),
    )
    log, _, out = lax.fori_loop(0, rows.num_segments, segment, carry)
    return out, log
