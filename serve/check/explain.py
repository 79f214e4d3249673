"""Which row of the state differed first: both runs once more, looked at after every step."""

import dataclasses
import math

from serve.check.cases import Case
from serve.check.golden import GoldenStates, states_of
from serve.check.laws import LawRun, by_engine
from serve.check.report import Difference
from serve.check.runner import ScheduleRunner
from serve.check.trail import Snapshot, StateDifference

# By the place and the request of a difference.
Key = tuple[str, int]
Trails = dict[Key, list[Snapshot]]


def explain(run: LawRun) -> None:
    """Add to first differences the layer, tensor and position at which the states parted.

    A difference whose states are the same until then, or that does not come again, stays as it is.
    """
    found = [report.first_difference for report in run.reports if report.first_difference]
    trails = _schedules_again(run, [d for d in found if d.schedule is not None])
    trails |= _scores_again(run, run.scored.first_difference)
    first = _compare(run, trails, {_key(d): d.parting.rows for d in found})
    for report in run.reports:
        difference = report.first_difference
        if difference is not None and _key(difference) in first:
            state = first[_key(difference)]
            report.first_difference = dataclasses.replace(difference, state=state)


def _key(difference: Difference) -> Key:
    return difference.where, difference.case


def _schedules_again(run: LawRun, differences: list[Difference]) -> Trails:
    """States of the requests that differed.

    All schedules up to the last of them run again in fresh engines, so that every request finds
    what it found before.
    """
    watched: dict[int, set[int]] = {}
    for difference in differences:
        watched.setdefault(difference.schedule or 0, set()).add(difference.case)
    trails: Trails = {}
    if not watched:
        return trails
    for drafting, schedules in by_engine(run, max(watched) + 1 - run.first_seed):
        last = max((s.seed for s in schedules if s.seed in watched), default=-1)
        if last < 0:
            continue
        with ScheduleRunner(run.setting, run.cases, drafting, run.expected) as runner:
            for schedule in schedules:
                if schedule.seed > last:
                    break
                played, _ = runner.run(schedule, watched.get(schedule.seed, ()))
                trails |= {(str(schedule), p.case): p.trail for p in played if p.trail}
    return trails


def _scores_again(run: LawRun, difference: Difference | None) -> Trails:
    """States of a prefill of prompt and output, as far as the output became rows."""
    if difference is None:
        return {}
    case, outcome = run.cases[difference.case], run.golden[difference.case].outcome
    ids = [*case.prompt, *outcome.tokens[:-1]]
    again = Case(ids, {"max_new_tokens": 0}, {"return_state_digest": True})
    with ScheduleRunner(run.setting, run.cases) as runner:
        engine = runner.engine
        _, snapshots = engine.loop.call(lambda: states_of(engine, again))
    return {_key(difference): snapshots}


def _compare(run: LawRun, trails: Trails, rows: dict[Key, float]) -> dict[Key, StateDifference]:
    """The first rows in which states differ from those of golden runs.

    Args:
      rows: of each difference, rows that both runs had computed from the same tokens.
    """
    found: dict[Key, StateDifference] = {}
    if not trails:
        return found
    with run.setting.golden_engine() as engine:
        for key, trail in trails.items():
            golden = GoldenStates(engine, run.cases[key[1]])
            state = _first(golden, trail, rows.get(key, math.inf))
            if state is not None:
                found[key] = state
    return found


def _first(golden: GoldenStates, trail: list[Snapshot], rows: float) -> StateDifference | None:
    for snapshot in trail:
        alone = golden.at(snapshot.depth)
        found = alone.first_difference(snapshot, rows) if alone is not None else None
        if found is not None:
            return found
    return None
