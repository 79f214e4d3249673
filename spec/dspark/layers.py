"""What each row of a DSpark draft computes alone: norms, rotation, projections, feed-forward."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dense import linear
from pallas_kernels.struct import struct
from qwen_hybrid.dspark_config import DSparkConfig, YarnConfig
from qwen_hybrid.layers import Weights, add, gated_mlp


def plain_rms_norm(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Array:
    """RMS norm over the last axis, x / sqrt(mean(x^2) + eps) * weight: not zero-centred.

    Numerics: float32 inside, one rounding.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    across = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (wide * scale * across).astype(x.dtype)


def rotary_frequencies(config: DSparkConfig) -> np.ndarray:
    """Radians a token of each pair of entries, float64; YaRN divides the slow ones.

    Pairs that turn more than `beta_fast` times over the original length keep their frequency, those
    that turn less than `beta_slow` times have it divided, and a ramp over the pairs lies between.

    Source: YaRN (arXiv 2309.00071), section 3.2.
    """
    half = config.head_dim // 2
    plain = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    if config.yarn is None:
        return plain
    first, last = (_pair_that_turns(n, config.yarn, config) for n in _turns(config.yarn))
    first, last = max(math.floor(first), 0), min(math.ceil(last), config.head_dim - 1)
    # The ramp needs a width.
    ramp = (np.arange(half) - first) / max(last - first, 1e-3)
    divided = np.clip(ramp, 0.0, 1.0)
    return plain * (1.0 - divided) + plain / config.yarn.factor * divided


def _turns(yarn: YarnConfig) -> tuple[float, float]:
    return yarn.beta_fast, yarn.beta_slow


def _pair_that_turns(turns: float, yarn: YarnConfig, config: DSparkConfig) -> float:
    """Return which pair, as a real number, turns so often over the original length."""
    wavelengths = yarn.original_max_positions / (turns * 2 * math.pi)
    return config.head_dim * math.log(wavelengths) / (2 * math.log(config.rope_theta))


def rotate(
    x: Float[Array, "T N H"], position: Int[Array, " T"], config: DSparkConfig
) -> Float[Array, "T N H"]:
    """Rotate half-split pairs of each head by their position.

    Numerics: float32 angles and products, one rounding.
    """
    frequency = rotary_frequencies(config).astype(np.float32)
    scale = 1.0 if config.yarn is None else config.yarn.attention_factor
    angle = position.astype(jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[:, None, :] * scale, jnp.sin(angle)[:, None, :] * scale
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def context_rows(
    config: DSparkConfig, params: Weights, taps: Float[Array, "T _"]
) -> Float[Array, "T D"]:
    """What all layers read of a token of the target: norm(fc(taps))."""
    return plain_rms_norm(linear(taps, params["fc"]), params["hidden_norm"], config.rms_norm_eps)


def keys_and_values(
    config: DSparkConfig, attention: Weights, x: Float[Array, "T D"], position: Int[Array, " T"]
) -> tuple[Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Keys, normed and rotated, and values of context rows or of normed block rows."""
    shape = (-1, config.num_kv_heads, config.head_dim)
    key = linear(x, attention["k_proj"]).reshape(shape)
    normed = plain_rms_norm(key, attention["k_norm"], config.rms_norm_eps)
    return rotate(normed, position, config), linear(x, attention["v_proj"]).reshape(shape)


@struct
class BlockProjection:
    """Queries, keys and values of block rows, queries and keys normed and rotated."""

    query: Float[Array, "T N H"]
    key: Float[Array, "T K H"]
    value: Float[Array, "T K H"]


def project(
    config: DSparkConfig, layer: Weights, x: Float[Array, "T D"], position: Int[Array, " T"]
) -> BlockProjection:
    """What a layer's attention reads of block rows."""
    attention, eps = layer["self_attn"], config.rms_norm_eps
    h = plain_rms_norm(x, layer["input_layernorm"], eps)
    query = linear(h, attention["q_proj"]).reshape(-1, config.num_heads, config.head_dim)
    query = rotate(plain_rms_norm(query, attention["q_norm"], eps), position, config)
    return BlockProjection(query, *keys_and_values(config, attention, h, position))


def close(
    config: DSparkConfig, layer: Weights, x: Float[Array, "T D"], mixed: Float[Array, "T N H"]
) -> Float[Array, "T D"]:
    """Add the attention's output and the MLP's to the residual."""
    rows = mixed.astype(x.dtype).reshape(mixed.shape[0], -1)
    x = add(x, linear(rows, layer["self_attn"]["o_proj"]))
    h = plain_rms_norm(x, layer["post_attention_layernorm"], config.rms_norm_eps)
    return add(x, gated_mlp(layer["mlp"], h))
