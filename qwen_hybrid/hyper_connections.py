"""Hyper-connections: what a layer reads from several residual streams and writes back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dense import dense
from pallas_kernels.norm import grouped_rms_norm
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.layers import Weights


def spread(x: Float[Array, "T D"], config: HybridConfig) -> Float[Array, "T ND"]:
    """Start every stream as a copy."""
    assert config.hyper_connection is not None
    return jnp.tile(x, (1, config.hyper_connection.count))


def mean(streams: Float[Array, "T ND"], config: HybridConfig) -> Float[Array, "T D"]:
    """Average the streams in float32, in their order; one rounding."""
    assert config.hyper_connection is not None
    count = config.hyper_connection.count
    parts = streams.astype(jnp.float32).reshape(streams.shape[0], count, -1)
    total = parts[:, 0]
    for stream in range(1, count):
        total = total + parts[:, stream]
    return (total / count).astype(streams.dtype)


def read(
    weights: Weights, streams: Float[Array, "T ND"], config: HybridConfig
) -> tuple[Float[Array, "T D"], Float[Array, "T ND"]]:
    """Mix the normalised streams into one row.

    read = (1/n) sum over s of sigmoid(W_up silu(W_down N / n))_s * N_s.

    Returns:
      The row a layer reads, and the normalised streams.
    """
    assert config.hyper_connection is not None
    count = config.hyper_connection.count
    normed = grouped_rms_norm(streams, weights["hc_norm"], count, config.rms_norm_eps)
    low = jax.nn.silu(dense(normed, weights["input_mix_weight_down"]) / count)
    mix = jax.nn.sigmoid(dense(low.astype(streams.dtype), weights["input_mix_weight_up"]))
    mixed = (mix * normed.astype(jnp.float32)).reshape(streams.shape[0], count, -1)
    total = mixed[:, 0]
    for stream in range(1, count):
        total = total + mixed[:, stream]
    return (total / count).astype(streams.dtype), normed


def inject_weights(
    weights: Weights, normed: Float[Array, "T ND"], config: HybridConfig
) -> Float[Array, "T N"]:
    """2 sigmoid(W_inject N / n): how much each stream takes of the layer's output."""
    assert config.hyper_connection is not None
    logits = dense(normed, weights["block_inject_weight"]) / config.hyper_connection.count
    return 2.0 * jax.nn.sigmoid(logits)


def inject(
    streams: Float[Array, "T ND"], weight: Float[Array, "T N"], y: Float[Array, "T D"]
) -> Float[Array, "T ND"]:
    """Add the layer's output to every stream; one rounding."""
    part = weight[:, :, None] * y.astype(jnp.float32)[:, None, :]
    total = streams.astype(jnp.float32) + part.reshape(streams.shape)
    return total.astype(streams.dtype)
