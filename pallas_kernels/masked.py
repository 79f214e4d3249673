"""Weighted sums of values that not every row may see."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def sum_seen(
    weigh: Callable[[Array], Array], values: Float[Array, "J *V"], mask: Bool[Array, "T J"]
) -> Float[Array, "T *O"]:
    """`weigh(values)`, where row t weighs values outside its mask by zero.

    Zero times NaN is NaN, so values that are not finite are taken out of the sum, and the rows
    that may see one are NaN as a whole.

    Args:
      weigh: maps values to sums by row, such as a product with `[T, J]` weights.
    """
    finite = jnp.all(jnp.isfinite(values), axis=tuple(range(1, values.ndim)))
    total = weigh(jnp.where(finite.reshape(-1, *(1,) * (values.ndim - 1)), values, 0.0))
    spoiled = jnp.any(mask & ~finite[None, :], axis=1)
    return jnp.where(spoiled.reshape(-1, *(1,) * (total.ndim - 1)), jnp.nan, total)
