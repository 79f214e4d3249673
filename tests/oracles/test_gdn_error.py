"""The exact gated delta rule in two forms, and what the error measure says of known errors."""

import numpy as np
import pytest

from tests.oracles.gdn_error import (
    HEAD_DIM,
    delta_rule,
    delta_rule_in_blocks,
    exact_output,
    gdn_inputs,
    l2_normalized,
    relative_rms_error,
)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 200])
def test_blocks_equal_the_recurrence(num_tokens: int):
    inputs = gdn_inputs(num_tokens, seed=3)
    rows = (
        l2_normalized(inputs.q.astype(np.float64)) * HEAD_DIM**-0.5,
        l2_normalized(inputs.k.astype(np.float64)),
        inputs.v.astype(np.float64),
        inputs.g(np.float64),
        inputs.beta(np.float64),
    )
    out, state = delta_rule(*rows)
    for block_out, block_state in (
        delta_rule_in_blocks(*rows, block_size=16),
        exact_output(inputs),
    ):
        np.testing.assert_allclose(block_out, out, rtol=0, atol=1e-12)
        np.testing.assert_allclose(block_state, state, rtol=0, atol=1e-12)


def test_measure_returns_a_uniform_relative_error():
    exact = np.random.default_rng(0).standard_normal((1500, 2, 8)) * np.array([1, 100])[:, None]
    assert relative_rms_error(exact * 1.01, exact, num_tokens=1500) == pytest.approx(0.01)
    # Rows outside the window do not count.
    wrong = np.where(np.arange(1500)[:, None, None] < 400, 7.0, exact)
    assert relative_rms_error(wrong, exact, num_tokens=1500) == 0


def test_float32_recurrence_has_the_error_of_float32():
    inputs = gdn_inputs(1024)
    scale = np.float32(HEAD_DIM**-0.5)
    out, _ = delta_rule(
        l2_normalized(inputs.q) * scale,
        l2_normalized(inputs.k),
        inputs.v,
        inputs.g(),
        inputs.beta(),
    )
    exact, _ = exact_output(inputs)
    # A float32 has a relative precision of 6e-8; sums over 128 keys lose a decimal or so.
    assert 6e-8 < relative_rms_error(out, exact, num_tokens=1024) < 2e-6
