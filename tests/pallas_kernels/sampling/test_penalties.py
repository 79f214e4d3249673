"""Penalties, bias and early ends against transformers and float64 NumPy; counts; independence."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pallas_kernels.rows import TILE_ROWS, map_tiles
from pallas_kernels.sampling import (
    ENDS_OUTPUT,
    GENERATED,
    IN_PROMPT,
    Penalties,
    choose,
    count_tokens,
    filtered_logits,
    log_probabilities,
    penalized,
    top_tokens,
)
from qwen_hybrid.step import COMPILER_OPTIONS
from tests.pallas_kernels.paged import same_bits
from tests.pallas_kernels.sampling.test_tiled import sampling
from tests.tolerances import PROBABILITY

VOCAB = 300
PROMPT = (3, 3, 9, 250, 17)
OUTPUT = (9, 9, 9, 40, 41, 3)
ENDS = (5, 17, 299)
# repetition, frequency, presence, bias, tokens still missing before the end may come
PARAMETERS: tuple[tuple[float, float, float, dict[int, float], int], ...] = (
    (1.0, 0.0, 0.0, {}, 0),
    (1.3, 0.0, 0.0, {}, 0),
    (0.5, 0.0, 0.0, {}, 0),
    (2.0, 0.0, 0.0, {}, 0),
    (1.0, 0.7, 0.0, {}, 0),
    (1.0, -2.0, 0.0, {}, 0),
    (1.0, 0.0, 1.5, {}, 0),
    (1.0, 0.3, -2.0, {}, 0),
    (1.0, 0.0, 0.0, {0: 4.0, 9: -100.0, 41: 1e-3}, 0),
    (1.0, 0.0, 0.0, {}, 3),
    (1.2, 2.0, 0.5, {5: 50.0, 8: -1.0}, 1),
    (0.9, -0.4, 0.2, {17: 3e38}, 0),
)
# temperature, top_k, top_p, min_p
FILTERS = ((1.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.02), (1.6, 0, 1.0, 0.1), (0.3, 8, 0.5, 0.0))

# Looked up when traced, for the sake of deliberate bugs.
_penalized = jax.jit(lambda *rows: penalized(*rows), compiler_options=COMPILER_OPTIONS)


def marks_of(prompt: Any = PROMPT, output: Any = OUTPUT, ends: Any = ENDS) -> np.ndarray:
    """A row of marks, counted one token at a time."""
    marks = np.zeros(VOCAB, np.int32)
    for token in output:
        marks[token] += GENERATED
    for token in prompt:
        marks[token] |= IN_PROMPT
    for token in ends:
        marks[token] |= ENDS_OUTPUT
    return marks


def rows_of(parameters: Any, position: int = 11) -> tuple[jax.Array, jax.Array, Penalties, Any]:
    """What `penalized` takes beside logits: marks, bias, penalties, positions."""
    repetition, frequency, presence, bias, missing = zip(*parameters, strict=True)
    size = len(parameters)
    biases = np.zeros((size, VOCAB), np.float32)
    for row, entries in enumerate(bias):
        for token, value in entries.items():
            biases[row, token] = value
    in_use = np.array([p != PARAMETERS[0] for p in parameters])
    # Rows that are not in use may hold anything.
    penalties = Penalties(
        jnp.asarray(np.where(in_use, repetition, 7.0), jnp.float32),
        jnp.asarray(frequency, jnp.float32),
        jnp.asarray(presence, jnp.float32),
        jnp.asarray([position + n for n in missing], jnp.int32),
        jnp.asarray(in_use),
    )
    at = jnp.full(size, position, jnp.int32)
    marks = jnp.asarray(np.tile(marks_of(), (size, 1)))
    return marks, jnp.asarray(biases), penalties, at


def changed(logits: np.ndarray, parameters: Any) -> np.ndarray:
    """The logits of rows after their penalties."""
    marks, bias, penalties, at = rows_of(parameters)
    return np.asarray(_penalized(jnp.asarray(logits), marks, bias, penalties, at))


def expected_logits(logits: np.ndarray, parameters: Any) -> torch.Tensor:
    """One row by transformers' processors, counts by OpenAI's published formula in float64."""
    repetition, frequency, presence, bias, missing = parameters
    ids = torch.tensor([[*PROMPT, *OUTPUT]])
    scores = torch.tensor(logits)[None]
    if repetition != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(repetition)(ids, scores)
    # mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence
    count = np.bincount(OUTPUT, minlength=VOCAB)
    off = count * np.float64(frequency) + (count > 0) * np.float64(presence)
    scores = (scores.double() - torch.tensor(off)).float()
    if bias:
        processor = SequenceBiasLogitsProcessor([[[t], float(v)] for t, v in bias.items()])
        scores = processor(ids, scores)
    if missing:
        processor = MinNewTokensLengthLogitsProcessor(
            len(PROMPT), len(OUTPUT) + missing, list(ENDS), device="cpu"
        )
        scores = processor(ids, scores)
    return scores


def logits_of(kind: str, size: int) -> np.ndarray:
    """Random logits, with many ties, or of extreme size."""
    values = np.random.default_rng(3).standard_normal((size, VOCAB))
    if kind == "ties":
        return np.round(2 * values).astype(np.float32) / 2
    scale = 1e4 if kind == "extreme" else 3.0
    return (scale * values).astype(np.float32)


@pytest.mark.parametrize("kind", ["random", "ties", "extreme"])
def test_changed_logits_equal_those_of_transformers(kind):
    logits = logits_of(kind, len(PARAMETERS))
    actual = changed(logits, PARAMETERS)
    for row, parameters in enumerate(PARAMETERS):
        expected = expected_logits(logits[row], parameters)[0].numpy()
        np.testing.assert_allclose(actual[row], expected, rtol=1e-6, atol=1e-6, err_msg=str(row))
    same_bits(actual[0], logits[0])


# Transformers keeps every token that ties with the last one of top-k, and cuts inside a tie of
# top-p by an unstable sort: there, only distinct logits are the same on both sides.
@pytest.mark.parametrize(
    ("kind", "filters"),
    [
        *(("random", filters) for filters in FILTERS),
        *(
            (kind, (t, 0, 1.0, p))
            for kind in ("ties", "extreme")
            for t, p in ((1.0, 0), (0.6, 0.1))
        ),
    ],
)
def test_the_whole_distribution_equals_that_of_transformers(kind, filters):
    temperature, top_k, top_p, min_p = filters
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    logits = logits_of(kind, len(PARAMETERS))
    scores = jnp.asarray(changed(logits, PARAMETERS))
    ours = filtered_logits(scores, sampling([filters] * len(PARAMETERS)))
    actual = torch.softmax(torch.tensor(np.asarray(ours)).double(), dim=-1).numpy()
    for row, parameters in enumerate(PARAMETERS):
        theirs = warpers(torch.zeros((1, 1)).long(), expected_logits(logits[row], parameters))
        expected = torch.softmax(theirs[0].double(), dim=-1).numpy()
        np.testing.assert_allclose(
            actual[row], expected, rtol=0, atol=PROBABILITY, err_msg=str(parameters)
        )
        assert ((actual[row] > 0) == (expected > 0)).all(), parameters


def test_prompt_counts_for_repetition_only():
    logits = np.ones((2, VOCAB), np.float32)
    repeated, counted = changed(logits, [(2.0, 0.0, 0.0, {}, 0), (1.0, 0.5, 1.0, {}, 0)])
    seen, generated = {*PROMPT, *OUTPUT}, set(OUTPUT)
    assert set(np.flatnonzero(repeated != 1)) == seen
    assert set(np.flatnonzero(counted != 1)) == generated
    # A token that may end the output has occurred no more than another.
    assert repeated[5] == repeated[299] == 1
    assert counted[9] == 1 - (3 * 0.5 + 1.0)


def test_the_end_is_masked_up_to_its_position():
    marks, bias, penalties, _ = rows_of([(1.0, 0.0, 0.0, {}, 0)] * 3, position=20)
    in_use = Penalties(
        penalties.repetition, penalties.frequency, penalties.presence, penalties.min_len,
        jnp.ones(3, bool),
    )  # fmt: skip
    at = jnp.asarray([18, 19, 20], jnp.int32)
    out = np.asarray(_penalized(jnp.ones((3, VOCAB)), marks, bias, in_use, at))
    assert [np.flatnonzero(np.isneginf(row)).tolist() for row in out] == [[5, 17, 299]] * 2 + [[]]


def test_greedy_with_penalties_follows_a_numpy_loop():
    """Tokens counted inside one program, step after step, beside a plain loop in float64."""
    rng = np.random.default_rng(8)
    steps, parameters = 40, PARAMETERS[1:9]
    size = len(parameters)
    # Much the same at every step, so that tokens would repeat.
    logits = 2 * rng.standard_normal(VOCAB) + 0.3 * rng.standard_normal((steps, size, VOCAB))
    logits = logits.astype(np.float32)
    _, bias, penalties, at = rows_of(parameters)
    first = np.tile(marks_of(output=()), (size, 1))

    def step(marks: Any, logits: Any) -> Any:
        token = jnp.argmax(penalized(logits, marks, bias, penalties, at), axis=-1).astype(jnp.int32)
        slot = jnp.arange(size, dtype=jnp.int32)
        counted = count_tokens(
            marks, slot, token, jnp.ones(size, bool), jnp.asarray(size, jnp.int32)
        )
        return counted, token

    marks, tokens = jax.jit(lambda m, x: jax.lax.scan(step, m, x))(first, logits)
    num_repeated = num_changed = 0
    for row, (repetition, frequency, presence, biases, _) in enumerate(parameters):
        output: list[int] = []
        for step_logits in logits[:, row].astype(np.float64):
            scores = step_logits.copy()
            for token in {*PROMPT, *output}:
                scores[token] *= repetition if scores[token] < 0 else 1 / repetition
            for token in set(output):
                scores[token] -= output.count(token) * frequency + presence
            for token, value in biases.items():
                scores[token] += value
            output.append(int(scores.argmax()))
        assert np.asarray(tokens)[:, row].tolist() == output
        np.testing.assert_array_equal(np.asarray(marks)[row], marks_of(output=output))
        num_changed += output != logits[:, row].argmax(-1).tolist()
        num_repeated += steps - len(set(output))
    assert num_repeated > steps
    assert num_changed >= size - 2


def test_only_live_tokens_of_the_first_rows_are_counted():
    marks = np.arange(4 * VOCAB, dtype=np.int32).reshape(4, VOCAB) * GENERATED
    slot = np.array([3, 0, 0, 1, 2], np.int32)
    token = np.array([7, 299, 299, 0, 5], np.int32)
    live = np.array([True, True, True, False, True])
    out = jax.jit(count_tokens)(marks, slot, token, live, jnp.asarray(4, jnp.int32))
    expected = marks.copy()
    expected[3, 7] += GENERATED
    expected[0, 299] += 2 * GENERATED
    np.testing.assert_array_equal(out, expected)


def test_frequencies_of_penalized_rows_pass_a_chi_square_test():
    size, parameters = 30_000, (1.5, 0.4, 0.3, {2: 1.0}, 1)
    logits = logits_of("random", 1)[:, :VOCAB] / 4
    distribution = torch.softmax(expected_logits(logits[0], parameters)[0].double() / 0.8, dim=-1)
    marks, bias, penalties, _ = rows_of([parameters])

    def draw(position: Any) -> Any:
        at = jnp.full(TILE_ROWS, 11, jnp.int32)
        rows = [jnp.tile(a, (TILE_ROWS, 1)) for a in (logits, marks, bias)]
        repeated = jax.tree.map(lambda a: jnp.tile(a, TILE_ROWS), penalties)
        scores = penalized(*rows, repeated, at)
        return choose(scores, sampling([(0.8, 0, 1.0, 0.0)] * TILE_ROWS, 21), position)

    positions = jnp.arange(size, dtype=jnp.int32)
    tokens = jax.jit(functools.partial(map_tiles, draw))(jnp.asarray(size, jnp.int32), positions)
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    expected = distribution.numpy() * size
    assert counts[list(ENDS)].sum() == 0
    # Rare tokens together, as the test's approximation wants at least five of each kind.
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    # One in a thousand correct generators would fail, and the seed is fixed.
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_rows_do_not_depend_on_their_neighbours():
    logits = logits_of("random", TILE_ROWS)
    parameters = [PARAMETERS[i % len(PARAMETERS)] for i in range(TILE_ROWS)]
    expected = changed(logits, parameters)
    for row in range(TILE_ROWS):
        bad = np.full_like(logits, np.nan)
        bad[row] = logits[row]
        for neighbour in (PARAMETERS[0], PARAMETERS[10]):
            beside = [neighbour] * TILE_ROWS
            beside[row] = parameters[row]
            same_bits(changed(bad, beside)[row], expected[row])


@pytest.mark.parametrize("kind", ["random", "ties", "extreme"])
def test_top_tokens_are_sorted_and_ties_go_to_the_lower_id(kind):
    logits = logits_of(kind, TILE_ROWS)
    logits[0, ::2], logits[0, 1::2] = -0.0, 0.0
    top = np.asarray(jax.jit(top_tokens, static_argnums=1)(jnp.asarray(logits), 20))
    for row, ids in zip(logits, top, strict=True):
        assert ids.tolist() == sorted(range(VOCAB), key=lambda t: (-row[t], t))[:20]
    tokens = np.concatenate([top, top[:, ::-1]], axis=1)
    values = np.asarray(jax.jit(log_probabilities)(jnp.asarray(logits), jnp.asarray(tokens)))
    same_bits(values[:, :20], values[:, :19:-1])
    assert (np.diff(values[:, :20]) <= 0).all()
