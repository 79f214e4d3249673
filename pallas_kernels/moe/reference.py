"""Routing and expert mixture, dense over the experts: the plain, differentiable twin."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def route(
    logits: Float[Array, "T E"], top_k: int, renormalize: bool
) -> tuple[Float[Array, "T {top_k}"], Int[Array, "T {top_k}"]]:
    """Choose `top_k` experts per row from the softmax over all of them.

    Args:
      logits: Router outputs.
      top_k: Experts per row.
      renormalize: Divide the chosen weights by their sum.

    Returns:
      Weights in float32 and expert ids, best first; of equal probabilities the lower id first.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    ids = jnp.argsort(-probabilities, axis=-1, stable=True)[:, :top_k].astype(jnp.int32)
    weights = jnp.take_along_axis(probabilities, ids, axis=-1)
    if renormalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, ids


def expert_mix(
    x: Float[Array, "T D"],
    weights: Float[Array, "T k"],
    ids: Int[Array, "T k"],
    gate_up: Float[Array, "E two_F D"],
    down: Float[Array, "E D F"],
) -> Float[Array, "T D"]:
    """Return the weighted sum of each row's experts, every expert a SiLU-gated MLP.

        sum_k weights_k * down_e (silu(gate_e x) * (up_e x)),   e = ids_k

    Args:
      x: Rows.
      weights: Weight of each chosen expert.
      ids: The chosen experts, distinct within a row.
      gate_up: Gate rows first, then up rows, [out, in] per expert.
      down: Output projection per expert, [out, in].

    Numerics: float32; products at the ambient `jax_default_matmul_precision`. Every expert sees
    every row and the unchosen ones are weighted by zero: simple, not fast.
    """
    num_experts, double_width, _ = gate_up.shape
    hidden = jnp.einsum("td,efd->tef", x.astype(jnp.float32), gate_up.astype(jnp.float32))
    gate, up = hidden[:, :, : double_width // 2], hidden[:, :, double_width // 2 :]
    chosen = jax.nn.one_hot(ids, num_experts, dtype=jnp.float32)
    per_expert = jnp.sum(chosen * weights.astype(jnp.float32)[:, :, None], axis=1)
    inner = jax.nn.silu(gate) * up * per_expert[:, :, None]
    return jnp.einsum("tef,edf->td", inner, down.astype(jnp.float32))
