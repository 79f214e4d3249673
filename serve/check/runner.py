"""Runs schedules: several requests in one engine, under everything that may happen to them."""

import contextlib
import dataclasses
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from serve.check.cases import Case, poisoned_case
from serve.check.device import spoil
from serve.check.happened import Happened, Met, Observer
from serve.check.moments import Cover, Held
from serve.check.outcome import Outcome
from serve.check.schedule import Schedule
from serve.check.setting import Setting
from serve.check.speculation import Drafting
from serve.check.trail import Snapshot, Trail
from serve.request import Request, StepResult
from serve.results import meta_info
from serve.scheduler import Work


@dataclasses.dataclass(frozen=True)
class Played:
    """A case of a schedule.

    Attributes:
      case: its index.
      outcome: what it gave.
      met: what it met on its way.
      temperature: of its sampling.
      num_retractions: how often it was preempted.
      meta_info: as its caller would get it.
      trail: its states, if they were wanted.
    """

    case: int
    outcome: Outcome
    met: Met
    temperature: float
    num_retractions: int
    meta_info: dict[str, Any]
    trail: list[Snapshot]

    @property
    def is_drafted(self) -> bool:
        """Drafts of it were verified."""
        return sum(self.meta_info.get("spec_verified_by_position", ())) > 0


class ScheduleRunner:
    """An engine of several slots that runs schedules one after another, over what earlier ones
    left in its pools. The same schedules in the same order give the same run.

    Attributes:
      engine: where they run.
      cover: the moments at which requests were preempted.
    """

    def __init__(
        self,
        setting: Setting,
        cases: list[Case],
        drafting: Drafting | None = None,
        expected: list[list[int]] | None = None,
    ):
        """Start the engine.

        Args:
          expected: what each case gives, which drafts are made of.
        """
        self.engine = setting.schedule_engine(drafting)
        self._expected = expected or [[] for _ in cases]
        self._own_drafts = self.engine.core.runner.speculation.given
        self.cover = Cover(setting.block_size)
        self._cases, self._poisoned = cases, poisoned_case(setting.sizes)
        self._run = self.engine.core.runner.run
        self.engine.core.runner.run = self._observed  # type: ignore[method-assign]
        self._observer, self._poison = Observer(None), None

    def __enter__(self) -> "ScheduleRunner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.shutdown()

    def run(self, schedule: Schedule, watched: Iterable[int] = ()) -> tuple[list[Played], Happened]:
        """Run a schedule's cases, in its order.

        Args:
          watched: cases whose states are wanted.
        """
        return self.engine.loop.call(lambda: self._run_schedule(schedule, set(watched)))

    def _observed(self, work: list[Work]) -> list[StepResult]:
        poison = self._poison
        if poison is not None and poison.slot >= 0 and poison.committed_len > 0:
            spoil(self.engine.core.runner, poison.slot)
        results = self._run(work)
        self._observer.saw(work, results)
        return results

    def _run_schedule(self, schedule: Schedule, watched: set[int]) -> tuple[list[Played], Happened]:
        core = self.engine.core
        scheduler = core.scheduler
        scheduler.chunk_len = schedule.chunk_len()
        before = scheduler.num_retractions
        requests = [self._request(i) for i in schedule.cases]
        speculation = core.runner.speculation
        speculation.given = self._own_drafts
        if schedule.speculation is not None:
            rule = schedule.speculation.rule(schedule.seed, speculation)
            speculation.given = rule  # type: ignore[method-assign]
        poison = self._poisoned.request(self.engine) if schedule.is_poisoned else None
        self._poison, self._observer = poison, Observer(poison)
        if poison is not None:
            core.add(poison)
        seen = zip(schedule.cases, requests, strict=True)
        trail = Trail(core, [request for i, request in seen if i in watched])
        with trail.with_ends(), contextlib.closing(self._held(schedule)) as held:
            self._run_steps(schedule, requests, held, trail)
        scheduler.check_integrity()
        scheduler.chunk_len = lambda remaining: remaining
        happened, size = self._observer.happened, scheduler.capacities.block_size
        happened.num_starved = scheduler.num_retractions - before - happened.num_forced
        happened.num_seals = sum((r.committed_len - 1) // size for r in requests)
        pairs = zip(schedule.cases, requests, strict=True)
        return [self._played(i, request, trail) for i, request in pairs], happened

    def _request(self, case: int) -> Request:
        request = self._cases[case].request(self.engine)
        request.replay_ids = tuple(self._expected[case])
        return request

    def _run_steps(
        self, schedule: Schedule, requests: list[Request], held: Held, trail: Trail
    ) -> None:
        """Run until all are finished, each arriving when its time has come."""
        core = self.engine.core
        waiting, at = list(zip(schedule.arrivals, requests, strict=True)), 0
        while waiting or not core.is_idle:
            while waiting and waiting[0][0] <= at:
                core.add(waiting.pop(0)[1])
            if not core.is_idle:
                held.between_steps()
                trail.after_step(self._step(schedule))
            at += 1

    def _step(self, schedule: Schedule) -> list[Request]:
        """A step, with preemptions before it and of what was admitted for it."""
        core, chunk = self.engine.core, schedule.chunk
        happened = self._observer.happened
        if schedule.is_preempted:
            happened.num_forced += self.cover.between_steps(core.scheduler, chunk)
        work = core.plan()
        for item in list(work):
            new = item.request.committed_len == 0
            if schedule.is_preempted and new and self.cover.is_met(item.request, chunk):
                core.scheduler.preempt(item.request)
                happened.num_forced += 1
                work.remove(item)
        return core.advance(work, core.run(work)) if work else []

    def _held(self, schedule: Schedule) -> Held:
        """What a schedule may not use."""
        scheduler = self.engine.core.scheduler
        num_blocks = scheduler.capacities.num_blocks
        if schedule.is_starved:
            cases = [self._poisoned, *(self._cases[i] for i in schedule.cases)]
            longest = max(case.max_len for case in cases)
            num_blocks = -(-longest // scheduler.capacities.block_size)
        window = self.engine.engine_config.window
        return Held(scheduler, num_blocks=num_blocks, width=window)

    def _played(self, case: int, request: Request, trail: Trail) -> Played:
        return Played(
            case,
            Outcome.of(request),
            self._observer.met[request],
            request.params.temperature,
            request.num_retractions,
            meta_info(request, None, self.engine.engine_config.window),
            trail.snapshots.get(request, []),
        )
