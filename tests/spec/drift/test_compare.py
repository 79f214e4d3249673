"""Differences of arrays, against neighbours of known numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec.drift import Difference, difference


def bfloat16(*values: float) -> np.ndarray:
    """Bits as states hold them."""
    return np.asarray(values, jnp.bfloat16).view(np.uint16)


def test_equal_bits_are_no_difference():
    x = np.asarray([[1.0, np.nan], [np.inf, -0.0]], np.float32)
    assert difference(x, x.copy()) == Difference(4)
    assert difference(x, x.copy()).is_zero


def test_neighbours_are_one_ulp_apart():
    x = np.asarray([1.0, -3.0, 0.0, 5.0], np.float32)
    y = np.nextafter(x, np.float32(np.inf))
    y[3] = x[3]
    found = difference(x, y)
    assert (found.num_elements, found.num_different, found.max_ulps) == (4, 3, 1)
    # Below 3 the distance of neighbours is 2**-22.
    assert found.max_abs == 2**-22


def test_bfloat16_has_its_own_neighbours_and_zeros_of_both_signs_differ_in_bits_alone():
    # Above 1 the distance of neighbours is 2**-7.
    assert difference(bfloat16(1.0, 2.0), bfloat16(1.0 + 2**-7, 2.0)) == Difference(2, 1, 2**-7, 1)
    assert difference(bfloat16(0.0), bfloat16(-0.0)) == Difference(1, 1, 0.0, 0)


def test_steps_are_counted_across_zero():
    smallest = np.float32(2**-149)
    x, y = np.asarray([smallest], np.float32), np.asarray([-smallest], np.float32)
    assert difference(x, y).max_ulps == 2


def test_rows_that_only_one_has_count_and_what_is_not_finite_is_infinitely_far():
    x = np.zeros((3, 2), np.float32)
    assert difference(x, x[:2]) == Difference(6, 2)
    assert difference(x[:0], x) == Difference(6, 6)
    y = x.copy()
    y[1, 1] = np.nan
    assert difference(x, y).max_abs == np.inf


def test_whole_numbers_have_no_ulps():
    x, y = np.asarray([3, 4], np.int32), np.asarray([3, 9], np.int32)
    assert difference(x, y) == Difference(2, 1, 5.0, 0)


def test_other_types_and_shapes_are_refused():
    x = np.zeros((2, 2), np.float32)
    for other in (x.astype(np.uint16), x[:, :1]):
        with pytest.raises(ValueError, match="cannot be compared"):
            difference(x, other)
