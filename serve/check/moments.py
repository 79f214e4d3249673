"""When a schedule takes a request's memory away: every kind of moment between two steps."""

import dataclasses
from collections.abc import Callable

from serve.request import Request
from serve.scheduler import Scheduler


def _generates(request: Request) -> bool:
    return request.remaining_prefill == 0 and len(request.output_ids) > 0


# What a running request looks like at each moment, given the block's size. A request that was
# preempted and has no new token is left alone, as the scheduler does, so that none of these is
# about one.
MOMENTS: dict[str, Callable[[Request, int], bool]] = {
    "admitted": lambda r, _: r.committed_len == 0,
    "in a prompt": lambda r, _: 0 < r.committed_len < r.prompt_len,
    "first token": lambda r, _: _generates(r) and len(r.output_ids) == 1,
    "decoding": lambda r, _: _generates(r) and len(r.output_ids) > 2,
    "before a boundary": lambda r, size: r.committed_len % size == size - 1,
    "at a boundary": lambda r, size: r.committed_len > 0 and r.committed_len % size == 0,
    "after a boundary": lambda r, size: r.committed_len > 1 and r.committed_len % size == 1,
    "seal waits": lambda r, size: r.next_slot < 0 and r.committed_len > r.sealed_len + size,
    "twice": lambda r, _: r.num_retractions > 0 and len(r.output_ids) == r.preempted_at + 1,
}

# Of each pair of chunk and moment, at most: schedules must come to other things, too.
TIMES = 3
# Rows of a log beyond its block before a seal that is held up is let through.
PATIENCE = 8


@dataclasses.dataclass
class Cover:
    """Preempts requests at moments that were not met yet with this way of cutting prompts.

    Attributes:
      block: tokens of a block.
      met: how often each (chunk, moment) was.
    """

    block: int
    met: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)

    def between_steps(self, scheduler: Scheduler, chunk: int) -> int:
        """Preempt whoever is at a new moment; return how many."""
        chosen = [request for request in scheduler.running if self.is_met(request, chunk)]
        for request in chosen:
            scheduler.preempt(request)
        return len(chosen)

    def is_met(self, request: Request, chunk: int) -> bool:
        """Whether the request is at a moment that is new enough; then the rarest counts as met."""
        if request.is_finished or request.is_protected:
            return False
        now = [name for name, is_now in MOMENTS.items() if is_now(request, self.block)]
        count, moment = min(((self.met.get((chunk, n), 0), n) for n in now), default=(TIMES, ""))
        if count < TIMES:
            self.met[chunk, moment] = count + 1
        return count < TIMES

    def missing(self, chunks: tuple[int, ...]) -> list[tuple[int, str]]:
        """Pairs that were never met."""
        return [(c, m) for c in chunks for m in MOMENTS if (c, m) not in self.met]


class Held:
    """Blocks and state slots that are kept from the requests, so that they run out."""

    def __init__(self, scheduler: Scheduler, *, num_blocks: int, width: int):
        """Leave some of the blocks.

        Args:
          num_blocks: how many.
          width: tokens that a step can give a request at most.
        """
        self._scheduler, self._width = scheduler, width
        self._blocks = scheduler.blocks.take(scheduler.blocks.num_free - num_blocks)
        self._states: list[int] = []

    def between_steps(self) -> None:
        """Hold every free state slot, so that seals wait, until one has waited long enough."""
        running, states = self._scheduler.running, self._scheduler.state_slots
        patience = self._scheduler.capacities.block_size + PATIENCE
        # The digest at a request's end needs a slot, whatever waits.
        ends = any(r.stop_ids or self._may_end(r) for r in running)
        waited = any(r.committed_len - r.sealed_len >= patience for r in running)
        if ends or waited:
            states.give(self._states)
            self._states = []
        else:
            self._states += states.take(states.num_free)

    def _may_end(self, request: Request) -> bool:
        return len(request.output_ids) + self._width >= request.params.max_new_tokens

    def close(self) -> None:
        """Hold nothing any more."""
        self._scheduler.blocks.give(self._blocks)
        self._scheduler.state_slots.give(self._states)
        self._blocks, self._states = [], []
