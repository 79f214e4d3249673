"""Depthwise causal convolution over rows: the plain, differentiable twin."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def causal_conv(
    x: Float[Array, "T C"],
    weight: Float[Array, "C Kc"],
    *,
    dilation: int = 1,
    tail: Float[Array, "tail C"],
) -> Float[Array, "T C"]:
    """Convolve each channel with its own taps, looking only backwards; no activation.

        y[t] = sum_j weight[:, j] * x[t - (Kc - 1 - j) * dilation]

    Args:
      x: New rows.
      weight: Taps, oldest first; the last one multiplies the current row.
      dilation: Distance in rows between two taps.
      tail: The (Kc - 1) * dilation rows before x; zeros at the start of a sequence.

    Raises:
      ValueError: tail has another number of rows.

    Numerics: float32, taps added oldest first.
    """
    num_taps = weight.shape[1]
    if tail.shape[0] != (num_taps - 1) * dilation:
        raise ValueError(
            f"tail has {tail.shape[0]} rows; {num_taps} taps at dilation {dilation} "
            f"need {(num_taps - 1) * dilation}"
        )
    num_rows = x.shape[0]
    rows = jnp.concatenate([tail.astype(jnp.float32), x.astype(jnp.float32)])
    taps = weight.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32)
    for j in range(num_taps):
        y = y + rows[j * dilation : j * dilation + num_rows] * taps[None, :, j]
    return y
