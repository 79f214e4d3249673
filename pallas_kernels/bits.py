"""bfloat16 kept as its bits.

XLA on the CPU updates part of a bfloat16 array by widening all of it to float32 and back, so
arrays that are updated in place, the decode state above all, hold uint16 patterns instead.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def storage_dtype(dtype: Any) -> Any:
    """The type that values of `dtype` are stored in."""
    return jnp.dtype(jnp.uint16) if jnp.dtype(dtype) == jnp.bfloat16 else jnp.dtype(dtype)


def to_bits(x: Array, storage: Any) -> Array:
    """Values as an array of type `storage` holds them, rounded to bfloat16 if that is uint16."""
    if jnp.dtype(storage) == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)


def from_bits(x: Array) -> Array:
    """The values of a stored array: uint16 is bfloat16, any other type is itself."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
