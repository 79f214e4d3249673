"""Golden runs: one request alone in a fresh engine, its prompt in one piece."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import tqdm

from serve.check.cases import Case
from serve.check.outcome import Outcome
from serve.check.setting import Setting
from serve.check.trail import Snapshot, Trail
from serve.engine import Engine


@dataclasses.dataclass(frozen=True)
class Golden:
    """What a request gave alone.

    Attributes:
      outcome: tokens, log-probabilities, digests.
      state: its state at the end, row by row.
    """

    outcome: Outcome
    state: Snapshot

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Golden":
        """What `to_json` was made of."""
        return cls(Outcome.from_json(data["outcome"]), Snapshot.from_json(data["state"]))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"outcome": self.outcome.to_json(), "state": dataclasses.asdict(self.state)}


def golden_runs(setting: Setting, cases: Iterable[Case], *, is_shown: bool = False) -> list[Golden]:
    """Every case alone.

    Args:
      is_shown: show a progress bar, on a terminal.
    """
    bar = tqdm.tqdm(list(cases), desc="requests alone", disable=None if is_shown else True)
    with setting.golden_engine() as engine:
        return [engine.loop.call(lambda case=case: run_alone(engine, case)) for case in bar]


def run_alone(engine: Engine, case: Case) -> Golden:
    """One case with nobody beside it."""
    outcome, (state,) = _run(engine, case, is_every_step=False)
    return Golden(outcome, state)


def states_of(engine: Engine, case: Case) -> tuple[Outcome, list[Snapshot]]:
    """One case with nobody beside it, and its states after every step."""
    return _run(engine, case, is_every_step=True)


def _run(engine: Engine, case: Case, *, is_every_step: bool) -> tuple[Outcome, list[Snapshot]]:
    core, request = engine.core, case.request(engine)
    trail = Trail(core, [request])
    core.add(request)
    with trail.with_ends():
        while not request.is_finished:
            touched = core.step()
            if is_every_step:
                trail.after_step(touched)
    return Outcome.of(request), trail.snapshots[request]


class GoldenStates:
    """States that a case has on its way, in an engine for one request."""

    def __init__(self, engine: Engine, case: Case):
        """Run the case, which notes the states while it generates."""
        self._engine, self._case = engine, case
        outcome, snapshots = engine.loop.call(lambda: states_of(engine, case))
        self._ids = [*case.prompt, *outcome.tokens]
        self._by_depth = {snapshot.depth: snapshot for snapshot in snapshots}

    def at(self, depth: int) -> Snapshot | None:
        """The state after so many rows; None where a seal was due.

        Inside the prompt it is that of the prompt's beginning, prefilled in one piece.
        """
        if depth < len(self._case.prompt) and depth not in self._by_depth:
            beginning = Case(
                self._ids[:depth],
                {"max_new_tokens": 0},
                {"return_state_digest": True},
            )
            run = self._engine.loop.call(lambda: run_alone(self._engine, beginning))
            self._by_depth[depth] = run.state
        return self._by_depth.get(depth)
