"""Filters against transformers' logits processors, frequencies, seeds, and row independence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pallas_kernels.sampling import Sampling, choose, filtered_logits, log_probabilities
from qwen_hybrid.step import COMPILER_OPTIONS
from tests.pallas_kernels.paged import same_bits
from tests.tolerances import LOG_PROBABILITY, PROBABILITY

VOCAB = 300
# temperature, top_k, top_p, min_p
PARAMETERS = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (2.5, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.8, 20, 1.0, 0.0),
    (1.0, VOCAB + 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 0, 0.35, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.6, 0, 1.0, 0.9),
    (0.9, 40, 0.8, 0.0),
    (1.5, 40, 1.0, 0.05),
    (1.2, 0, 0.95, 0.2),
    (0.8, 30, 0.9, 0.02),
    (1.7, 5, 0.5, 0.3),
)

_choose = jax.jit(choose, compiler_options=COMPILER_OPTIONS)
_filtered = jax.jit(filtered_logits, compiler_options=COMPILER_OPTIONS)
_log_probabilities = jax.jit(log_probabilities, compiler_options=COMPILER_OPTIONS)


def sampling(rows: Any, seeds: Any = 0) -> Sampling:
    """Parameters of rows: (temperature, top_k, top_p, min_p) each, and 64-bit seeds."""
    temperature, top_k, top_p, min_p = np.array(rows, np.float64).T
    seed = np.broadcast_to(np.asarray(seeds, np.uint64), temperature.shape)
    words = np.stack([seed >> np.uint64(32), seed & np.uint64(0xFFFFFFFF)], axis=1)
    return Sampling(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(top_k, jnp.int32),
        jnp.asarray(top_p, jnp.float32),
        jnp.asarray(min_p, jnp.float32),
        jnp.asarray(words.astype(np.uint32)),
    )


def _logits(seed: int, num_rows: int, vocab: int = VOCAB) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((num_rows, vocab))).astype(np.float32)


def _expected_probability(logits: np.ndarray, parameters: tuple) -> np.ndarray:
    temperature, top_k, top_p, min_p = parameters
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    scores = processors(torch.zeros((1, 1), dtype=torch.long), torch.tensor(logits)[None])
    return torch.softmax(scores[0].double(), dim=-1).numpy()


def _softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


@pytest.mark.parametrize("seed", range(4))
def test_filtered_distribution_equals_that_of_transformers(seed: int):
    logits = _logits(seed, len(PARAMETERS))
    actual = _softmax(np.asarray(_filtered(jnp.asarray(logits), sampling(PARAMETERS))))
    for row, parameters in enumerate(PARAMETERS):
        expected = _expected_probability(logits[row], parameters)
        np.testing.assert_allclose(
            actual[row], expected, rtol=0, atol=PROBABILITY, err_msg=str(parameters)
        )
        assert ((actual[row] > 0) == (expected > 0)).all(), parameters


def test_rows_without_filters_are_only_divided():
    logits = _logits(9, 2)
    plain, strict = (0.7, 0, 1.0, 0.0), (0.7, 3, 0.5, 0.1)
    both = np.asarray(_filtered(jnp.asarray(logits), sampling([plain, strict])))
    # XLA may multiply by the reciprocal instead.
    np.testing.assert_allclose(both[0], logits[0].astype(np.float64) / 0.7, rtol=2e-7)
    alike = np.asarray(_filtered(jnp.asarray(logits), sampling([plain, plain])))
    same_bits(both[0], alike[0])


def test_equal_logits_at_the_edge_keep_the_lower_id():
    logits = np.zeros((3, 8), np.float32)
    logits[:, 5] = 1.0
    rows = [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1.0, 1.0)]
    kept = np.isfinite(np.asarray(_filtered(jnp.asarray(logits), sampling(rows))))
    # Token 5 has e / (e + 7) = 0.28, the others 0.103 each: four of them reach six tenths.
    expected = [[0, 1, 5], [0, 1, 2, 3, 5], [5]]
    assert [np.flatnonzero(row).tolist() for row in kept] == expected


def test_sampled_frequencies_pass_a_chi_square_test():
    size, logits = 30_000, _logits(1, 1, vocab=12) / 3
    for parameters in [(1.0, 0, 1.0, 0.0), (0.7, 8, 0.95, 0.01)]:
        expected = _expected_probability(logits[0], parameters)
        many = jnp.asarray(np.repeat(logits, size, axis=0))
        position = jnp.arange(size, dtype=jnp.int32)
        zeros = jnp.zeros(size, jnp.int32)
        one_seed = _choose(many, sampling([parameters] * size, 77), position)
        seeds = np.random.default_rng(2).integers(0, 1 << 63, size)
        one_position = _choose(many, sampling([parameters] * size, seeds), zeros + 5)
        for tokens in (np.asarray(one_seed), np.asarray(one_position)):
            counts = np.bincount(tokens, minlength=12)
            live = expected > 0
            assert counts[~live].sum() == 0
            # One in a thousand correct generators would fail, and the seeds are fixed.
            assert stats.chisquare(counts[live], expected[live] * size).pvalue > 1e-3
        # Tokens of neighbouring positions are independent.
        pairs = np.zeros((12, 12))
        np.add.at(pairs, (np.asarray(one_seed)[:-1:2], np.asarray(one_seed)[1::2]), 1)
        result: Any = stats.chi2_contingency(pairs[live][:, live])
        assert result.pvalue > 1e-3


def test_seed_and_position_each_change_the_noise():
    logits = jnp.zeros((64, VOCAB), jnp.float32)
    rows = [(1.0, 0, 1.0, 0.0)] * 64
    seeds = np.arange(64, dtype=np.uint64)
    at = jnp.full(64, 3, jnp.int32)
    by_low_word = np.asarray(_choose(logits, sampling(rows, seeds), at))
    by_high_word = np.asarray(_choose(logits, sampling(rows, seeds << np.uint64(32)), at))
    by_position = np.asarray(_choose(logits, sampling(rows, 0), jnp.arange(64, dtype=jnp.int32)))
    for tokens in (by_low_word, by_high_word, by_position):
        # 64 draws of 300 give 58 different tokens on average.
        assert len(set(tokens.tolist())) > 45
    assert (by_low_word != by_high_word).mean() > 0.8
    again = np.asarray(_choose(logits, sampling(rows, seeds), at))
    np.testing.assert_array_equal(again, by_low_word)


def test_greedy_takes_the_lowest_of_equal_maxima():
    logits = np.full((4, 16), -1.0, np.float32)
    logits[0, [3, 9]] = 2.0
    logits[1, 15] = 0.0
    logits[3] = -np.inf
    logits[3, 7] = -5.0
    rows = [(0.0, 0, 1.0, 0.0), (0.0, 3, 0.2, 0.5), (1e-7, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    tokens = _choose(jnp.asarray(logits), sampling(rows), jnp.arange(4, dtype=jnp.int32))
    assert np.asarray(tokens).tolist() == [3, 15, 0, 7]


def test_keeping_one_token_is_greedy():
    logits = _logits(3, 48)
    rows = [(1.0, 1, 1.0, 0.0), (1.5, 0, 1e-6, 0.0), (0.5, 0, 1.0, 1.0)] * 16
    position = jnp.arange(48, dtype=jnp.int32)
    tokens = _choose(jnp.asarray(logits), sampling(rows, 5), position)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_token_does_not_depend_on_the_other_rows():
    size = 16
    logits, rows = _logits(4, size), list(PARAMETERS)
    rows[3], rows[8] = (0.0, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.0)
    seeds = np.arange(100, 100 + size, dtype=np.uint64)
    position = np.arange(7, 7 + size, dtype=np.int32)

    def run(order: np.ndarray, logits: np.ndarray) -> np.ndarray:
        parameters = sampling([rows[i] for i in order], seeds[order])
        return np.asarray(_choose(jnp.asarray(logits[order]), parameters, position[order]))

    expected = run(np.arange(size), logits)
    for shift in range(1, size):
        order = np.roll(np.arange(size), shift)
        np.testing.assert_array_equal(run(order, logits), expected[order])
    for row in range(size):
        # Alone among rows of NaN, and among copies of itself: no other filter is in use then.
        poisoned = np.full_like(logits, np.nan)
        poisoned[row] = logits[row]
        assert run(np.arange(size), poisoned)[row] == expected[row]
        assert (run(np.full(size, row), logits) == expected[row]).all()


@pytest.mark.parametrize("scale", [1.0, 10.0, 40.0])
def test_log_probability_equals_float64(scale: float):
    logits = (scale * np.random.default_rng(6).standard_normal((16, 5000))).astype(np.float32)
    token = np.random.default_rng(7).integers(0, 5000, 16).astype(np.int32)
    wide = logits.astype(np.float64)
    peak = wide.max(-1)
    total = np.log(np.exp(wide - peak[:, None]).sum(-1))
    expected = wide[np.arange(16), token] - peak - total
    actual = np.asarray(_log_probabilities(jnp.asarray(logits), jnp.asarray(token[:, None])))[:, 0]
    np.testing.assert_allclose(actual, expected, rtol=LOG_PROBABILITY, atol=LOG_PROBABILITY)


def test_log_probability_of_the_only_token_left_is_zero():
    logits = np.full((1, 9), -np.inf, np.float32)
    logits[0, 4] = 3.0
    token = jnp.array([[4]], jnp.int32)
    assert np.asarray(_log_probabilities(jnp.asarray(logits), token)).tolist() == [[0.0]]
