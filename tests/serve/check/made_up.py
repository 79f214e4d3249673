"""Outcomes and runs that no engine gave."""

import dataclasses
from typing import Any

from serve.check.golden import Golden
from serve.check.happened import Met
from serve.check.outcome import Outcome
from serve.check.runner import Played
from serve.check.trail import Snapshot

OUTCOME = Outcome(
    num_prompt=5,
    tokens=(7, 8, 9),
    log_probabilities=bytes(range(12)),
    others=(("input_logprobs", "[-1.0]"), ("output_top_logprobs", "[]")),
    digests=(("layers.0.recurrent_state", "aa"), ("layers.1.key", "bb")),
)
STATE = Snapshot(
    depth=7,
    rows={
        "layers.0.recurrent_state": {-1: "r"},
        "layers.0.log_gate": {i: f"g{i}" for i in range(7)},
        "layers.1.key": {i: f"k{i}" for i in range(7)},
        "ids": {5: "i5", 6: "i6"},
    },
)
GOLDEN = Golden(OUTCOME, STATE)


def with_row(state: Snapshot, name: str, position: int) -> Snapshot:
    """The state with another row."""
    rows = {**state.rows, name: {**state.rows[name], position: "another"}}
    return dataclasses.replace(state, rows=rows)


def played(case: int, **more: Any) -> Played:
    """A case of a schedule that gave what it gives alone."""
    values: dict[str, Any] = {
        "outcome": OUTCOME,
        "met": Met(),
        "temperature": 0.0,
        "num_retractions": 0,
        "meta_info": {},
        "trail": [],
    }
    return Played(case=case, **(values | more))
