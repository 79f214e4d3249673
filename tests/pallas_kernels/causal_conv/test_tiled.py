"""Convolution of packed rows over a ring, against the float64 oracle, and its bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bits import storage_dtype
from pallas_kernels.causal_conv import causal_conv, conv_rows
from pallas_kernels.rows import map_row_tiles, write_ring
from qwen_hybrid.state import StateConfig
from tests.oracles import causal_conv as oracle
from tests.pallas_kernels.paged import (
    LARGE,
    SMALL,
    Feeder,
    Operator,
    Piece,
    check_schedules,
    cut,
    joined,
    ring_rows,
    same_bits,
    unused,
)
from tests.tolerances import FLOAT32_SUM

CHANNELS = 12
# (taps, dilation): of Gated DeltaNet and of the n-gram embedding.
SHAPES = ((4, 1), (4, 3))


@functools.cache
def _operator(taps: int, dilation: int, dtype: str) -> Operator:
    """The convolution of one shape; its programs are compiled once."""
    config = StateConfig(
        num_slots=4, num_blocks=17, num_state_slots=12, blocks_per_slot=4, max_window=17
    )
    window = (taps - 1) * dilation

    def init() -> dict[str, jax.Array]:
        weight = np.random.default_rng(taps).standard_normal((CHANNELS, taps))
        ring = unused((config.num_slots, config.ring_rows(window), CHANNELS), storage_dtype(dtype))
        return {"ring": ring, "weight": jnp.asarray(weight, dtype)}

    def step(x, state, rows):
        def tile(row):
            return conv_rows(x, state["ring"], state["weight"], rows, row, dilation=dilation)

        y = map_row_tiles(tile, rows, jnp.arange(x.shape[0], dtype=jnp.int32))
        return y, state | {"ring": write_ring(state["ring"], x, rows)}

    def draw(rng: np.random.Generator, length: int) -> np.ndarray:
        return rng.standard_normal((length, CHANNELS)).astype(jnp.dtype(dtype))

    def observe(state, feeder: Feeder, slot: int) -> np.ndarray:
        return ring_rows(state["ring"], feeder, slot, window)

    programs = (SMALL, LARGE) if dilation > 1 else (LARGE,)
    return Operator(step, init, observe, draw, config, programs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("taps", "dilation"), SHAPES)
def test_random_schedules_give_the_bits_of_one_piece_and_the_values_of_the_oracle(
    taps, dilation, dtype
):
    op = _operator(taps, dilation, dtype)
    tail = np.zeros(((taps - 1) * dilation, CHANNELS), np.float32)
    weight = np.asarray(op.init()["weight"])
    x, y = None, None
    for x, y, ring in check_schedules(op, seeds=range(12)):
        expected = oracle.convolve(x, weight, dilation, tail)
        np.testing.assert_allclose(y, expected, rtol=0, atol=FLOAT32_SUM)
        same_bits(ring, x[max(0, len(x) - len(tail)) :])
    arrays = (jnp.asarray(a, jnp.float32) for a in (x, weight))
    twin = causal_conv(*arrays, dilation=dilation, tail=jnp.asarray(tail))
    np.testing.assert_allclose(y, twin, rtol=0, atol=FLOAT32_SUM)


def test_neighbour_and_rejected_rows_full_of_nan_change_nothing():
    op = _operator(4, 3, "float32")
    x = op.draw(np.random.default_rng(1), 60)
    expected, ring = Feeder(op).whole_sequence(0, x)
    feeder, outs = Feeder(op, seed=1), []
    bad = np.full((9, CHANNELS), np.nan, np.float32)
    for stop in (1, 2, 9, 10, 30, 60):
        piece = cut(x, int(feeder.committed[1]), stop)
        pieces = {0: Piece(bad, commit=0), 1: Piece(joined(piece, bad), commit=len(piece))}
        outs.append(feeder.call(pieces)[1])
    same_bits(np.concatenate(outs), expected)
    same_bits(feeder.finish(1), ring)


@pytest.mark.parametrize(("taps", "dilation"), SHAPES)
def test_widest_window_of_which_one_row_counts(taps, dilation):
    """The rejected rows reach as far round the ring as any may."""
    op = _operator(taps, dilation, "float32")
    x = op.draw(np.random.default_rng(2), 30)
    expected, ring = Feeder(op).whole_sequence(0, x)
    feeder = Feeder(op, seed=2)
    feeder.open(3)
    outs = [feeder.call({3: Piece(cut(x, 0, 12), commit=12)})[3]]
    bad = np.full((op.config.max_window - 1, CHANNELS), np.nan, np.float32)
    for row in range(12, 30):
        window = joined(cut(x, row, row + 1), bad)
        outs.append(feeder.call({3: Piece(window, commit=1, certain=1)})[3])
    same_bits(np.concatenate(outs), expected)
    same_bits(feeder.finish(3), ring)
