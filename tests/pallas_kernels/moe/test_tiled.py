"""Routing and dropless experts of one tile against the float64 oracles and the twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import expert_mix, reference, route
from qwen_hybrid.step import COMPILER_OPTIONS
from tests.oracles import moe as oracle
from tests.tolerances import EXPERTS_BFLOAT16, FLOAT32_SUM, PROBABILITY

EXPERTS, TOP_K, WIDTH, INNER = 6, 3, 24, 10
_mix = jax.jit(expert_mix, compiler_options=COMPILER_OPTIONS)


def _weights(dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    gate_up = 0.3 * rng.standard_normal((EXPERTS, 2 * INNER, WIDTH))
    down = 0.3 * rng.standard_normal((EXPERTS, WIDTH, INNER))
    return jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)


def _rows(seed: int, num_rows: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(rows, weights, experts) of a router."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_rows, WIDTH)), dtype)
    logits = rng.standard_normal((num_rows, EXPERTS)).astype(np.float32)
    return x, *route(jnp.asarray(logits), top_k=TOP_K, renormalize=True)


def _exact(x, weight, expert, gate_up, down) -> np.ndarray:
    x, weight, gate_up, down = (np.asarray(a, np.float64) for a in (x, weight, gate_up, down))
    return oracle.mix(x, weight, np.asarray(expert), gate_up, down)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_route(top_k, renormalize):
    logits = np.random.default_rng(top_k).standard_normal((40, 8)).astype(np.float32)
    weight, expert = route(jnp.asarray(logits), top_k=top_k, renormalize=renormalize)
    expected_weight, expected_expert = oracle.choose(logits, top_k, renormalize)
    np.testing.assert_array_equal(expert, expected_expert)
    np.testing.assert_allclose(weight, expected_weight, rtol=0, atol=PROBABILITY)
    twin_weight, twin_expert = reference.route(jnp.asarray(logits), top_k, renormalize)
    np.testing.assert_array_equal(expert, twin_expert)
    np.testing.assert_allclose(weight, twin_weight, rtol=0, atol=PROBABILITY)


def test_equal_experts_go_to_the_lower_id():
    logits = jnp.array([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, 1.0, 3.0, 3.0]])
    _, expert = route(logits, top_k=2, renormalize=True)
    np.testing.assert_array_equal(expert, [[1, 2], [0, 1], [0, 2]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [1, 15, 16])
def test_mix_equals_the_oracle(num_rows, dtype):
    x, weight, expert = _rows(2, 16, dtype)
    experts = _weights(dtype)
    live = jnp.arange(16) < num_rows
    spoiled = jnp.where(live[:, None], x, jnp.nan)
    out = np.asarray(_mix(spoiled, weight, expert, live, *experts), np.float64)[:num_rows]
    exact = _exact(x, weight, expert, *experts)[:num_rows]
    limit = FLOAT32_SUM if dtype == "float32" else EXPERTS_BFLOAT16
    np.testing.assert_allclose(out, exact, rtol=0, atol=limit)


def test_mix_equals_the_twin():
    rows, experts = _rows(4, 16, "float32"), _weights("float32")
    twin = reference.expert_mix(*rows, *experts)
    out = _mix(*rows, jnp.ones(16, bool), *experts)
    np.testing.assert_allclose(out, twin, rtol=0, atol=FLOAT32_SUM)


def test_rows_that_are_not_live_choose_no_expert():
    x, weight, expert = _rows(3, 16, "float32")
    gate_up, down = _weights("float32")
    live = np.arange(16) % 3 == 0
    # The last expert is chosen by dead rows only: its weights and their rows are NaN.
    kept = np.asarray(expert) % (EXPERTS - 1)
    expert = jnp.asarray(np.where(live[:, None], kept, EXPERTS - 1), jnp.int32)
    gate_up = gate_up.at[EXPERTS - 1].set(jnp.nan)
    exact = _exact(x[live], weight[live], expert[live], gate_up, down)
    x = jnp.where(live[:, None], x, jnp.nan)
    out = np.asarray(_mix(x, weight, expert, jnp.asarray(live), gate_up, down))
    np.testing.assert_allclose(out[live], exact, rtol=0, atol=FLOAT32_SUM)
