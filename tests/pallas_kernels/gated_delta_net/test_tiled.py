"""The log form against the recurrence in float64, and its bits over any schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bits import from_bits, storage_dtype
from pallas_kernels.gated_delta_net import (
    GdnLog,
    LogInputs,
    StateDtype,
    gated_delta_rule,
    log_step,
)
from pallas_kernels.rows import Rows, map_row_tiles
from qwen_hybrid.state import EMPTY_STATE_SLOT, StateConfig
from tests.oracles import gated_delta_net as oracle
from tests.pallas_kernels.paged import (
    LARGE,
    SMALL,
    Feeder,
    Operator,
    Piece,
    check_schedules,
    cut,
    joined,
    same_bits,
    unused,
)
from tests.tolerances import FLOAT32_SUM, GDN_HARD_INPUTS, gdn_limits

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 16
BLOCK = 64

# Sealed state, log.
DTYPES = (
    (StateDtype.FLOAT32, "float32"),
    (StateDtype.FLOAT32, "bfloat16"),
    (StateDtype.BFLOAT16, "bfloat16"),
    (StateDtype.BFLOAT16_PAIR, "bfloat16"),
)
USUAL = (StateDtype.FLOAT32, "bfloat16", BLOCK)
NAMES = [f"{state.value}-{log}" for state, log in DTYPES]


def _log(config: StateConfig) -> GdnLog:
    dtype, kept = jnp.dtype(config.dtype), config.state_dtype
    slots, rows = config.num_slots, config.log_rows
    stored = storage_dtype(dtype)
    state = (kept.planes, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    sealed = np.array(unused((config.num_state_slots, *state), kept.dtype))
    sealed[EMPTY_STATE_SLOT] = 0
    return GdnLog(
        key=unused((slots, KEY_HEADS, KEY_DIM, rows), stored),
        key_scale=unused((slots, KEY_HEADS, rows), jnp.float32),
        value=unused((slots, VALUE_HEADS, rows, VALUE_DIM), stored),
        gate=unused((slots, VALUE_HEADS, rows), jnp.float32),
        sealed=jnp.asarray(sealed),
        state_dtype=kept,
    )


def _observe(log: GdnLog, feeder: Feeder, slot: int) -> dict[str, np.ndarray]:
    position = np.arange(int(feeder.sealed_len[slot]), int(feeder.committed[slot]))
    place = position % log.gate.shape[2]
    axes = {"key": 3, "key_scale": 2, "value": 2, "gate": 2}
    rows = {
        name: np.moveaxis(np.asarray(from_bits(getattr(log, name))), axis, 1)[slot, place]
        for name, axis in axes.items()
    }
    return rows | {"sealed": np.asarray(from_bits(log.sealed))[feeder.sealed_slot[slot]]}


def _step(inputs: dict[str, jax.Array], log: GdnLog, rows: Rows):
    made = map_row_tiles(lambda one: LogInputs.of(**one), rows, inputs)
    return log_step(made, log, rows)


def _draw(rng: np.random.Generator, length: int, dtype: str) -> dict[str, np.ndarray]:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((length, *shape)).astype(np.float32)

    cast = functools.partial(np.asarray, dtype=jnp.dtype(dtype))
    return {
        "query": cast(normal(KEY_HEADS, KEY_DIM)),
        "key": cast(normal(KEY_HEADS, KEY_DIM)),
        "value": cast(normal(VALUE_HEADS, VALUE_DIM)),
        "gate": -np.exp(normal(VALUE_HEADS) - 3.0),
        "beta": (1 / (1 + np.exp(-normal(VALUE_HEADS)))).astype(np.float32),
    }


@functools.cache
def _operator(state_dtype: StateDtype, dtype: str, block_size: int = BLOCK) -> Operator:
    """The operator with one pair of types; its programs are compiled once."""
    config = StateConfig(
        num_slots=4,
        num_blocks=4 * (256 // block_size) + 1,
        num_state_slots=12,
        blocks_per_slot=256 // block_size,
        block_size=block_size,
        max_window=17,
        dtype=dtype,
        state_dtype=state_dtype,
    )
    return Operator(
        step=_step,
        init=lambda: _log(config),
        observe=_observe,
        draw=functools.partial(_draw, dtype=dtype),
        config=config,
        programs=(SMALL, LARGE) if (state_dtype, dtype, block_size) == USUAL else (LARGE,),
    )


@pytest.fixture(scope="module", params=DTYPES, ids=NAMES)
def operator(request: pytest.FixtureRequest) -> Operator:
    """The operator with each pair of types."""
    return _operator(*request.param)


@pytest.fixture(scope="module")
def golden(operator: Operator) -> tuple[dict, np.ndarray, dict]:
    """(inputs, outputs, memory) of a sequence over two boundaries, in one piece, alone."""
    inputs = operator.draw(np.random.default_rng(5), 130)
    return inputs, *Feeder(operator, seed=5).whole_sequence(2, inputs)


def _exact(inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    names = {"query": "q", "key": "k", "value": "v", "gate": "g", "beta": "beta"}
    state = np.zeros((VALUE_HEADS, KEY_DIM, VALUE_DIM))
    return oracle.recurrence(**{names[n]: x for n, x in inputs.items()}, state=state)


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((actual - expected) ** 2).mean() / (expected**2).mean()))


def _feed(feeder: Feeder, slot: int, inputs: dict, stop: int, **how) -> np.ndarray:
    """Feed one sequence up to row `stop` in one piece, all of it committed."""
    piece = cut(inputs, int(feeder.committed[slot]), stop)
    return feeder.call({slot: Piece(piece, commit=len(piece["beta"]), **how)})[slot]


def test_random_schedules_give_the_bits_of_one_piece_and_the_values_of_the_recurrence(operator):
    config = operator.config
    limits = gdn_limits(config.state_dtype.value, config.dtype)
    for inputs, out, memory in check_schedules(operator, seeds=range(12)):
        sealed = len(out) // BLOCK * BLOCK
        assert _relative_error(out, _exact(inputs)[0]) <= limits.output
        stored = memory["sealed"].astype(np.float64).sum(0)
        if sealed:
            assert _relative_error(stored, _exact(cut(inputs, 0, sealed))[1]) <= limits.state
        else:
            assert not stored.any()
        rows = cut(inputs, sealed, len(out))
        same_bits(memory["key"], rows["key"])
        lengths = np.sqrt((rows["key"].astype(np.float64) ** 2).sum(-1) + 1e-6)
        np.testing.assert_allclose(memory["key_scale"], 1 / lengths, rtol=FLOAT32_SUM)
        total = rows["gate"].astype(np.float64).cumsum(0)
        np.testing.assert_allclose(memory["gate"], total, rtol=FLOAT32_SUM)


def test_random_schedules_over_small_blocks():
    block_size = 16
    operator = _operator(StateDtype.FLOAT32, "float32", block_size)
    limits = gdn_limits("float32", "float32")
    for inputs, out, memory in check_schedules(operator, seeds=range(12)):
        assert _relative_error(out, _exact(inputs)[0]) <= limits.output
        sealed = len(out) // block_size * block_size
        assert len(memory["key"]) == len(out) - sealed
        if sealed:
            state = _exact(cut(inputs, 0, sealed))[1]
            assert _relative_error(memory["sealed"][0], state) <= limits.state


@pytest.mark.parametrize("start", [47, 50, 62, 63])
def test_window_across_a_boundary_folds_and_stores_only_what_is_certain(operator, golden, start):
    inputs, expected, memory = golden
    feeder = Feeder(operator, seed=start)
    feeder.open(1)
    outs = [_feed(feeder, 1, inputs, start)]
    before = np.asarray(feeder.state.sealed)
    outs.append(_feed(feeder, 1, inputs, start + 17, certain=1))
    # Row 63 alone completes the first block.
    stored = BLOCK if start + 1 >= BLOCK else 0
    assert feeder.sealed_len[1] == stored
    if not stored:
        same_bits(feeder.state.sealed, before)
    outs.append(_feed(feeder, 1, inputs, start + 18, certain=1))
    assert feeder.sealed_len[1] == (start + 18) // BLOCK * BLOCK
    outs.append(_feed(feeder, 1, inputs, 130))
    same_bits(np.concatenate(outs), expected)
    same_bits(feeder.finish(1), memory)


def test_seal_waits_while_the_log_has_room(operator, golden):
    inputs, expected, memory = golden
    feeder = Feeder(operator, seed=1)
    feeder.open(3)
    outs, widths = [_feed(feeder, 3, inputs, 63)], [1, 1, 2, 17, 1, 9, 16, 17]
    for width in widths:
        stop = int(feeder.committed[3]) + width
        outs.append(_feed(feeder, 3, inputs, stop, certain=1, may_seal=False))
        assert feeder.sealed_len[3] == 0
    assert feeder.must_seal(3, 17)
    outs.append(_feed(feeder, 3, inputs, 130))
    assert feeder.sealed_len[3] == 2 * BLOCK
    same_bits(np.concatenate(outs), expected)
    same_bits(feeder.finish(3), memory)


def test_seal_alone_stores_the_state_and_nothing_else(operator, golden):
    inputs, expected, memory = golden
    feeder = Feeder(operator, seed=2)
    for slot in (0, 2):
        feeder.open(slot)
        first = _feed(feeder, slot, inputs, BLOCK)
    # No row has opened the second block yet.
    assert not feeder.sealed_len.any()
    before = feeder.state
    feeder.call({}, seal_only=[2])
    np.testing.assert_array_equal(feeder.sealed_len, [0, 0, BLOCK, 0])
    for name in ("key", "key_scale", "value", "gate"):
        same_bits(getattr(feeder.state, name), getattr(before, name))
    was_empty, is_empty = (
        np.isnan(np.asarray(from_bits(log.sealed), np.float32)).all(axis=(1, 2, 3, 4))
        for log in (before, feeder.state)
    )
    np.testing.assert_array_equal(np.flatnonzero(was_empty & ~is_empty), [feeder.sealed_slot[2]])
    for slot in (0, 2):
        rest = _feed(feeder, slot, inputs, 130)
        same_bits(np.concatenate([first, rest]), expected)
        same_bits(feeder.finish(slot), memory)


def test_sequences_go_on_from_a_seal_that_they_share(operator, golden):
    inputs, expected, memory = golden
    other = joined(cut(inputs, 0, BLOCK), operator.draw(np.random.default_rng(6), 30))
    other_out, other_memory = Feeder(operator).whole_sequence(0, other)
    feeder = Feeder(operator, seed=3)
    feeder.open(0)
    _feed(feeder, 0, inputs, 70)
    feeder.fork(1, 0)
    feeder.fork(3, 0)
    pieces = {1: Piece(cut(inputs, BLOCK, 130), 66), 3: Piece(cut(other, BLOCK, 94), 30)}
    outs = feeder.call(pieces)
    same_bits(outs[1], expected[BLOCK:])
    same_bits(outs[3], other_out[BLOCK:])
    same_bits(feeder.finish(1), memory)
    same_bits(feeder.finish(3), other_memory)


def test_neighbour_full_of_nan_changes_nothing(operator, golden):
    inputs, expected, memory = golden
    feeder = Feeder(operator, seed=4)
    outs = []
    for slot in (0, 1, 2):
        feeder.open(slot)
    for stop in (7, 60, 77, 94, 130):
        piece = cut(inputs, int(feeder.committed[1]), stop)
        count = len(piece["beta"])
        bad = jax.tree.map(lambda a: np.full_like(a, np.nan), cut(piece, 0, min(count, 20)))
        pieces = {0: Piece(bad, 1), 1: Piece(piece, count), 2: Piece(bad, len(bad["beta"]))}
        outs.append(feeder.call(pieces)[1])
    same_bits(np.concatenate(outs), expected)
    same_bits(feeder.finish(1), memory)


def test_rejected_rows_full_of_nan_change_nothing(operator, golden):
    inputs, expected, memory = golden
    bad = jax.tree.map(lambda a: np.full_like(a, np.nan), cut(inputs, 0, 9))
    feeder, outs = Feeder(operator, seed=6), []
    feeder.open(1)
    for stop in (1, 2, 9, 10, 30, 60, 64, 75, 130):
        piece = cut(inputs, int(feeder.committed[1]), stop)
        count = len(piece["beta"])
        window = Piece(joined(piece, bad), commit=count, certain=count)
        outs.append(feeder.call({1: window})[1])
    same_bits(np.concatenate(outs), expected)
    same_bits(feeder.finish(1), memory)


def test_call_without_rows_changes_nothing(operator, golden):
    inputs, _, _ = golden
    feeder = Feeder(operator)
    feeder.open(0)
    _feed(feeder, 0, inputs, 70)
    before = feeder.state
    feeder.call({})
    same_bits(feeder.state, before)


def test_outputs_and_seal_equal_those_of_the_twin():
    operator = _operator(StateDtype.FLOAT32, "float32")
    inputs = operator.draw(np.random.default_rng(9), 2 * BLOCK)
    out, memory = Feeder(operator).whole_sequence(3, inputs)
    empty = jnp.zeros((VALUE_HEADS, KEY_DIM, VALUE_DIM), jnp.float32)
    arrays = (jnp.asarray(inputs[name]) for name in ("query", "key", "value", "gate", "beta"))
    twin_out, twin_state = jax.jit(functools.partial(gated_delta_rule, state=empty))(*arrays)
    np.testing.assert_allclose(out, twin_out, rtol=0, atol=FLOAT32_SUM)
    np.testing.assert_allclose(memory["sealed"][0], twin_state, rtol=0, atol=FLOAT32_SUM)


@pytest.mark.parametrize("case", ["equal keys without decay", "strong decay"])
def test_hard_inputs(case):
    operator = _operator(StateDtype.FLOAT32, "float32")
    inputs = operator.draw(np.random.default_rng(8), 130)
    if case == "strong decay":
        inputs["gate"][:] = -30.0
    else:
        # Every row overwrites the same direction: the worst case of the triangular system.
        inputs["key"][:] = inputs["key"][:1]
        inputs["gate"][:], inputs["beta"][:] = 0.0, 1.0
    out, _ = Feeder(operator).whole_sequence(0, inputs)
    np.testing.assert_allclose(out, _exact(inputs)[0], rtol=0, atol=GDN_HARD_INPUTS)
