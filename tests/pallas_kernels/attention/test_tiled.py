"""Attention over pages against the float64 oracle, and its bits over any schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import SPAN, masked_attention, paged_attention
from pallas_kernels.bits import storage_dtype
from pallas_kernels.rows import write_pages
from qwen_hybrid.state import StateConfig
from tests.oracles import attention as oracle
from tests.pallas_kernels.paged import (
    LARGE,
    LENGTHS,
    SMALL,
    Feeder,
    Operator,
    Piece,
    check_schedules,
    cut,
    joined,
    page_rows,
    same_bits,
    unused,
)
from tests.tolerances import ATTENTION, FLOAT32_SUM

KV_HEADS, HEAD_DIM, SCALE = 2, 16, 0.25


@functools.cache
def _operator(heads: int, block_size: int, dtype: str) -> Operator:
    """Attention with one number of query heads; its programs are compiled once."""
    blocks = 2 * SPAN // block_size
    config = StateConfig(
        num_slots=4,
        num_blocks=4 * blocks + 1,
        num_state_slots=12,
        blocks_per_slot=blocks,
        block_size=block_size,
        max_window=17,
    )
    shapes = {"key": (KV_HEADS, HEAD_DIM, block_size), "value": (KV_HEADS, block_size, HEAD_DIM)}
    row_axis = {"key": 3, "value": 2}

    def step(inputs, state, rows):
        state = {
            name: write_pages(pages, inputs[name], rows, row_axis=row_axis[name])
            for name, pages in state.items()
        }
        out = paged_attention(inputs["query"], state["key"], state["value"], rows, scale=SCALE)
        return out, state

    def observe(state, feeder: Feeder, slot: int) -> dict[str, np.ndarray]:
        return {
            name: page_rows(jnp.moveaxis(array, row_axis[name], 1), feeder, slot, block_size)
            for name, array in state.items()
        }

    def draw(rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
        def normal(heads: int) -> np.ndarray:
            return rng.standard_normal((length, heads, HEAD_DIM)).astype(jnp.dtype(dtype))

        return {"query": normal(heads), "key": normal(KV_HEADS), "value": normal(KV_HEADS)}

    def init() -> dict[str, jax.Array]:
        return {
            name: unused((config.num_blocks, *shape), storage_dtype(dtype))
            for name, shape in shapes.items()
        }

    programs = (SMALL, LARGE) if heads == 4 else (LARGE,)
    return Operator(step, init, observe, draw, config, programs)


# (query heads, block size, type)
CASES = ((4, 64, "float32"), (6, 32, "bfloat16"), (2, 16, "float32"))


@pytest.mark.parametrize(("heads", "block_size", "dtype"), CASES)
def test_random_schedules_give_the_bits_of_one_piece_and_the_values_of_the_oracle(
    heads, block_size, dtype
):
    op = _operator(heads, block_size, dtype)
    out, arrays, mask = None, [], None
    for inputs, out, memory in check_schedules(op, seeds=range(12)):
        arrays = [inputs[name] for name in ("query", "key", "value")]
        mask = np.tri(len(out), dtype=bool)
        expected = oracle.attend(*arrays, mask, SCALE)
        np.testing.assert_allclose(out, expected, rtol=0, atol=ATTENTION)
        same_bits(memory, {name: inputs[name] for name in memory})
    twin = masked_attention(*(jnp.asarray(a) for a in (*arrays, mask)), scale=SCALE)
    np.testing.assert_allclose(out, twin, rtol=0, atol=ATTENTION)


def test_more_keys_than_one_span_and_large_scores():
    op = _operator(4, 64, "float32")
    inputs = op.draw(np.random.default_rng(1), SPAN + 40)
    inputs["query"] *= 30
    feeder, outs = Feeder(op), []
    feeder.open(2)
    for stop in (150, SPAN - 3, SPAN, SPAN + 1, SPAN + 40):
        piece = cut(inputs, int(feeder.committed[2]), stop)
        outs.append(feeder.call({2: Piece(piece, len(piece["query"]))})[2])
    mask = np.tri(SPAN + 40, dtype=bool)
    expected = oracle.attend(inputs["query"], inputs["key"], inputs["value"], mask, SCALE)
    # Scores reach 100, where a float32 is 4e-6 apart.
    np.testing.assert_allclose(np.concatenate(outs), expected, rtol=0, atol=1e-4)
    again, feeder = [], Feeder(op, seed=2)
    feeder.open(0)
    for stop in (100, 200, 256, 266, SPAN + 40):
        piece = cut(inputs, int(feeder.committed[0]), stop)
        again.append(feeder.call({0: Piece(piece, len(piece["query"]))})[0])
    same_bits(np.concatenate(again), np.concatenate(outs))


@pytest.mark.parametrize("length", LENGTHS)
def test_neighbour_full_of_nan_changes_nothing(length):
    op = _operator(4, 64, "float32")
    inputs = op.draw(np.random.default_rng(length), length)
    expected, memory = Feeder(op).whole_sequence(0, inputs)
    bad = jax.tree.map(lambda a: np.full_like(a, np.nan), op.draw(np.random.default_rng(0), 15))
    feeder = Feeder(op, seed=1)
    feeder.call({0: Piece(bad, 15), 3: Piece(bad, 3)})
    out = feeder.call({0: Piece(bad, 15), 1: Piece(inputs, length), 3: Piece(bad, 0)})
    same_bits(out[1], expected)
    same_bits(feeder.finish(1), memory)


def test_rejected_rows_full_of_nan_change_nothing():
    op = _operator(4, 64, "float32")
    inputs = op.draw(np.random.default_rng(3), 100)
    expected, memory = Feeder(op).whole_sequence(0, inputs)
    bad = jax.tree.map(lambda a: np.full_like(a, np.nan), cut(inputs, 0, 9))
    feeder, outs = Feeder(op, seed=1), []
    for stop in (1, 2, 9, 10, 30, 60, 64, 75, 100):
        piece = cut(inputs, int(feeder.committed[1]), stop)
        count = len(piece["query"])
        outs.append(feeder.call({1: Piece(joined(piece, bad), commit=count)})[1])
    same_bits(np.concatenate(outs), expected)
    same_bits(feeder.finish(1), memory)


def test_row_that_sees_nan_is_nan():
    op = _operator(4, 64, "float32")
    inputs = op.draw(np.random.default_rng(4), 40)
    inputs["value"][20, 1, 3] = np.nan
    out, _ = Feeder(op).whole_sequence(0, inputs)
    assert np.isfinite(out[:20]).all()
    assert np.isnan(out[20:]).any(axis=(1, 2)).all()


def test_one_key_gives_its_value_whatever_the_score():
    op = _operator(4, 64, "float32")
    inputs = op.draw(np.random.default_rng(2), 1)
    inputs["key"] *= 1000
    out, _ = Feeder(op).whole_sequence(1, inputs)
    expected = np.repeat(inputs["value"], 2, axis=1)
    np.testing.assert_allclose(out, expected, rtol=FLOAT32_SUM)
