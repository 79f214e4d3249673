"""MTP heads of both families, loaded from checkpoint directories, against float64 and transformers.

The head is run over whole sequences, and in its paged form: in chunks, beside another sequence,
and feeding itself with windows that are rejected.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rows import map_row_tiles
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import QsaState, StateConfig, init_state
from qwen_hybrid.step import COMPILER_OPTIONS
from qwen_hybrid.weights import load_checkpoint
from tests.oracles.numpy_model import NumpyModel, Outputs
from tests.oracles.recipe import Checkpoints, config_dict, sample_tokens
from tests.oracles.transformers_oracle import TransformersOracle
from tests.pallas_kernels.paged import (
    LARGE,
    SMALL,
    Feeder,
    Operator,
    Piece,
    check_schedules,
    cut,
    page_rows,
)
from tests.tolerances import float32_parity

# Dense and mixture-of-experts heads of qwen3_5, and qwen4_exp's over four streams with QSA.
NAMES = ("q35_dense_mtp", "q35_moe_mtp", "q4_qsa")
NUM_TOKENS = 131
NUM_DRAFTS = 3


class Head:
    """One MTP head: our loaded parameters, and the float64 model of the same directory."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self.oracle = NumpyModel(directory)
        self.ids = sample_tokens(config_dict(name), NUM_TOKENS)
        self.target = self.oracle.run(self.ids)
        self.loaded = load_checkpoint(directory, dtype="float32", progress=False)
        self.model = HybridModel(self.loaded.config, "float32")

    @property
    def config(self) -> HybridConfig:
        """Architecture, as our reader understood it."""
        return self.loaded.config

    @functools.cached_property
    def expected(self) -> Outputs:
        """The head over all rows, in float64."""
        return self.oracle.mtp(self.ids[1:], self.target.carried[:-1])

    @functools.cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """What the head is fed: the next token and the target's row."""
        carried = self.target.carried[:-1].astype(np.float32)
        return {"next_ids": self.ids[1:].astype(np.int32), "hidden": carried}

    def check(self, actual: np.ndarray, expected: np.ndarray) -> None:
        """Compare with the tolerance of logits."""
        limit = float32_parity(self.name).max_difference
        np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


@functools.cache
def _head(name: str, directory: Path) -> Head:
    return Head(name, directory)


@pytest.fixture(scope="module", params=NAMES)
def head(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Head:
    """The head of each configuration; an MTP head is added where the configuration has none."""
    return _head(request.param, checkpoints.directory(request.param, mtp=True))


@pytest.fixture(scope="module")
def paged(head: Head) -> Operator:
    """The head's paged form as an operator along sequences."""
    return _operator(head)


@functools.cache
def _operator(head: Head) -> Operator:
    sc = StateConfig(
        num_slots=4,
        num_blocks=17,
        num_state_slots=12,
        blocks_per_slot=4,
        max_window=17,
        dtype="float32",
        with_mtp=True,
    )
    params = head.loaded.params

    def init() -> Any:
        empty = init_state(head.config, sc).mtp
        return {"params": params, "state": jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), empty)}

    def step(inputs, carry, rows):
        bound = head.model.bind({"params": carry["params"]})
        embedded = map_row_tiles(bound.embed, rows, inputs["next_ids"] % head.config.vocab_size)
        recurrent, state = bound.mtp(embedded, inputs["hidden"], carry["state"], rows)
        logits = map_row_tiles(lambda r: bound.head(bound.mtp.predict(r)), rows, recurrent)
        return {"logits": logits, "recurrent": recurrent}, carry | {"state": state}

    def draw(rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
        at = int(rng.integers(0, NUM_TOKENS - length)) if length < NUM_TOKENS else 0
        return cut(head.rows, at, at + length)

    def observe(carry, feeder: Feeder, slot: int) -> list[np.ndarray]:
        mixer = carry["state"].mixer
        attention = mixer.attention if isinstance(mixer, QsaState) else mixer
        pages = [jnp.moveaxis(attention.key_pages, 3, 1), attention.value_pages.swapaxes(1, 2)]
        if isinstance(mixer, QsaState):
            pages.append(mixer.pooled)
        return [page_rows(array, feeder, slot, array.shape[1]) for array in pages]

    return Operator(step, init, observe, draw, sc, (SMALL, LARGE))


def test_selections_have_no_ties(head: Head):
    # Else the comparison with float64 would be one of luck.
    assert all(gap > 1e-4 for gap in head.expected.score_gaps.values())


def test_sequence_equals_float64(head: Head):
    run = jax.jit(
        functools.partial(head.model.apply, method="mtp_sequence"),
        compiler_options=COMPILER_OPTIONS,
    )
    inputs = (jnp.asarray(head.rows[name])[None] for name in ("next_ids", "hidden"))
    logits, recurrent, _ = run({"params": head.loaded.params}, *inputs)
    head.check(logits[0], head.expected.logits)
    head.check(recurrent[0], head.expected.carried)


def test_chunks_equal_float64(head: Head, paged: Operator):
    feeder, outs = Feeder(paged), []
    for stop in (1, 17, 63, 64, 65, 130):
        piece = cut(head.rows, int(feeder.committed[2]), stop)
        outs.append(feeder.call({2: Piece(piece, commit=len(piece["next_ids"]))})[2])
    head.check(np.concatenate([o["logits"] for o in outs]), head.expected.logits)
    head.check(np.concatenate([o["recurrent"] for o in outs]), head.expected.carried)


def test_random_schedules_give_the_bits_of_one_piece(paged: Operator):
    check_schedules(paged, seeds=range(4))


def test_drafts_that_feed_themselves_equal_float64(head: Head, paged: Operator):
    start = 60
    expected = head.oracle.mtp_drafts(
        head.ids[1 : start + 1], head.target.carried[:start], count=NUM_DRAFTS
    )
    feeder = Feeder(paged, seed=1)
    feeder.call({0: Piece(cut(head.rows, 0, start - 1), commit=start - 1)})
    for attempt in range(2):
        del attempt
        row = cut(head.rows, start - 1, start)
        for draft in expected:
            out = feeder.call({0: Piece(row, commit=1)})[0]
            head.check(out["logits"][0], draft.logits[-1])
            head.check(out["recurrent"][0], draft.carried[-1])
            token = out["logits"].argmax(-1).astype(np.int32)
            assert token[0] == draft.logits[-1].argmax()
            row = {"next_ids": token, "hidden": out["recurrent"]}
        # All drafts are rejected: the head starts again from the target's row.
        feeder.committed[0] = start - 1


@pytest.mark.parametrize("name", ["q35_dense_mtp", "q35_moe_mtp"])
def test_chunks_equal_transformers(name: str, checkpoints: Checkpoints):
    head = _head(name, checkpoints.directory(name, mtp=True))
    oracle = TransformersOracle(head.directory)
    logits, carried = oracle.mtp(head.ids[1:], oracle.run(head.ids).hidden[:-1])
    out, _ = Feeder(_operator(head)).whole_sequence(1, head.rows)
    head.check(out["logits"], logits)
    head.check(out["recurrent"], carried)
