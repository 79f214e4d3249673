"""The norms of the model: float32 inside, one rounding at the end."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

L2_EPS = 1e-6


def _along_last(weight: Array, ndim: int) -> Array:
    return weight.astype(jnp.float32).reshape((1,) * (ndim - weight.ndim) + weight.shape)


def rms_norm(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Array:
    """Zero-centred RMS norm over the last axis: x / sqrt(mean(x^2) + eps) * (1 + weight)."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * (1.0 + _along_last(weight, x.ndim))).astype(x.dtype)


def grouped_rms_norm(
    x: Float[Array, "T ND"], weight: Float[Array, " ND"], groups: int, eps: float
) -> Array:
    """`rms_norm` with one mean for each of `groups` equal parts of the last axis."""
    wide = x.astype(jnp.float32).reshape(x.shape[0], groups, -1)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return ((wide * scale).reshape(x.shape) * (1.0 + _along_last(weight, x.ndim))).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "T N H"],
    gate: Float[Array, "T N H"],
    weight: Float[Array, " H"],
    eps: float,
    activation: Callable[[Array], Array],
) -> Array:
    """Output norm of Gated DeltaNet: norm(x) * weight * activation(gate); the weight is plain.

    Returns:
      The type of `gate`; `x` may be wider.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    gated = wide * scale * _along_last(weight, x.ndim) * activation(gate.astype(jnp.float32))
    return gated.astype(gate.dtype)


def inverse_length(x: Float[Array, "*T H"]) -> Float[Array, "*T"]:
    """1 / sqrt(sum(x^2) + 1e-6) over the last axis, float32: the factor that makes x a unit."""
    wide = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(wide * wide, axis=-1) + L2_EPS)
