"""Which row of the state belongs to which position."""

import itertools

import pytest

from serve.check.cases import Case
from serve.check.golden import GoldenStates, states_of
from serve.check.trail import split_name
from tests.laws.settings import one_program, setting_of

PROMPT = list(range(3, 63))
# Over two block boundaries.
CASE = Case(
    PROMPT,
    {"max_new_tokens": 75, "sampling_seed": 3, "ignore_eos": True},
    {"return_state_digest": True},
)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """States of a model that has every kind of state, and the same on demand."""
    setting = setting_of("tiny-q4", "float32", tmp_path_factory.mktemp("models"))
    with one_program(), setting.golden_engine() as engine:
        _, snapshots = engine.loop.call(lambda: states_of(engine, CASE))
        golden = GoldenStates(engine, CASE)
        yield snapshots, {depth: golden.at(depth) for depth in (1, 5, 40, 59, 70, 64)}


def test_a_row_is_the_same_at_every_depth(states):
    """Or else it is taken for another one: the rows of each array differ from one another."""
    snapshots, _ = states
    assert [s.depth for s in snapshots] == [d for d in range(60, 135) if d not in (64, 128)]
    kinds = set()
    for earlier, later in itertools.pairwise(snapshots):
        assert earlier.first_difference(later) is None
        for name, rows in later.rows.items():
            kinds.add(split_name(name)[1])
            assert len(set(rows.values())) == len(rows), name
            if earlier.depth // 64 == later.depth // 64 and rows:
                assert rows.keys() & earlier.rows[name].keys() or "pending" in name, name
    assert kinds >= {"recurrent_state", "log_gate", "conv_state", "ple_conv_state", "ids"}
    assert kinds >= {"key", "value", "pooled_index_keys", "pending_index_keys"}


def test_states_inside_the_prompt_are_those_of_its_beginning(states):
    snapshots, at = states
    assert at[70] == next(s for s in snapshots if s.depth == 70)
    assert at[64] is None
    assert at[59].rows["layers.1.key"].keys() == set(range(59))
    for depth in (1, 5, 40, 59):
        assert at[depth].depth == depth
        assert at[depth].first_difference(snapshots[0]) is None
