"""What the engine has generated lately and in all: the decode log line, and the totals."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from serve.request import SpecCounts, StepResult
from serve.scheduler import Scheduler

_log = logging.getLogger(__name__)

# Decode steps between two lines, as in SGLang.
DECODE_LOG_INTERVAL = 40


class StepLog:
    """Counts the steps of an engine.

    Attributes:
      spec: what became of all drafts since the start.
      num_generated: tokens since the start.
    """

    def __init__(self, num_drafts: int, interval: int = DECODE_LOG_INTERVAL):
        """Start with nothing counted.

        Args:
          num_drafts: of a full window; 0 without speculation.
          interval: decode steps between two lines.
        """
        self._num_drafts, self._interval = num_drafts, interval
        self.spec, self.num_generated = SpecCounts(), 0
        self._restart()

    def _restart(self) -> None:
        self._steps = self._tokens = self._rounds = self._round_tokens = self._accepted = 0
        self._since_s = time.monotonic()

    def saw(self, results: Sequence[StepResult], scheduler: Scheduler) -> None:
        """Count a step; every so many decode steps, write a line."""
        rounds = [result for result in results if result.is_round]
        self.num_generated += sum(len(result.tokens) for result in results)
        self._tokens += sum(len(result.tokens) for result in results)
        for result in rounds:
            self._rounds += 1
            self._round_tokens += len(result.tokens)
            self._accepted += result.num_accepted
            self.spec.saw(result)
        self._steps += bool(rounds)
        if self._steps >= self._interval:
            _log.info("%s", self.line(scheduler))
            self._restart()

    def line(self, scheduler: Scheduler) -> str:
        """The line, in the form that readers of SGLang's log know."""
        blocks, states = scheduler.blocks, scheduler.state_slots
        num_blocks = scheduler.capacities.num_blocks
        num_states = scheduler.capacities.num_state_slots - 1
        spent_s = max(time.monotonic() - self._since_s, 1e-9)
        parts = [
            f"Decode batch, #running-req: {len(scheduler.running)}",
            f"#full token: {blocks.num_taken * scheduler.capacities.block_size}",
            f"full token usage: {blocks.num_taken / num_blocks:.2f}",
            f"mamba num: {states.num_taken}",
            f"mamba usage: {states.num_taken / num_states:.2f}",
        ]
        if self._num_drafts:
            rounds = max(self._rounds, 1)
            parts += [
                f"accept len: {self._round_tokens / rounds:.2f}",
                f"accept rate: {self._accepted / (rounds * self._num_drafts):.2f}",
            ]
        return ", ".join(
            [
                *parts,
                "cuda graph: False",
                f"gen throughput (token/s): {self._tokens / spent_s:.2f}",
                f"#queue-req: {len(scheduler.waiting)}",
            ]
        )

    def counters(self) -> dict[str, Any]:
        """Totals since the start, those of drafts only with speculation."""
        totals: dict[str, Any] = {"num_generated_tokens": self.num_generated}
        if not self._num_drafts:
            return totals
        spec = self.spec
        rounds = spec.num_rounds
        return totals | {
            "spec_verify_calls_total": rounds,
            "spec_num_verified_drafts": spec.num_verified,
            "spec_num_correct_drafts": spec.num_accepted,
            "avg_spec_accept_length": 1 + spec.num_accepted / rounds if rounds else 0.0,
            "spec_correct_drafts_histogram": list(spec.histogram),
            "spec_verified_by_position": list(spec.verified_at),
            "spec_accepted_by_position": list(spec.accepted_at),
        }
