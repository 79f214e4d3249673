"""Partial rotary embedding in half-split pairs."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope(
    x: Float[Array, "T N H"], position: Int[Array, " T"], *, rotary_dim: int, theta: float
) -> Float[Array, "T N H"]:
    """Rotate the first `rotary_dim` entries of each head; the others pass.

    (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), pairs (i, i + rotary_dim / 2), angle =
    position * theta ** (-2 i / rotary_dim).

    Numerics: float32 angles and products, one rounding to the type of `x`.
    """
    half = rotary_dim // 2
    frequency = (theta ** (-np.arange(half, dtype=np.float64) / half)).astype(np.float32)
    angle = position.astype(jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, (half, rotary_dim), axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
