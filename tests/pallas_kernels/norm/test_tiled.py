"""Norms against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm import gated_rms_norm, grouped_rms_norm, inverse_length, rms_norm
from tests.oracles import numpy_layers as oracle
from tests.tolerances import rounding

EPS = 1e-6
SCALES = (1e-4, 1.0, 300.0)


def _draw(scale: float, *shape: int, dtype: str = "float32") -> jax.Array:
    x = scale * np.random.default_rng(len(shape)).standard_normal(shape)
    return jnp.asarray(x, dtype)


def _close(actual: jax.Array, expected: np.ndarray, dtype: str) -> None:
    """Compare with one rounding to `dtype` allowed."""
    assert actual.dtype == jnp.dtype(dtype)
    wide = np.asarray(actual, np.float64)
    np.testing.assert_allclose(wide, expected, rtol=rounding(dtype), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", SCALES)
def test_rms_norm(scale, dtype):
    x, weight = _draw(scale, 5, 3, 48, dtype=dtype), _draw(0.3, 48, dtype=dtype)
    expected = oracle.rms_norm(np.asarray(x, np.float64), np.asarray(weight, np.float64), EPS)
    _close(rms_norm(x, weight, EPS), expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 4])
def test_grouped_rms_norm(groups, dtype):
    x, weight = _draw(2.0, 5, 48, dtype=dtype), _draw(0.3, 48, dtype=dtype)
    wide = np.asarray(x, np.float64) * np.repeat([1.0, 10.0, 0.1, 5.0], 12)
    x = jnp.asarray(wide, dtype)
    expected = oracle.rms_norm(
        np.asarray(x, np.float64), np.asarray(weight, np.float64), EPS, groups=groups
    )
    _close(grouped_rms_norm(x, weight, groups, EPS), expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["silu", "sigmoid"])
def test_gated_rms_norm(name, dtype):
    x, gate = _draw(2.0, 5, 3, 16), _draw(3.0, 5, 3, 16, dtype=dtype)
    weight = _draw(1.0, 16)
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * np.asarray(weight)
    expected = normed * getattr(oracle, name)(np.asarray(gate, np.float64))
    _close(gated_rms_norm(x, gate, weight, EPS, getattr(jax.nn, name)), expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", SCALES)
def test_inverse_length(scale, dtype):
    x = _draw(scale, 5, 3, 128, dtype=dtype)
    expected = ((np.asarray(x, np.float64) ** 2).sum(-1) + 1e-6) ** -0.5
    _close(inverse_length(x), expected, "float32")


def test_rows_of_zeros_stay_zeros():
    zeros = jnp.zeros((2, 8), jnp.float32)
    assert not np.asarray(rms_norm(zeros, jnp.ones(8), EPS)).any()
    np.testing.assert_allclose(inverse_length(zeros), 1e3, rtol=1e-6)
