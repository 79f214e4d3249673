"""Routing and expert mixture against the per-row oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe.reference import expert_mix, route
from tests.oracles import moe as oracle


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_route(top_k, renormalize):
    logits = np.random.default_rng(top_k).standard_normal((40, 8)).astype(np.float32)
    weights, ids = route(jnp.asarray(logits), top_k, renormalize)
    expected_weights, expected_ids = oracle.choose(logits, top_k, renormalize)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-6)


def test_equal_experts_go_to_the_lower_id():
    _, ids = route(jnp.array([[0.0, 1.0, 1.0, 1.0]]), 2, True)
    np.testing.assert_array_equal(ids, [[1, 2]])


@pytest.mark.parametrize("num_rows", [1, 33])
def test_expert_mix(num_rows):
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, 12)).astype(np.float32)
    gate_up = 0.3 * rng.standard_normal((5, 14, 12)).astype(np.float32)
    down = 0.3 * rng.standard_normal((5, 12, 7)).astype(np.float32)
    weights, ids = oracle.choose(rng.standard_normal((num_rows, 5)), 2, True)
    out = expert_mix(
        jnp.asarray(x),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(gate_up),
        jnp.asarray(down),
    )
    np.testing.assert_allclose(out, oracle.mix(x, weights, ids, gate_up, down), atol=3e-6)
