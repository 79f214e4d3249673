"""Random values of a declared parameter."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from qwen_hybrid.params import ParamSpec


def random_array(spec: ParamSpec, key: Array, dtype: str) -> Array:
    """Draw one parameter.

    Matrices are normal with standard deviation 1 / sqrt(fan_in), decays and step sizes as in the
    Gated DeltaNet paper: A uniform in [1, 16], dt log-uniform in [1e-3, 0.1].

    Args:
      dtype: activation dtype of the model; parameters declared float32 stay float32.
    """
    shape, target = spec.shape, jnp.dtype(spec.resolved_dtype(dtype))
    match spec.init:
        case "zeros":
            return jnp.zeros(shape, target)
        case "ones":
            return jnp.ones(shape, target)
        case "a_log":
            value = jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
        case "dt_bias":
            low, high = math.log(1e-3), math.log(0.1)
            step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
            value = step + jnp.log(-jnp.expm1(-step))
        case "embedding":
            value = 0.02 * jax.random.normal(key, shape)
        case _:
            value = jax.random.normal(key, shape) / math.sqrt(shape[-1])
    return value.astype(target)
