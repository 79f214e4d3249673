"""The dense product against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense import dense, linear
from tests.tolerances import product_error, rounding

SHAPES = ((1, 7, 5), (16, 64, 96), (17, 300, 33), (3, 2048, 20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_rows", "width", "out"), SHAPES)
def test_product(num_rows, width, out, dtype):
    rng = np.random.default_rng(width)
    x = jnp.asarray(rng.standard_normal((num_rows, width)), dtype)
    weight = jnp.asarray(rng.standard_normal((out, width)), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    y = dense(x, weight)
    assert y.dtype == jnp.float32
    limit = product_error(width)
    np.testing.assert_allclose(y, exact, rtol=0, atol=limit)
    rounded = linear(x, weight)
    assert rounded.dtype == x.dtype
    wide = np.asarray(rounded, np.float64)
    np.testing.assert_allclose(wide, exact, rtol=rounding(dtype), atol=limit)


def test_mixed_types_are_widened_and_not_rounded():
    x = jnp.asarray([[1.0 + 2**-12, 1.0]], jnp.float32)
    weight = jnp.asarray([[1.0, -1.0]], jnp.bfloat16)
    assert float(dense(x, weight)[0, 0]) == 2**-12
