"""Causal convolution against the element-by-element oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_conv.reference import causal_conv
from tests.oracles import causal_conv as oracle


@pytest.mark.parametrize("num_rows", [0, 1, 2, 65])
@pytest.mark.parametrize(("num_taps", "dilation"), [(4, 1), (4, 3), (3, 4), (1, 1)])
def test_matches_oracle(num_rows, num_taps, dilation):
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, 5)).astype(np.float32)
    weight = rng.standard_normal((5, num_taps)).astype(np.float32)
    tail = rng.standard_normal(((num_taps - 1) * dilation, 5)).astype(np.float32)
    y = causal_conv(jnp.asarray(x), jnp.asarray(weight), dilation=dilation, tail=jnp.asarray(tail))
    np.testing.assert_allclose(y, oracle.convolve(x, weight, dilation, tail), atol=2e-6)


def test_last_tap_is_the_current_row():
    x = jnp.arange(6.0).reshape(6, 1)
    y = causal_conv(x, jnp.array([[0.0, 0.0, 0.0, 1.0]]), tail=jnp.zeros((3, 1)))
    np.testing.assert_array_equal(y, x)


def test_wrong_tail_is_refused():
    with pytest.raises(ValueError, match="3 rows.*dilation 2 need 6"):
        causal_conv(jnp.zeros((4, 1)), jnp.zeros((1, 4)), dilation=2, tail=jnp.zeros((3, 1)))
