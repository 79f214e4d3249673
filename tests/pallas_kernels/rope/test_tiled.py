"""Rotary embedding against float64 with the model's float32 frequencies and angles."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope import rope
from tests.oracles import numpy_layers as oracle
from tests.tolerances import FLOAT32_SUM, rounding

POSITIONS = (0, 1, 15, 63, 64, 4095, 100_003, 262_143)


def _config(head_dim: int, rotary_dim: int, theta: float) -> dict:
    parameters = {"partial_rotary_factor": rotary_dim / head_dim, "rope_theta": theta}
    return {"model_type": "qwen3_5_text", "head_dim": head_dim, "rope_parameters": parameters}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "theta"), [(256, 64, 1e7), (16, 16, 1e4), (32, 8, 1e7)]
)
def test_rope(head_dim, rotary_dim, theta, dtype):
    x = np.random.default_rng(0).standard_normal((len(POSITIONS), 3, head_dim))
    x = jnp.asarray(x, dtype)
    position = np.array(POSITIONS, np.int32)
    config = _config(head_dim, rotary_dim, theta)
    expected = oracle.rope(np.asarray(x, np.float64), position, config)
    actual = rope(x, jnp.asarray(position), rotary_dim=rotary_dim, theta=theta)
    assert actual.dtype == x.dtype
    wide = np.asarray(actual, np.float64)
    np.testing.assert_allclose(wide, expected, rtol=rounding(dtype), atol=FLOAT32_SUM)
    np.testing.assert_array_equal(actual[..., rotary_dim:], x[..., rotary_dim:])
    np.testing.assert_array_equal(actual[0], x[0])
