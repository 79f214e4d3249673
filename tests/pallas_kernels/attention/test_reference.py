"""Masked attention against the per-head float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.reference import masked_attention
from tests.oracles import attention as oracle


def _inputs(num_rows, num_tokens, num_heads, num_kv_heads, head_dim=16, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((num_rows, num_heads, head_dim)).astype(np.float32)
    k = rng.standard_normal((num_tokens, num_kv_heads, head_dim)).astype(np.float32)
    v = rng.standard_normal((num_tokens, num_kv_heads, head_dim)).astype(np.float32)
    return q, k, v


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("num_rows", [1, 63, 65])
def test_causal_matches_oracle(num_heads, num_kv_heads, num_rows):
    num_tokens = num_rows + 10
    q, k, v = _inputs(num_rows, num_tokens, num_heads, num_kv_heads, seed=num_rows)
    mask = np.arange(num_tokens)[None, :] <= np.arange(num_rows)[:, None] + 10
    arrays = (jnp.asarray(a) for a in (q, k, v, mask))
    o = masked_attention(*arrays, scale=0.25)
    np.testing.assert_allclose(o, oracle.attend(q, k, v, mask, 0.25), atol=2e-6)


def test_scattered_mask_and_large_scores():
    q, k, v = _inputs(40, 50, 4, 2, seed=1)
    mask = np.random.default_rng(2).random((40, 50)) < 0.2
    mask[:, 0] = True
    arrays = (jnp.asarray(a) for a in (100 * q, k, v, mask))
    o = masked_attention(*arrays, scale=0.25)
    np.testing.assert_allclose(o, oracle.attend(100 * q, k, v, mask, 0.25), atol=1e-4)


def test_query_without_tokens_is_zero_and_has_finite_gradients():
    q, k, v = (jnp.asarray(a) for a in _inputs(3, 4, 2, 1))
    mask = jnp.array([[True, False, False, False], [False] * 4, [True] * 4])
    o = masked_attention(q, k, v, mask, scale=0.25)
    np.testing.assert_array_equal(o[1], np.zeros((2, 16)))
    gradients = jax.grad(lambda qkv: jnp.sum(masked_attention(*qkv, mask, scale=0.25) ** 2))(
        (q, k, v)
    )
    assert all(bool(jnp.all(jnp.isfinite(gradient))) for gradient in gradients)
