"""Softmax attention under an explicit mask: the plain, differentiable twin."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    mask: Bool[Array, "T S"],
    *,
    scale: float,
) -> Float[Array, "T N H"]:
    """Return the softmax-weighted mean of the values that each query may see.

    Query head n reads key/value head n // (N // K). A query that sees nothing gets zeros.

    Args:
      q: Queries, after norm and rotary embedding.
      k: Keys, likewise.
      v: Values.
      mask: True where the query may read the token; the caller puts causality in it.
      scale: Factor on the scores, usually H**-0.5.

    Numerics: float32; products at the ambient `jax_default_matmul_precision`.
    """
    probabilities = attention_probabilities(q, k, mask, scale=scale)
    num_rows, num_heads, head_dim = q.shape
    o = jnp.einsum("kgts,skh->tkgh", probabilities, v.astype(jnp.float32))
    return o.reshape(num_rows, num_heads, head_dim)


def attention_probabilities(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    mask: Bool[Array, "T S"],
    *,
    scale: float,
) -> Float[Array, "K group T S"]:
    """Return the softmax weights of `masked_attention`, heads as [K, N // K]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.astype(jnp.float32).reshape(
        num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim
    )
    scores = jnp.einsum("tkgh,skh->kgts", grouped, k.astype(jnp.float32)) * scale
    visible = mask[None, None, :, :]
    # The finite floor keeps a row that sees nothing free of inf - inf, in value and gradient.
    floor = jnp.finfo(jnp.float32).min
    peak = jnp.max(jnp.where(visible, scores, floor), axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores - peak, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0.0, total, 1.0)
