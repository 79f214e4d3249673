"""A fixed batch fed by hand: ragged pieces, against the reference form and against one another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.fixed_batch import extend, fixed_batch, start_state, token_log_probabilities
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import StateConfig
from qwen_hybrid.step import COMPILER_OPTIONS
from qwen_hybrid.weights import dummy_params
from tests.tiny_models import two_layers

LENGTHS = (150, 70, 33)
WIDTH = 40
CONFIG = HybridConfig.from_hf(two_layers("q35_dense"))
BATCH = fixed_batch(batch_size=3, max_tokens=max(LENGTHS))


@pytest.fixture(scope="module")
def model():
    return HybridModel(CONFIG, "float32"), dummy_params(CONFIG, dtype="float32")


@pytest.fixture(scope="module")
def feed(model):
    """`extend` of the whole batch, one program."""
    return jax.jit(
        functools.partial(extend, model[0], BATCH, model[1]), compiler_options=COMPILER_OPTIONS
    )


def texts() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, CONFIG.vocab_size, length) for length in LENGTHS]


def run(feed, rng: np.random.Generator) -> list[np.ndarray]:
    """Logits of every token, fed in pieces of random lengths, none for a sequence at times."""
    state, done = start_state(CONFIG, BATCH), [0, 0, 0]
    out: list[list[np.ndarray]] = [[], [], []]
    while done != list(LENGTHS):
        ids = rng.integers(0, CONFIG.vocab_size, (3, WIDTH))
        count = [
            int(rng.integers(0, min(WIDTH, n - at) + 1))
            for n, at in zip(LENGTHS, done, strict=True)
        ]
        for row, text in enumerate(texts()):
            ids[row, : count[row]] = text[done[row] : done[row] + count[row]]
        logits, state = feed(state, jnp.asarray(ids), jnp.asarray(count, jnp.int32))
        for row in range(3):
            out[row].append(np.asarray(logits[row, : count[row]]))
            done[row] += count[row]
    assert state.sequences.committed_len.tolist() == list(LENGTHS)
    # The last boundary is sealed by the row after it.
    assert state.sequences.sealed_len.tolist() == [128, 64, 0]
    return [np.concatenate(rows) for rows in out]


def test_pieces_change_no_bit_and_equal_the_reference(model, feed):
    first, second = run(feed, np.random.default_rng(0)), run(feed, np.random.default_rng(1))
    for one, other in zip(first, second, strict=True):
        assert one.tobytes() == other.tobytes()
    reference = jax.jit(functools.partial(model[0].apply, method="sequence"))
    longest = max(LENGTHS)
    ids = np.stack([np.resize(text, longest) for text in texts()])
    expected = reference({"params": model[1]}, jnp.asarray(ids, jnp.int32)).logits
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(first[row], expected[row, :length], rtol=0, atol=2e-5)


def test_log_probabilities_of_any_number_of_rows(rng):
    logits = rng.normal(size=(3, 7, 50)).astype(np.float32) * 5
    tokens = rng.integers(0, 50, (3, 7))
    found = jax.jit(token_log_probabilities)(jnp.asarray(logits), jnp.asarray(tokens))
    wide = logits.astype(np.float64)
    exact = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    expected = np.take_along_axis(exact, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_capacities_of_other_makers_are_refused():
    other = StateConfig(num_slots=2, num_blocks=9, num_state_slots=4, blocks_per_slot=3)
    with pytest.raises(ValueError, match="capacities that fixed_batch gives"):
        start_state(CONFIG, other)
    assert BATCH.num_blocks == 3 * 3 and BATCH.num_state_slots == 7
