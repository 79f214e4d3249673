"""Gated DeltaNet mixer: projections, convolution, gates, the log form, gated output norm."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.causal_conv import causal_conv, conv_rows
from pallas_kernels.dense import linear
from pallas_kernels.gated_delta_net import LogInputs, gated_delta_rule, log_step
from pallas_kernels.norm import gated_rms_norm
from pallas_kernels.rows import Rows, map_row_tiles, write_ring
from pallas_kernels.struct import struct
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.layers import Weights
from qwen_hybrid.state import GdnState


@struct
class GdnProjection:
    """What the mixer computes from each row alone."""

    qkv: Float[Array, "T C"]
    z: Float[Array, "T Vd"]
    b: Float[Array, "T Hv"]
    a: Float[Array, "T Hv"]


def project(weights: Weights, x: Float[Array, "T D"]) -> GdnProjection:
    """Apply the four input projections."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return GdnProjection(*(linear(x, weights[name]) for name in names))


def _gates(weights: Weights, projection: GdnProjection) -> tuple[Array, Array]:
    """(log-gate, beta) in float32.

    beta is rounded to the activation type before use, in every path.
    """
    a = projection.a.astype(jnp.float32) + weights["dt_bias"].astype(jnp.float32)[None, :]
    softplus = jnp.where(a > 20.0, a, jnp.log1p(jnp.exp(jnp.minimum(a, 20.0))))
    gate = -jnp.exp(weights["A_log"].astype(jnp.float32))[None, :] * softplus
    beta = jax.nn.sigmoid(projection.b.astype(jnp.float32)).astype(projection.b.dtype)
    return gate, beta.astype(jnp.float32)


def _split(mixed: Float[Array, "T C"], dtype, config: HybridConfig) -> tuple[Array, Array, Array]:
    """(q, k, v) by head, after the activation."""
    gdn = config.gdn
    rounded = mixed.astype(dtype).astype(jnp.float32)
    active = jax.nn.silu(rounded).astype(dtype)
    q, k, v = jnp.split(active, (gdn.key_width, 2 * gdn.key_width), axis=-1)
    keys = (-1, gdn.num_key_heads, gdn.key_dim)
    return q.reshape(keys), k.reshape(keys), v.reshape(-1, gdn.num_value_heads, gdn.value_dim)


def mix_rows(
    weights: Weights, projection: GdnProjection, state: GdnState, rows: Rows, config: HybridConfig
) -> tuple[Float[Array, "R Hv dv"], GdnState]:
    """Convolve and apply the delta rule along each sequence, from the state as it stands."""
    dtype = projection.qkv.dtype
    index = jnp.arange(rows.slot.shape[0], dtype=jnp.int32)

    def convolve(row: Array, projection_tile: GdnProjection) -> dict[str, Array]:
        mixed = conv_rows(projection.qkv, state.conv, weights["conv1d"], rows, row)
        q, k, v = _split(mixed, dtype, config)
        gate, beta = _gates(weights, projection_tile)
        return {"query": q, "key": k, "value": v, "gate": gate, "beta": beta}

    made = map_row_tiles(convolve, rows, index, projection)
    # A loop of its own: in one kernel with the convolution, lengths would be those of keys that are
    # computed once more, not of the keys that are stored.
    inputs = map_row_tiles(lambda new: LogInputs.of(**new), rows, made)
    out, log = log_step(inputs, state.log, rows)
    return out, GdnState(write_ring(state.conv, projection.qkv, rows), log)


def mix_sequence(
    weights: Weights, projection: GdnProjection, config: HybridConfig
) -> Float[Array, "T Hv dv"]:
    """The same over one whole sequence from its start, differentiable."""
    gdn, dtype = config.gdn, projection.qkv.dtype
    tail = jnp.zeros((gdn.conv_width - 1, gdn.conv_channels), jnp.float32)
    mixed = causal_conv(projection.qkv.astype(jnp.float32), weights["conv1d"], tail=tail)
    q, k, v = _split(mixed, dtype, config)
    state = jnp.zeros((gdn.num_value_heads, gdn.key_dim, gdn.value_dim), jnp.float32)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    gate, beta = _gates(weights, projection)
    out, _ = gated_delta_rule(q, k, v, gate, beta, state=state)
    return out


def output(
    weights: Weights,
    mixed: Float[Array, "T Hv dv"],
    projection: GdnProjection,
    config: HybridConfig,
) -> Float[Array, "T D"]:
    """Gated norm of each head, then the output projection."""
    gdn = config.gdn
    activation = jax.nn.silu if gdn.gate == "silu" else jax.nn.sigmoid
    z = projection.z.reshape(mixed.shape)
    rounded = mixed.astype(z.dtype)
    normed = gated_rms_norm(rounded, z, weights["norm"], config.rms_norm_eps, activation)
    return linear(normed.reshape(normed.shape[0], -1), weights["out_proj"])
