"""The recurrent state that a sealed one and a log stand for."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.bits import from_bits
from pallas_kernels.gated_delta_net import GdnLog
from pallas_kernels.struct import build


def with_sealed(log: GdnLog, sealed: Any) -> GdnLog:
    """One slot's log with a sealed state of its own, as `running_state` takes it."""
    return build(
        GdnLog,
        key=log.key,
        key_scale=log.key_scale,
        value=log.value,
        gate=log.gate,
        sealed=sealed,
        state_dtype=log.state_dtype,
    )


def running_state(
    log: GdnLog, sealed_len: Int[Array, ""], depth: Int[Array, ""], *, block_size: int
) -> Float[Array, "Hv dk dv"]:
    """S after `depth` rows of one sequence, for inspection: no step ever makes it.

        S = exp(G_last) S_sealed + sum over j of exp(G_last - G_j) k_j u_j^T, block after block

    Args:
      log: of one slot; `sealed` is the slot's own state `[planes, ...]`, not the pool.
      sealed_len: the boundary that state stands at, at most two blocks below `depth`.

    Numerics: float32. Equal logs give equal bits; the order is not that of a seal.
    """
    state = log.state_dtype.decode(log.sealed)
    for block in range(2):
        state = _with_block(state, log, sealed_len + block * block_size, depth, block_size)
    return state


def _with_block(state: Array, log: GdnLog, first: Array, depth: Array, size: int) -> Array:
    """The state with the rows of the block at `first` that lie below `depth`."""
    heads = state.shape[0]
    position = first + jnp.arange(size, dtype=jnp.int32)
    row = lax.rem(position, log.gate.shape[1])
    live = position < depth
    gate = log.gate[:, row]
    count = jnp.clip(depth - first, 0, size)
    last = jnp.where(count > 0, gate[:, jnp.maximum(count - 1, 0)], 0.0)[:, None]
    key = from_bits(log.key[:, :, row]).astype(jnp.float32) * log.key_scale[:, None, row]
    key = jnp.repeat(key, heads // key.shape[0], axis=0)
    value = from_bits(log.value[:, row]).astype(jnp.float32)
    # Rows that are not there may hold anything.
    weight = jnp.exp(jnp.where(live[None, :], last - gate, 0.0))
    value = jnp.where(live[None, :, None], value * weight[:, :, None], 0.0)
    key = jnp.where(live[None, None, :], key, 0.0)
    new = jnp.einsum("hkj,hjv->hkv", key, value, precision=lax.Precision.HIGHEST)
    return jnp.exp(last)[:, :, None] * state + new
