"""Dropless experts for one 16-row tile: each expert's product in turn, summed in rank order."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dense import dense, linear
from pallas_kernels.index import take


def route(
    logits: Float[Array, "M E"], *, top_k: int, renormalize: bool
) -> tuple[Float[Array, "M k"], Int[Array, "M k"]]:
    """Choose experts by (probability, lower id first).

    Returns:
      Float32 weights, rescaled to sum to one if `renormalize`, and ids in rank order.
    """
    probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weight, expert = lax.top_k(probability, top_k)
    if renormalize:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    return weight, expert


def expert_mix(
    x: Float[Array, "M D"],
    weight: Float[Array, "M k"],
    expert: Int[Array, "M k"],
    live: Bool[Array, " M"],
    gate_up: Float[Array, "E F2 D"],
    down: Float[Array, "E D F"],
) -> Float[Array, "M D"]:
    """sum over ranks r of weight_r * expert_r(x), expert(x) = down(silu(gate x) * up x).

    Experts that no live row chose are skipped.

    Numerics: each product float32 and rounded to the type of `x`; the sum over ranks in float32.
    """
    num_experts, top_k = gate_up.shape[0], expert.shape[1]
    expert = jnp.where(live[:, None], expert, num_experts)

    def one(e: Array, by_rank: Array) -> Array:
        mine = expert == e

        def compute(by_rank: Array) -> Array:
            hidden = linear(x, take(gate_up, e))
            gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
            y = dense((jax.nn.silu(gate) * up).astype(x.dtype), take(down, e)).astype(x.dtype)
            return jnp.where(mine[:, :, None], y[:, None, :].astype(jnp.float32), by_rank)

        return lax.cond(jnp.any(mine), compute, lambda by_rank: by_rank, by_rank)

    by_rank = jnp.zeros((x.shape[0], top_k, x.shape[1]), jnp.float32)
    by_rank = lax.fori_loop(0, num_experts, one, by_rank)
    total = jnp.zeros(x.shape, jnp.float32)
    for rank in range(top_k):
        total = total + weight[:, rank][:, None] * by_rank[:, rank]
    return total
