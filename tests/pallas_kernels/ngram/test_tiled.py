"""The n-gram hash in 32-bit words, against unbounded integers and published rows."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ngram import check_bounds, ngram_rows, reference
from pallas_kernels.ngram.tiled import MAX_MODULUS, MAX_VOCAB
from pallas_kernels.rows import map_row_tiles, previous_rows, write_ring
from qwen_hybrid.state import StateConfig
from qwen_hybrid.step import COMPILER_OPTIONS
from tests.oracles import ngram as oracle
from tests.pallas_kernels.ngram.test_reference import EOS, VECTORS, VOCAB
from tests.pallas_kernels.paged import Feeder, Operator, check_schedules, ring_rows, unused

FLASH_NEXT = oracle.constants(
    0, VOCAB, ngram_size=3, heads=8, base=20_000_000, divisor=128, seed=1234
)


LENGTH = 400


@functools.cache
def _program(table: oracle.Table, heads: int, eos: int) -> Callable:
    def rows(tokens, position):
        return ngram_rows(
            tokens,
            position,
            multipliers=table.multipliers,
            moduli=table.moduli,
            offsets=table.offsets,
            heads_per_ngram=heads,
            eos=eos,
        )

    return jax.jit(rows, compiler_options=COMPILER_OPTIONS)


def _rows(ids: list[int], table: oracle.Table, *, heads: int, eos: int) -> np.ndarray:
    """Rows of one whole sequence, absurd tokens before its start and after its end."""
    size = len(table.multipliers)
    padded = np.full(size + LENGTH, MAX_VOCAB - 1, np.int32)
    padded[size : size + len(ids)] = ids
    tokens = [jnp.asarray(padded[size - back : len(padded) - back]) for back in range(size)]
    program = _program(table, heads, eos)
    return np.asarray(program(tokens, jnp.arange(LENGTH, dtype=jnp.int32)))[: len(ids)]


@pytest.mark.parametrize("case", VECTORS)
def test_published_rows(case):
    ids, expected = VECTORS[case]
    rows = _rows(ids, FLASH_NEXT, heads=8, eos=EOS)
    assert rows[-1].tolist() == [int(row) for row in expected.split()]


@pytest.mark.parametrize(("size", "heads", "rank"), [(2, 4, 0), (3, 8, 1), (4, 3, 0)])
def test_random_ids_match_the_oracle(size, heads, rank):
    table = oracle.constants(
        rank, VOCAB, ngram_size=size, heads=heads, base=53, divisor=128, seed=99
    )
    ids = np.random.default_rng(rank).integers(0, VOCAB, LENGTH)
    ids[::7] = 7
    expected = oracle.rows(ids.tolist(), table, ngram_size=size, heads=heads, eos=7)
    actual = _rows(ids.tolist(), table, heads=heads, eos=7)
    assert actual.tolist() == expected
    twin = reference.ngram_rows(ids, table, ngram_size=size, heads_per_ngram=heads, eos=7)
    np.testing.assert_array_equal(actual, twin)


def test_largest_numbers_are_exact():
    moduli = (MAX_MODULUS - 1, MAX_MODULUS - 39, 2, 3)
    table = oracle.Table(((1 << 45) - 1, (1 << 45) - 3, (1 << 44) + 1), moduli, (0, 5, 6, 8), 0)
    ids = [MAX_VOCAB - 1, MAX_VOCAB - 2, 1 << 17, 0, 65535, 65536, MAX_VOCAB - 1]
    expected = oracle.rows(ids, table, ngram_size=3, heads=2, eos=MAX_VOCAB - 3)
    assert _rows(ids, table, heads=2, eos=MAX_VOCAB - 3).tolist() == expected


def test_numbers_that_would_not_be_exact_are_refused():
    check_bounds(MAX_VOCAB, [MAX_MODULUS - 1])
    with pytest.raises(ValueError, match=f"vocab_size <= {MAX_VOCAB}, got {MAX_VOCAB + 1}"):
        check_bounds(MAX_VOCAB + 1, [3])
    with pytest.raises(ValueError, match=f"below {MAX_MODULUS}, got {MAX_MODULUS}"):
        check_bounds(5, [3, MAX_MODULUS])


@functools.cache
def _operator() -> Operator:
    """The hash of rows whose predecessors come from a ring of ids."""
    config = StateConfig(
        num_slots=4, num_blocks=17, num_state_slots=12, blocks_per_slot=4, max_window=17
    )

    def step(ids, ring, rows):
        index = jnp.arange(ids.shape[0], dtype=jnp.int32)
        tokens = [ids, *(previous_rows(ids, ring, rows, index, back) for back in (1, 2))]

        def tile(position, *tokens):
            return ngram_rows(
                tokens,
                position,
                multipliers=FLASH_NEXT.multipliers,
                moduli=FLASH_NEXT.moduli,
                offsets=FLASH_NEXT.offsets,
                heads_per_ngram=8,
                eos=EOS,
            )

        return map_row_tiles(tile, rows, rows.position, *tokens), write_ring(ring, ids, rows)

    def draw(rng: np.random.Generator, length: int) -> np.ndarray:
        ids = rng.integers(0, VOCAB, length).astype(np.int32)
        return np.where(rng.random(length) < 0.2, np.int32(EOS), ids)

    return Operator(
        step=step,
        init=lambda: unused((config.num_slots, config.ring_rows(2)), jnp.int32),
        observe=lambda ring, feeder, slot: ring_rows(ring, feeder, slot, 2),
        draw=draw,
        config=config,
    )


def test_random_schedules_match_the_oracle():
    for ids, rows, _ in check_schedules(_operator(), seeds=range(12)):
        expected = oracle.rows(ids.tolist(), FLASH_NEXT, ngram_size=3, heads=8, eos=EOS)
        assert rows.tolist() == expected


def test_rows_do_not_depend_on_what_the_ring_held_before():
    op = _operator()
    ids = op.draw(np.random.default_rng(3), 20)
    feeder = Feeder(op)
    first, _ = feeder.whole_sequence(1, ids)
    again, _ = feeder.whole_sequence(1, ids)
    np.testing.assert_array_equal(first, again)
