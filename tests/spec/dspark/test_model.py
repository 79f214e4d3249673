"""The paged drafter: against float64, against the twin, and over schedules and neighbours."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bits import storage_dtype
from qwen_hybrid.state import StateConfig
from qwen_hybrid.step import COMPILER_OPTIONS
from spec.dspark import (
    Anchors,
    DSparkState,
    block_heads,
    block_rows,
    draft_len,
    dspark_state_spec,
    inject,
    prepare_draft,
    propose,
)
from tests.pallas_kernels.paged import (
    LARGE,
    SMALL,
    Feeder,
    Operator,
    Piece,
    check_schedules,
    page_rows,
    same_bits,
    unused,
)
from tests.spec.dspark.cases import Case
from tests.tolerances import FLOAT32, rounding

BLOCKS = StateConfig(
    num_slots=4,
    num_blocks=17,
    num_state_slots=12,
    blocks_per_slot=4,
    max_window=17,
    dtype="float32",
)
# Contexts at and around the edges of pages, of the sliding window and of nothing at all.
LENGTHS = (0, 1, 20, 63, 64, 65, 80, 130)
NUM_NOISES = 6


class Paged:
    """A drafter's paged form in one dtype, its programs compiled once."""

    def __init__(self, case: Case, dtype: str, programs: tuple[int, ...]) -> None:
        self.case, self.dtype = case, dtype
        self.params = prepare_draft(jax.tree.map(lambda p: p.astype(dtype), case.params))
        self.operator = Operator(
            self._step, self._init, self._observe, self._draw, BLOCKS, programs
        )
        self._propose = jax.jit(self._drafts, compiler_options=COMPILER_OPTIONS)

    def _init(self) -> Any:
        spec = dspark_state_spec(
            self.case.config,
            num_blocks=BLOCKS.num_blocks,
            block_size=BLOCKS.block_size,
            dtype=self.dtype,
        )
        assert {leaf.dtype for leaf in jax.tree.leaves(spec)} == {storage_dtype(self.dtype)}
        # All ones is a NaN in bfloat16 too.
        return self.params, jax.tree.map(lambda s: unused(s.shape, s.dtype), spec)

    def _step(self, inputs, carry, rows):
        params, state = carry
        state = inject(self.case.config, params, state, inputs["taps"].astype(self.dtype), rows)
        return inputs["taps"], (params, state)

    def _observe(self, carry, feeder: Feeder, slot: int) -> list[np.ndarray]:
        pages = []
        for layer in carry[1].layers:
            pages += [jnp.moveaxis(layer.key_pages, 3, 1), layer.value_pages.swapaxes(1, 2)]
        return [page_rows(array, feeder, slot, BLOCKS.block_size) for array in pages]

    def _draw(self, rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
        return {"taps": self.case.draw_taps(rng, length)}

    def _drafts(self, params, state: DSparkState, anchors: Anchors, noise):
        embed, head = self.case.embed(self.dtype), self.case.head()

        def pick(logits, position):
            # A noise that only the position names, as the target's.
            scores = logits + noise[position % noise.shape[0]]
            return jnp.argmax(scores, axis=-1)

        config = self.case.config
        return propose(config, params, state, anchors, embed=embed, head=head, pick=pick)

    def drafts(self, feeder: Feeder, tokens: dict[int, int], noise: np.ndarray):
        """Drafts and confidence of the slots that have a token."""
        token, active = np.zeros(4, np.int32), np.zeros(4, bool)
        for slot, value in tokens.items():
            token[slot], active[slot] = value, True
        anchors = Anchors(
            *(jnp.asarray(a) for a in (token, feeder.committed, active, feeder.table))
        )
        params, state = feeder.state
        return jax.tree.map(np.asarray, self._propose(params, state, anchors, jnp.asarray(noise)))


@functools.cache
def paged(case: Case, dtype: str, programs: tuple[int, ...] = (LARGE,)) -> Paged:
    return Paged(case, dtype, programs)


def fed(model: Paged, taps: dict[int, np.ndarray], *, seed: int = 0) -> Feeder:
    """Contexts in the slots, each followed by rejected rows that are NaN."""
    feeder = Feeder(model.operator, seed=seed)
    for slot, rows in taps.items():
        feeder.open(slot)
        wrong = np.full((3, rows.shape[1]), np.nan, np.float32)
        window = {"taps": np.concatenate([rows, wrong])}
        feeder.call({slot: Piece(window, commit=len(rows))})
    return feeder


def noises(case: Case, rng: np.random.Generator, scale: float) -> np.ndarray:
    return (scale * rng.gumbel(size=(97, case.config.vocab_size))).astype(np.float32)


def test_greedy_drafts_equal_float64(case: Case, rng: np.random.Generator):
    model, config = paged(case, "float32"), case.config
    still = np.zeros((1, config.vocab_size), np.float32)
    for length in LENGTHS:
        taps, token = case.draw_taps(rng, length), int(rng.integers(config.vocab_size))
        drafts, confidence = model.drafts(fed(model, {2: taps}), {2: token}, still)
        expected = case.oracle.block(taps, token, None)
        np.testing.assert_array_equal(drafts[2], expected.tokens)
        temperatures = case.hf_config.get("confidence_temperatures", 1.0)
        certain = 1.0 / (1.0 + np.exp(-expected.confidence / temperatures))
        np.testing.assert_allclose(confidence[2], certain, atol=FLOAT32.max_difference)
        assert not drafts[[0, 1, 3]].any() and not confidence[[0, 1, 3]].any()


def _twin(case: Case, dtype: str, params, taps, token, forced):
    anchor = jnp.asarray([taps.shape[0] - 1], jnp.int32)
    embed, head = case.embed(dtype), case.head()
    hidden = block_rows(case.config, params, taps.astype(dtype), token, anchor, embed)
    given = lambda _, j: forced[:, j]  # noqa: E731
    return block_heads(case.config, params, hidden, token, head=head, follow=given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_drafts_are_what_the_twin_samples(case: Case, dtype: str, rng):
    model, config = paged(case, dtype), case.config
    # As far as its rounding goes, on logits of standard deviation 1.
    limit = FLOAT32.max_difference if dtype == "float32" else 8 * rounding(dtype)
    taps, token = case.draw_taps(rng, 70), 7
    feeder = fed(model, {1: taps})
    # The twin reads the context before the anchor: whatever stands at the anchor itself is not.
    known = jnp.asarray(np.concatenate([taps, case.draw_taps(rng, 1)]))
    params = jax.tree.map(lambda p: p.astype(dtype), case.params)
    twin = jax.jit(functools.partial(_twin, case, dtype), compiler_options=COMPILER_OPTIONS)
    num_decided = 0
    for _ in range(NUM_NOISES):
        noise = noises(case, rng, 1.0)
        drafts, confidence = model.drafts(feeder, {1: token}, noise)
        out = twin(params, known, jnp.asarray([token]), jnp.asarray(drafts[1:2]))
        scores = np.asarray(out.logits[0]) + noise[(71 + np.arange(config.block_size)) % 97]
        best = scores.max(-1) - np.take_along_axis(scores, drafts[1][:, None], -1)[:, 0]
        assert best.max() <= limit
        num_decided += (np.sort(scores)[:, -1] - np.sort(scores)[:, -2] > limit).sum()
        raw = np.asarray(out.confidence[0]) / np.asarray(config.confidence_temperatures)
        np.testing.assert_allclose(confidence[1], 1.0 / (1.0 + np.exp(-raw)), atol=limit)
    # Else the comparison would be empty.
    assert num_decided > 0.8 * NUM_NOISES * config.block_size


def test_context_has_the_same_bits_whatever_the_schedule(case: Case):
    check_schedules(paged(case, "float32", (SMALL, LARGE)).operator, seeds=range(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_do_not_depend_on_neighbours(case: Case, dtype: str, rng: np.random.Generator):
    model = paged(case, dtype)
    taps = {slot: case.draw_taps(rng, length) for slot, length in enumerate((65, 3, 130, 64))}
    noise = noises(case, rng, 1.0)
    tokens = {slot: 11 * slot + 2 for slot in taps}
    together = model.drafts(fed(model, taps), tokens, noise)
    spoiled = taps | {1: np.full_like(taps[1], np.nan), 3: np.full_like(taps[3], np.nan)}
    assert all(np.isfinite(a).all() for a in together)
    for slot in (0, 2):
        alone = model.drafts(fed(model, {slot: taps[slot]}, seed=3), {slot: tokens[slot]}, noise)
        beside = model.drafts(fed(model, spoiled, seed=4), tokens, noise)
        for other in (alone, beside):
            same_bits([a[slot] for a in other], [a[slot] for a in together])


def test_draft_len_counts_drafts_before_the_first_unlikely_one(rng: np.random.Generator):
    confidence = rng.uniform(size=(50, 7)).astype(np.float32) ** 0.3
    confidence[:3] = [[1.0] * 7, [0.0] * 7, [0.9, np.nan, 1, 1, 1, 1, 1]]
    for threshold in (0.0, 0.3, 0.5, 1.0):
        expected = []
        for row in confidence:
            survival, count = 1.0, 0
            for value in row:
                survival = np.float32(survival * value)
                if not survival >= threshold:
                    break
                count += 1
            expected.append(count)
        actual = draft_len(jnp.asarray(confidence), threshold)
        np.testing.assert_array_equal(actual, expected)
