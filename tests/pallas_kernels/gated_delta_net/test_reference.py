"""The chunked gated delta rule against the per-token recurrence in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_net.reference import gated_delta_rule
from tests.oracles import gated_delta_net as oracle


def _inputs(num_rows, *, key_heads=2, value_heads=6, key_dim=16, value_dim=32, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "q": draw(num_rows, key_heads, key_dim),
        "k": draw(num_rows, key_heads, key_dim),
        "v": draw(num_rows, value_heads, value_dim),
        "g": -np.exp(draw(num_rows, value_heads) - 1.5),
        "beta": 1.0 / (1.0 + np.exp(-draw(num_rows, value_heads))),
        "state": 0.5 * draw(value_heads, key_dim, value_dim),
    }


def _run(inputs, chunk=64):
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in inputs.items()}
    return gated_delta_rule(**arrays, chunk=chunk)


@pytest.mark.parametrize("num_rows", [1, 15, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [16, 64])
def test_matches_recurrence(num_rows, chunk):
    inputs = _inputs(num_rows, seed=num_rows)
    o, state = _run(inputs, chunk)
    expected_o, expected_state = oracle.recurrence(**inputs)
    np.testing.assert_allclose(o, expected_o, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


def test_no_rows_leave_the_state_alone():
    inputs = _inputs(0)
    o, state = _run(inputs)
    assert o.shape == (0, 6, 32)
    np.testing.assert_array_equal(state, inputs["state"])


def test_equal_keys_without_decay():
    # The worst case for the triangular system: every row overwrites the same direction.
    inputs = _inputs(130, seed=3)
    inputs["k"][:] = inputs["k"][:1]
    inputs["g"][:] = 0.0
    inputs["beta"][:] = 1.0
    o, state = _run(inputs)
    expected_o, expected_state = oracle.recurrence(**inputs)
    np.testing.assert_allclose(o, expected_o, atol=1e-4)
    np.testing.assert_allclose(state, expected_state, atol=1e-4)


def test_strong_decay_does_not_overflow():
    inputs = _inputs(100, seed=4)
    inputs["g"][:] = -30.0
    o, state = _run(inputs)
    expected_o, expected_state = oracle.recurrence(**inputs)
    np.testing.assert_allclose(o, expected_o, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


def test_two_calls_equal_one():
    inputs = _inputs(150, seed=5)
    whole_o, whole_state = _run(inputs)
    state, outputs = inputs["state"], []
    for rows in (slice(0, 37), slice(37, 150)):
        part = {name: x[rows] for name, x in inputs.items() if name != "state"}
        o, state = _run(part | {"state": state})
        outputs.append(o)
    np.testing.assert_allclose(jnp.concatenate(outputs), whole_o, atol=2e-5)
    np.testing.assert_allclose(state, whole_state, atol=2e-5)


def test_gradient_matches_finite_differences():
    inputs = _inputs(20, key_heads=1, value_heads=2, key_dim=4, value_dim=4, seed=6)
    rng = np.random.default_rng(7)
    weight = rng.standard_normal((20, 2, 4))
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in inputs.items()}

    def loss(arrays):
        return jnp.sum(gated_delta_rule(**arrays, chunk=16)[0] * jnp.asarray(weight, jnp.float32))

    gradients = jax.grad(loss)(arrays)
    for name, gradient in gradients.items():
        direction = rng.standard_normal(inputs[name].shape)
        step = 1e-6
        high, low = (
            np.sum(oracle.recurrence(**(inputs | {name: inputs[name] + s * direction}))[0] * weight)
            for s in (step, -step)
        )
        expected = (high - low) / (2 * step)
        actual = float(np.sum(np.asarray(gradient, np.float64) * direction))
        assert actual == pytest.approx(expected, rel=2e-4, abs=2e-4), name
