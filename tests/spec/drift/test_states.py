"""The state that a log stands for, against the recurrence; short rings, against one that is."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_net import GdnLog, StateDtype
from pallas_kernels.struct import build
from spec.drift.rings import overwritten
from spec.drift.running_state import running_state
from tests.tolerances import FLOAT32

BLOCK, HEADS, KEY_HEADS, DIM = 16, 4, 2, 8


def make_log(rng: np.random.Generator) -> GdnLog:
    """A log of two blocks; the sums of log-gates start again at each."""
    steps = -rng.uniform(0.01, 0.3, (HEADS, 2, BLOCK))
    return build(
        GdnLog,
        key=jnp.asarray(rng.normal(size=(KEY_HEADS, DIM, 2 * BLOCK)), jnp.float32),
        key_scale=jnp.asarray(rng.uniform(0.2, 0.5, (KEY_HEADS, 2 * BLOCK)), jnp.float32),
        value=jnp.asarray(rng.normal(size=(HEADS, 2 * BLOCK, DIM)), jnp.float32),
        gate=jnp.asarray(np.cumsum(steps, axis=2).reshape(HEADS, -1), jnp.float32),
        sealed=jnp.asarray(rng.normal(size=(1, HEADS, DIM, DIM)), jnp.float32),
        state_dtype=StateDtype.FLOAT32,
    )


def recurrence(log: GdnLog, first: int, depth: int) -> np.ndarray:
    """S <- exp(g) S + k u^T, row after row, in float64."""
    state = np.asarray(log.sealed[0], np.float64)
    gate, value = np.asarray(log.gate, np.float64), np.asarray(log.value, np.float64)
    key = np.asarray(log.key, np.float64) * np.asarray(log.key_scale, np.float64)[:, None, :]
    for position in range(first, depth):
        row = position % (2 * BLOCK)
        before = gate[:, row - 1] if position % BLOCK else 0.0
        decay = np.exp(gate[:, row] - before)
        for head in range(HEADS):
            k = key[head // (HEADS // KEY_HEADS), :, row]
            state[head] = decay[head] * state[head] + np.outer(k, value[head, row])
    return state


# In the first block and at its end; past a due seal; from the second block, around the ring.
SPANS = [(0, 0), (0, 5), (0, 16), (0, 23), (16, 16), (16, 45)]


@pytest.mark.parametrize(("first", "depth"), SPANS)
def test_running_state_is_that_of_the_recurrence(rng, first, depth):
    log = make_log(rng)
    where = jnp.asarray(first, jnp.int32), jnp.asarray(depth, jnp.int32)
    found = running_state(log, *where, block_size=BLOCK)
    np.testing.assert_allclose(
        found,
        recurrence(log, first, depth),
        rtol=FLOAT32.max_difference,
        atol=FLOAT32.max_difference,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("end", "last"), [(0, 3), (2, 5), (9, 9), (9, 12), (10, 17), (11, 10)])
def test_overwritten_rows_are_those_of_a_ring_without_rows_to_spare(size, end, last):
    # Row p holds p; the long ring has room for all that the short one loses.
    short: dict[int, int] = {}
    for position in range(last + 1):
        short[position % size] = position
    long = np.zeros((1, 19, 1), np.int32)
    for position in range(max(0, last - 18), last + 1):
        long[0, position % 19] = position
    found = overwritten(
        jnp.asarray(long),
        end=jnp.asarray([end], jnp.int32),
        last=jnp.asarray([last], jnp.int32),
        size=size,
    )
    for position in range(max(0, end - size), end):
        assert int(found[0, position % 19, 0]) == short[position % size]
