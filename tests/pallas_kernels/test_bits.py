"""bfloat16 kept as its bits, against NumPy's bfloat16."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.bits import from_bits, storage_dtype, to_bits

ALL = np.arange(1 << 16, dtype=np.uint16)


def test_every_pattern_comes_back():
    values = from_bits(jnp.asarray(ALL))
    assert values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(values).view(np.uint16), ALL)
    np.testing.assert_array_equal(to_bits(values, jnp.uint16), ALL)


def test_float32_is_rounded_to_the_nearest_and_ties_to_even():
    is_finite = (ALL & 0x7F80) != 0x7F80
    word = ALL[is_finite].astype(np.uint32) << 16
    # What bfloat16 leaves out: nothing, just below, at and just above half a unit, nearly a unit.
    rest = np.array([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (word[:, None] + rest[None, :]).reshape(-1).view(np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(to_bits(jnp.asarray(x), jnp.uint16), expected)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_other_types_are_stored_as_they_are(dtype):
    assert storage_dtype(dtype) == dtype
    x = jnp.arange(3, dtype=dtype)
    assert to_bits(x, storage_dtype(dtype)).dtype == dtype
    assert from_bits(x) is x
