"""Which rows the next step computes: host decisions only, no device, no JAX."""

import collections
import dataclasses
from collections.abc import Callable, Iterable

from cache import FreeList
from serve.request import Request, Status


@dataclasses.dataclass(frozen=True)
class Capacities:
    """What the scheduler shares out.

    Attributes:
      num_slots: sequences side by side.
      num_blocks: blocks of keys and values.
      num_state_slots: sealed states, the empty one included.
      block_size: tokens of a block.
      log_rows: rows of a log.
      max_rows: rows of a step.
      prefill_rows: prompt rows of a step.
    """

    num_slots: int
    num_blocks: int
    num_state_slots: int
    block_size: int
    log_rows: int
    max_rows: int
    prefill_rows: int


@dataclasses.dataclass(frozen=True)
class Work:
    """Rows of one request in the next step.

    Attributes:
      request: whose.
      ids: the tokens that become rows.
      is_last: the last row gives a new token.
    """

    request: Request
    ids: list[int]
    is_last: bool


class Scheduler:
    """Admits requests in order, lets every running one advance, fills up with prompts.

    A request owns its blocks for its longest possible length from admission to `release`, so
    nothing that was admitted can run out of memory.
    """

    def __init__(self, capacities: Capacities, chunk_len: Callable[[int], int] | None = None):
        """Start empty.

        Args:
          chunk_len: prompt rows to take when that many are left; default: all. Whatever it says,
            the rows of the step bound it.
        """
        self.capacities = capacities
        self.chunk_len = chunk_len or (lambda remaining: remaining)
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        self.slots = FreeList(0, capacities.num_slots)
        self.blocks = FreeList(0, capacities.num_blocks)
        self.state_slots = FreeList(1, capacities.num_state_slots - 1)
        self.num_retractions = 0

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits."""
        return not self.waiting and not self.running

    def blocks_needed(self, request: Request) -> int:
        """Blocks a request can come to use."""
        return -(-request.max_len // self.capacities.block_size)

    def require_room(self, request: Request) -> None:
        """Raise a ValueError for a request that can never fit."""
        needed = self.blocks_needed(request)
        if needed > self.capacities.num_blocks:
            raise ValueError(
                f"request {request.rid} needs {needed} blocks, the pool has "
                f"{self.capacities.num_blocks}"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
          ValueError: it can never fit.
        """
        self.require_room(request)
        self.waiting.append(request)

    def plan(self) -> list[Work]:
        """The rows of the next step: a row of each generating request, then prompts."""
        self._admit()
        work = []
        room = self.capacities.max_rows
        for request in self.running:
            if request.remaining_prefill == 0 and room > 0 and self._prepare_seal(request, 1) == 1:
                work.append(Work(request, request.next_ids(1), is_last=True))
                room -= 1
        room = min(room, self.capacities.prefill_rows)
        for request in self.running:
            remaining = request.remaining_prefill
            if remaining and room > 0:
                wanted = max(1, min(self.chunk_len(remaining), remaining, room))
                count = self._prepare_seal(request, self._whole_blocks(request, wanted, room))
                if count:
                    last = count == remaining and not request.output_ids
                    work.append(Work(request, request.next_ids(count), is_last=last))
                    room -= count
        return work

    def release(self, request: Request) -> None:
        """Give back everything a request owns; the one way out."""
        if request in self.running:
            self.running.remove(request)
            self.slots.give([request.slot])
            self.blocks.give(request.blocks)
            self.state_slots.give([s for s in (request.sealed_slot, request.next_slot) if s > 0])
            request.slot, request.blocks = -1, []
            request.sealed_slot, request.next_slot = 0, -1
        elif request in self.waiting:
            self.waiting.remove(request)

    def commit(self, item: Work) -> None:
        """Count the rows of a step that was computed, and the seal it stored."""
        request, size = item.request, self.capacities.block_size
        boundary = (request.committed_len + len(item.ids) - 1) // size * size
        request.committed_len += len(item.ids)
        if request.next_slot > 0 and boundary > request.sealed_len:
            self.stored(request, boundary)

    def stored(self, request: Request, boundary: int) -> None:
        """Record that the request's next seal was stored; its old state goes back."""
        if request.sealed_slot > 0:
            self.state_slots.give([request.sealed_slot])
        request.sealed_slot, request.next_slot = request.next_slot, -1
        request.sealed_len = boundary

    def reserve_seal(self, request: Request) -> bool:
        """Own a state slot for the next seal; False if none is free."""
        if request.next_slot < 0:
            if not self.state_slots.num_free:
                return False
            request.next_slot = self.state_slots.take(1)[0]
        return True

    def check_integrity(self, requests: Iterable[Request] = ()) -> None:
        """Raise AssertionError unless owned and free add up to every pool."""
        for pool in (self.slots, self.blocks, self.state_slots):
            pool.check()
        owned = self.running
        assert self.slots.num_taken == len(owned), "slots leak"
        assert self.blocks.num_taken == sum(len(r.blocks) for r in owned), "blocks leak"
        states = sum((r.sealed_slot > 0) + (r.next_slot > 0) for r in owned)
        assert self.state_slots.num_taken == states, "state slots leak"

    def _admit(self) -> None:
        while self.waiting and self.slots.num_free:
            request = self.waiting[0]
            needed = self.blocks_needed(request)
            if needed > self.blocks.num_free:
                return
            self.waiting.popleft()
            request.slot = self.slots.take(1)[0]
            request.num_admissions += 1
            request.blocks = self.blocks.take(needed)
            request.status = Status.RUNNING
            self.running.append(request)

    def _whole_blocks(self, request: Request, count: int, room: int) -> int:
        """Cut a chunk that the step's room cuts anyway down to whole blocks."""
        if count < room or count == request.remaining_prefill:
            return count
        size = self.capacities.block_size
        end = (request.committed_len + count) // size * size
        return end - request.committed_len if end > request.committed_len else count

    def _prepare_seal(self, request: Request, count: int) -> int:
        """Rows the request can take: fewer where no state slot is free for a due seal."""
        size = self.capacities.block_size
        last_row = request.committed_len + count - 1
        if last_row // size * size <= request.sealed_len or self.reserve_seal(request):
            return count
        # The seal waits: the log must hold all rows since the last one, and a later step can fold
        # one block on the fly, so none may begin past the end of the second.
        most = min(self.capacities.log_rows, 2 * size - 1)
        end = min(request.sealed_len + most, request.committed_len + count)
        return max(0, end - request.committed_len)
