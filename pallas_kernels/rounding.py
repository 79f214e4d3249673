"""Products that are rounded before they are added to anything."""

import jax.numpy as jnp
from jaxtyping import Array


def product(a: Array, b: Array) -> Array:
    """a * b, rounded; inf for NaN.

    A compiler may contract a product and a sum that meet in one kernel into a single operation
    with one rounding; which of them meet differs between programs. A select between them keeps
    them apart where its outcome can neither be known (so it gives what is not the product of NaN)
    nor be moved out of the loop (so it asks each element).
    """
    p = a * b
    return jnp.where(p == p, p, jnp.inf)
