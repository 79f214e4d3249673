"""Gated full attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import masked_attention, paged_attention
from pallas_kernels.dense import linear
from pallas_kernels.norm import rms_norm
from pallas_kernels.rope import rope
from pallas_kernels.rows import Rows, write_pages
from pallas_kernels.struct import struct
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.layers import Weights
from qwen_hybrid.state import AttentionState


@struct
class AttentionProjection:
    """Query and key after norm and rotation, value, and the raw output gate."""

    query: Float[Array, "T N H"]
    gate: Float[Array, "T N H"]
    key: Float[Array, "T K H"]
    value: Float[Array, "T K H"]


def project(
    weights: Weights, x: Float[Array, "T D"], position: Int[Array, " T"], config: HybridConfig
) -> AttentionProjection:
    """Project, norm and rotate. Each head's query rows come before its gate rows."""
    a, eps = config.attention, config.rms_norm_eps
    both = linear(x, weights["q_proj"]).reshape(-1, a.num_heads, 2 * a.head_dim)
    query, gate = jnp.split(both, 2, axis=-1)
    keys = (-1, a.num_kv_heads, a.head_dim)
    key = linear(x, weights["k_proj"]).reshape(keys)
    value = linear(x, weights["v_proj"]).reshape(keys)

    def turn(heads: Array, weight: Array) -> Array:
        normed = rms_norm(heads, weight, eps)
        return rope(normed, position, rotary_dim=a.rotary_dim, theta=a.rope_theta)

    return AttentionProjection(
        turn(query, weights["q_norm"]), gate, turn(key, weights["k_norm"]), value
    )


def write_kv(state: AttentionState, projection: AttentionProjection, rows: Rows) -> AttentionState:
    """Store the keys and values of the new rows."""
    return AttentionState(
        write_pages(state.key_pages, projection.key, rows, row_axis=3),
        write_pages(state.value_pages, projection.value, rows, row_axis=2),
    )


def mix_rows(
    projection: AttentionProjection, state: AttentionState, rows: Rows, config: HybridConfig
) -> tuple[Float[Array, "R N H"], AttentionState]:
    """Attend along each sequence, the new rows included."""
    state = write_kv(state, projection, rows)
    scale = config.attention.head_dim**-0.5
    out = paged_attention(projection.query, state.key_pages, state.value_pages, rows, scale=scale)
    return out, state


def causal_mask(num_tokens: int) -> Array:
    """True at or below the diagonal."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def mix_sequence(
    projection: AttentionProjection, mask: Array, config: HybridConfig
) -> Float[Array, "T N H"]:
    """Attend inside one whole sequence, differentiable."""
    scale = config.attention.head_dim**-0.5
    return masked_attention(projection.query, projection.key, projection.value, mask, scale=scale)


def output(
    weights: Weights, mixed: Float[Array, "T N H"], projection: AttentionProjection
) -> Float[Array, "T D"]:
    """Gate each head's output, then project."""
    dtype = projection.gate.dtype
    rounded = mixed.astype(dtype).astype(jnp.float32)
    gated = rounded * jax.nn.sigmoid(projection.gate.astype(jnp.float32))
    return linear(gated.astype(dtype).reshape(gated.shape[0], -1), weights["o_proj"])
