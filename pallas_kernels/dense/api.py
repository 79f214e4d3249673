"""y = x W^T with a float32 sum.

On the CPU the canonical order is that of XLA's product of 2 to 32 rows with a weight stored by its
input: callers run this inside `map_row_tiles`.
"""

from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.struct import struct

HIGHEST = lax.Precision.HIGHEST


@struct
class InputMajor:
    """A weight, or a stack of them, stored by its input axis.

    The CPU multiplies few rows a third faster so, and adds in one order for 2 to 32 rows.
    """

    array: Float[Array, "*E K N"]


Weight = Float[Array, "N K"] | InputMajor


def dense(x: Float[Array, "M K"], weight: Weight) -> Float[Array, "M N"]:
    """Return x W^T in float32.

    Numerics: operands are exact in float32 (bfloat16 values are widened), the sum is float32.
    Source: torch `Linear` layout, weight `[out, in]`.
    """
    x = x.astype(jnp.float32)
    array, axis = (weight.array, 0) if isinstance(weight, InputMajor) else (weight, 1)
    return lax.dot_general(
        x, array.astype(jnp.float32), (((1,), (axis,)), ((), ())), precision=HIGHEST
    )


def linear(x: Float[Array, "M K"], weight: Weight) -> Float[Array, "M N"]:
    """`dense`, rounded once to the type of `x`."""
    return dense(x, weight).astype(x.dtype)
