"""Where outcomes and states part, on outcomes and states that are written down here."""

import dataclasses
import json
import math

import numpy as np
import pytest

from serve.check.golden import Golden
from serve.check.report import Difference, Report, table
from serve.check.trail import Snapshot, StateDifference
from tests.serve.check.made_up import GOLDEN, OUTCOME, STATE, with_row


def other(**changes):
    """The outcome with something else in it."""
    return dataclasses.replace(OUTCOME, **changes)


@pytest.mark.parametrize(
    ("changed", "text", "rows"),
    [
        # What the caller sees first comes first, whatever else differs.
        (other(tokens=(7, 3, 9), digests=()), "token 1: 3, not 8", 6),
        (other(tokens=(7, 8), log_probabilities=b""), "2 tokens, not 3", math.inf),
        (other(log_probabilities=bytes(8) + bytes(range(8, 12))), "log-probability of token 0", 5),
        (other(others=(("input_logprobs", "[-2.0]"), *OUTCOME.others[1:])), "input_logprobs", None),
        (other(digests=(OUTCOME.digests[0], ("layers.1.key", "x"))), "state layers.1.key", None),
        (other(digests=OUTCOME.digests[:1]), "state layers.1.key", None),
    ],
)
def test_the_first_thing_that_differs_is_named(changed, text, rows):
    parting = OUTCOME.parting(changed)
    assert parting is not None
    assert parting.text == text
    assert parting.rows == (math.inf if rows is None else rows)


def test_the_same_bits_do_not_part():
    assert OUTCOME.parting(other()) is None
    nan = np.asarray([np.nan] * 3, np.float32).tobytes()
    assert other(log_probabilities=nan).parting(other(log_probabilities=nan)) is None


def test_the_earliest_row_is_named_and_of_one_position_the_lowest_layer():
    changed = with_row(STATE, "layers.1.key", 3)
    assert STATE.first_difference(changed) == StateDifference(1, "key", 3)
    changed = with_row(changed, "layers.0.log_gate", 4)
    assert STATE.first_difference(changed) == StateDifference(1, "key", 3)
    changed = with_row(changed, "layers.0.log_gate", 3)
    assert STATE.first_difference(changed) == StateDifference(0, "log_gate", 3)
    # The tokens are what everything follows from.
    changed = with_row(with_row(STATE, "layers.0.log_gate", 6), "ids", 6)
    assert STATE.first_difference(changed) == StateDifference(None, "ids", 6)
    assert str(STATE.first_difference(changed)) == "ids at position 6"


def test_rows_that_both_do_not_have_or_that_follow_from_another_token_are_left_out():
    changed = with_row(STATE, "layers.1.key", 4)
    assert STATE.first_difference(changed, rows=4) is None
    assert STATE.first_difference(changed, rows=5) == StateDifference(1, "key", 4)
    deeper = {"layers.1.key": {**STATE.rows["layers.1.key"], 7: "k7"}}
    assert STATE.first_difference(Snapshot(8, deeper)) is None


def test_golden_runs_survive_the_way_to_another_process():
    data = json.loads(json.dumps(GOLDEN.to_json()))
    assert Golden.from_json(data) == GOLDEN


def test_reports_say_what_was_tested():
    parting = OUTCOME.parting(other(digests=OUTCOME.digests[:1]))
    assert parting is not None
    absent, idle, fine, bad = (Report(f"L{i}", "x") for i in range(4))
    absent.is_available = False
    fine.saw(4, None)
    bad.saw(4, Difference("schedule 2", 5, parting, 2, StateDifference(1, "key", 3)))
    bad.saw(4, Difference("schedule 3", 6, parting, 3))
    reports = [absent, idle, fine, bad]
    states = [report.status for report in reports]
    assert states == ["not available", "not tested", "passed", "failed"]
    ends = [line.split("  ")[-1] for line in table(reports)[1:]]
    assert ends == [
        "not available",
        "not tested: it never happened",
        "none",
        "schedule 2, request 5: layer 1 key at position 3; state layers.1.key",
    ]
    data = bad.to_json()
    assert (data["tokens"], data["first_difference"]["schedule"]) == (8, 2)
    place = [data["first_difference"][key] for key in ("layer", "tensor", "position")]
    assert place == [1, "key", 3]
    # Without the row, the digest that differs still has a name.
    bare = Difference("a new process", 0, parting).to_json()
    assert (bare["layer"], bare["tensor"], bare["position"]) == (1, "key", None)
    fine.missing = "something"
    assert fine.status == "not tested"
