"""Steps of the engine: what the scheduler plans, the runner computes and the requests take in.

Single-threaded: whoever calls `step` owns the core while it lasts. `serve.loop` drives it from a
thread of its own, tests by hand.
"""

import logging
import time
from typing import Any

from serve.adaptive import AdaptiveLength
from serve.errors import StepError
from serve.request import Request, StepResult
from serve.runner import Runner
from serve.scheduler import Scheduler, Work
from serve.step_log import StepLog

_log = logging.getLogger(__name__)


class EngineCore:
    """Requests in flight and the device state they run on."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, adaptive: AdaptiveLength | None = None
    ):
        """Take over an idle scheduler and a runner.

        Args:
          adaptive: chooses how many drafts are verified; all by default.
        """
        self.scheduler, self.runner, self._adaptive = scheduler, runner, adaptive
        self.log = StepLog(scheduler.capacities.num_drafts)
        if adaptive is not None:
            scheduler.draft_len = adaptive.length

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits."""
        return self.scheduler.is_idle

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
          ValueError: it can never fit.
        """
        self.scheduler.add(request)

    def abort(self, request: Request, message: str) -> None:
        """End a request, wherever it is; a finished one stays as it is."""
        request.finish({"type": "abort", "message": message, "status_code": None})
        self.scheduler.release(request)
        self.runner.speculation.forget(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request because of an exception, which its caller will get."""
        request.error = StepError(f"a step failed: {error!r}")
        request.error.__cause__ = error
        self.abort(request, str(request.error))

    def step(self) -> list[Request]:
        """Plan, compute and hand out one step.

        Returns:
          The requests that took part; the finished ones are released.
        """
        work = self.plan()
        return self.advance(work, self.run(work))

    def plan(self) -> list[Work]:
        """The rows of the next step.

        Raises:
          RuntimeError: none although something is unfinished, which is a bug.
        """
        work = self.scheduler.plan()
        if not work:
            raise RuntimeError("no request can advance although some are unfinished")
        now = time.monotonic()
        for item in work:
            item.request.started_s = item.request.started_s or now
        return work

    def run(self, work: list[Work]) -> list[StepResult]:
        """Compute the rows on the device; nothing on the host changes."""
        return self.runner.run(work)

    def advance(self, work: list[Work], results: list[StepResult]) -> list[Request]:
        """Commit the rows and hand out what they gave.

        Returns:
          The requests that took part; the finished ones are released.
        """
        # Every state that a seal replaced goes back before a digest may need a slot for its own.
        for item, result in zip(work, results, strict=True):
            self.scheduler.commit(item, result.num_committed, result.sealed_len)
        self.log.saw(results, self.scheduler)
        for result in results:
            if self._adaptive is not None and result.is_round:
                self._adaptive.saw(result.num_accepted, result.num_drafts)
            self._take(result)
        return [item.request for item in work]

    def forget_counts(self) -> None:
        """Start counting anew, as if nothing had run yet."""
        self.log = StepLog(self.scheduler.capacities.num_drafts)

    def counters(self) -> dict[str, Any]:
        """Sizes and use of the pools, and what was counted since the start."""
        scheduler = self.scheduler
        blocks, states = scheduler.blocks, scheduler.state_slots
        size, total = scheduler.capacities.block_size, scheduler.capacities.num_blocks
        num_states = scheduler.capacities.num_state_slots - 1
        return {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_retractions": scheduler.num_retractions,
            "num_blocks": total,
            "num_used_blocks": blocks.num_taken,
            "num_state_slots": num_states,
            "num_used_state_slots": states.num_taken,
            "max_total_num_tokens": total * size,
            "token_usage": max(blocks.num_taken / total, states.num_taken / num_states),
            "compile_total": self.runner.num_compiles,
            "num_late_compiles": self.runner.num_late_compiles,
            **self.log.counters(),
        }

    def close(self) -> None:
        """Let go of the device memory; no step can follow."""
        del self.runner

    def _take(self, result: StepResult) -> None:
        request = result.request
        try:
            request.take(result)
        except Exception as error:
            # What one request's own text or stop rules do must not harm the others.
            _log.exception("request %s failed", request.rid)
            self.fail(request, error)
            return
        if request.is_finished:
            if request.return_state_digest:
                request.state_digests = self._digests(request)
            self.scheduler.release(request)
            self.runner.speculation.forget(request)

    def _digests(self, request: Request) -> dict[str, str]:
        depth, size = request.committed_len, self.scheduler.capacities.block_size
        if depth // size * size > request.sealed_len and not self.scheduler.reserve_seal(request):
            raise RuntimeError("no state slot is free for the seal of a digest")
        return self.runner.state_digests(request, depth)
