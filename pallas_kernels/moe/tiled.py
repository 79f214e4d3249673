"""Dropless experts for one tile of rows: each expert's product in turn, summed in rank order."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dense import InputMajor, linear
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
    gate_up: Float[Array, "E F2 D"] | InputMajor,
    down: Float[Array, "E D F"] | InputMajor,
) -> Float[Array, "M D"]:
    """sum over ranks r of weight_r * expert_r(x), expert(x) = down(silu(gate x) * up x).

    Experts that no live row chose are skipped.

    Numerics: each product float32 and rounded to the type of `x`; the sum over ranks in float32.
    """
    num_rows, top_k = expert.shape
    gate_up, down = _stack(gate_up), _stack(down)
    num_experts = gate_up.array.shape[0]
    expert = jnp.where(live[:, None], expert, num_experts)
    is_chosen = jnp.zeros(num_experts, bool).at[expert.reshape(-1)].set(True, mode="drop")
    most = min(num_experts, num_rows * top_k)
    (chosen,) = jnp.nonzero(is_chosen, size=most, fill_value=0)

    def one(i: Array, by_rank: Array) -> Array:
        e = take(chosen, i)
        hidden = linear(x, InputMajor(take(gate_up.array, e)))
        gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
        y = linear((jax.nn.silu(gate) * up).astype(x.dtype), InputMajor(take(down.array, e)))
        return jnp.where((expert == e)[:, :, None], y[:, None, :].astype(jnp.float32), by_rank)

    by_rank = jnp.zeros((num_rows, top_k, x.shape[1]), jnp.float32)
    count = jnp.sum(is_chosen, dtype=jnp.int32)
    by_rank = lax.fori_loop(0, count, one, by_rank)
    total = jnp.zeros(x.shape, jnp.float32)
    for rank in range(top_k):
        total = total + weight[:, rank][:, None] * by_rank[:, rank]
    return total


def _stack(weight: Float[Array, "E N K"] | InputMajor) -> InputMajor:
    return weight if isinstance(weight, InputMajor) else InputMajor(weight.swapaxes(1, 2))
