"""Causal convolution of packed rows, the taps before the call taken from a ring."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.rows import Rows, previous_rows


def conv_rows(
    x: Float[Array, "R C"],
    ring: Shaped[Array, "B N C"],
    weight: Float[Array, "C K"],
    rows: Rows,
    row: Int[Array, " M"],
    *,
    dilation: int = 1,
) -> Float[Array, "M C"]:
    """y[t] = sum over j of weight[:, j] x[t - (K - 1 - j) dilation], for the packed rows `row`.

    Numerics: float32 products, added from the oldest tap to the current row.
    """
    taps = weight.shape[1]
    total = jnp.zeros((row.shape[0], x.shape[1]), jnp.float32)
    for j in range(taps):
        value = previous_rows(x, ring, rows, row, (taps - 1 - j) * dilation)
        total = total + value.astype(jnp.float32) * weight[:, j].astype(jnp.float32)[None, :]
    return total
