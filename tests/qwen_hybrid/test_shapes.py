"""Programs for few rows and for many give the same bits, over whole models of two layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rows import DECODE, PREFILL, shape_of
from pallas_kernels.struct import build
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.digest import canonical, extract
from qwen_hybrid.model import HybridModel
from qwen_hybrid.prepare import prepare
from qwen_hybrid.state import Call, StateConfig, commit, init_state
from qwen_hybrid.step import COMPILER_OPTIONS, logits
from qwen_hybrid.weights import dummy_params
from tests.pallas_kernels.paged import same_bits
from tests.tiny_models import two_layers

FEW, MANY = 48, 160
NUM_ROWS, PIECES = 40, (17, 1, 1, 1, 5, 15)
# Lanes without a sequence repeat slot 0.
SLOT = 0
# One of each family; between them experts, full and sparse attention, hyper-connections, n-grams.
COVER = (("q35_moe", "bfloat16"), ("q4_odd", "float32"))
NAMES = (
    *("q35_dense", "q35_dense_ratio3_tied", "q35_moe"),
    *("q4_full_budget", "q4_qsa", "q4_ple", "q4_all", "q4_odd"),
)
CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in COVER else pytest.mark.full)
    for name in NAMES
    for dtype in ("float32", "bfloat16")
]


class _Model:
    """A model with random weights, and one program for each number of rows."""

    def __init__(self, name: str, dtype: str) -> None:
        self.config = HybridConfig.from_hf(two_layers(name))
        # Small blocks: the rows pass two boundaries.
        self.sc = StateConfig(
            num_slots=4,
            num_blocks=13,
            num_state_slots=6,
            blocks_per_slot=3,
            block_size=16,
            dtype=dtype,
        )
        self._params = prepare(dummy_params(self.config, dtype=dtype))
        self._logits = jax.jit(
            functools.partial(logits, HybridModel(self.config, dtype), self.sc),
            compiler_options=COMPILER_OPTIONS,
        )

    def run(self, ids: np.ndarray, pieces: tuple[int, ...], program: int):
        """(logits of every row, canonical state) of a sequence fed in pieces."""
        state, out, at = init_state(self.config, self.sc), [], 0
        table = jnp.asarray(np.arange(12, dtype=np.int32).reshape(4, 3)[::-1])
        for size in pieces:
            spare = jnp.full(4, -1).at[SLOT].set(state.sequences.sealed_slot[SLOT] + 1)
            sequences = dataclasses.replace(state.sequences, next_slot=spare, block_table=table)
            state = dataclasses.replace(state, sequences=sequences)
            packed = np.zeros(program, np.int32)
            packed[:size] = ids[at : at + size]
            count = jnp.zeros(4, jnp.int32).at[SLOT].set(size)
            call = build(
                Call,
                ids=jnp.asarray(packed),
                count=count,
                certain=count,
                seal_only=jnp.zeros(4, bool),
            )
            made, state = self._logits(self._params, state, call)
            state = commit(state, count)
            out.append(np.asarray(made)[:size])
            at += size
        part = extract(state, jnp.asarray(SLOT))
        return np.concatenate(out), canonical(part, at, self.config, self.sc)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_programs_for_few_and_for_many_rows_give_the_same_bits(name, dtype):
    assert (shape_of(FEW), shape_of(MANY)) == (DECODE, PREFILL)
    model = _Model(name, dtype)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, NUM_ROWS)
    expected = model.run(ids, (NUM_ROWS,), MANY)
    assert np.isfinite(expected[0]).all()
    for pieces in ((NUM_ROWS,), PIECES):
        same_bits(model.run(ids, pieces, FEW), expected)


def test_the_pieces_are_the_whole_sequence():
    assert sum(PIECES) == NUM_ROWS
