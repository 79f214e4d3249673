"""y = x W^T with a float32 sum.

On the CPU the canonical order is that of one 16-row tile: callers run this inside
`map_row_tiles`, whose body has one shape in every program.
"""

from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

HIGHEST = lax.Precision.HIGHEST


def dense(x: Float[Array, "M K"], weight: Float[Array, "N K"]) -> Float[Array, "M N"]:
    """Return x W^T in float32.

    Numerics: operands are exact in float32 (bfloat16 values are widened), the sum is float32.
    Source: torch `Linear` layout, weight `[out, in]`.
    """
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=HIGHEST)


def linear(x: Float[Array, "M K"], weight: Float[Array, "N K"]) -> Float[Array, "M N"]:
    """`dense`, rounded once to the type of `x`."""
    return dense(x, weight).astype(x.dtype)
