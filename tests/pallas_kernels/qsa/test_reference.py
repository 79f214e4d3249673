"""Group selection against the per-query oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.qsa.reference import group_scores, pooled_raw, selected_groups, token_mask
from tests.oracles import qsa as oracle


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 65])
@pytest.mark.parametrize("ratio", [4, 8])
def test_pooling(num_tokens, ratio):
    raw = np.random.default_rng(0).standard_normal((num_tokens, 16)).astype(np.float32)
    pooled = pooled_raw(jnp.asarray(raw), ratio)
    assert pooled.shape == (num_tokens // ratio, 16)
    np.testing.assert_allclose(pooled, oracle.pool(raw, ratio), atol=1e-6)


def test_scores():
    rng = np.random.default_rng(1)
    q = rng.standard_normal((30, 4, 16)).astype(np.float32)
    pooled = rng.standard_normal((12, 16)).astype(np.float32)
    scores = group_scores(jnp.asarray(q), jnp.asarray(pooled))
    np.testing.assert_allclose(scores, oracle.score(q, pooled), atol=5e-6)


def test_zero_scores_have_a_plus_sign():
    q = jnp.array([[[-1.0, -0.0]], [[0.0, -0.0]]])
    scores = group_scores(q, jnp.array([[1.0, 0.0], [0.0, -1.0]]))
    np.testing.assert_array_equal(np.asarray(scores).view(np.int32), np.zeros((2, 2), np.int32))


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("budget_groups", [1, 3, 100])
@pytest.mark.parametrize("tied", ["distinct", "tied"])
def test_selection_and_token_mask(ratio, budget_groups, tied):
    rng = np.random.default_rng(budget_groups)
    num_tokens = 45
    num_groups = num_tokens // ratio
    scores = rng.random((num_tokens, num_groups)).astype(np.float32)
    if tied == "tied":
        scores = np.floor(scores * 3) / np.float32(3)
    positions = np.arange(num_tokens)
    selected = selected_groups(
        jnp.asarray(scores), jnp.asarray(positions), ratio=ratio, budget_groups=budget_groups
    )
    mask = token_mask(selected, jnp.asarray(positions), num_tokens, ratio)
    for t in positions:
        expected = oracle.choose(scores[t], t, ratio, budget_groups)
        assert set(np.flatnonzero(selected[t])) == expected
        assert set(np.flatnonzero(mask[t])) == oracle.tokens(expected, t, ratio)


def test_own_group_may_lose():
    scores = jnp.array([[2.0, 1.0]])
    selected = selected_groups(scores, jnp.array([7]), ratio=4, budget_groups=1)
    mask = token_mask(selected, jnp.array([7]), 8, 4)
    np.testing.assert_array_equal(mask, [[True] * 4 + [False] * 4])


def test_full_budget_is_dense_causal():
    positions = jnp.arange(23)
    scores = jnp.asarray(np.random.default_rng(3).random((23, 5)), jnp.float32)
    selected = selected_groups(scores, positions, ratio=4, budget_groups=5)
    mask = token_mask(selected, positions, 23, 4)
    np.testing.assert_array_equal(mask, np.tril(np.ones((23, 23), bool)))
