"""Which rows the next step computes: host decisions only, no device, no JAX."""

import bisect
import collections
import dataclasses
from collections.abc import Callable

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
      num_drafts: drafts to verify after the row of a generating request, at most.
    """

    num_slots: int
    num_blocks: int
    num_state_slots: int
    block_size: int
    log_rows: int
    max_rows: int
    prefill_rows: int
    num_drafts: int = 0


@dataclasses.dataclass(frozen=True)
class Work:
    """Rows of one request in the next step.

    Attributes:
      request: whose.
      ids: the tokens that become rows.
      is_last: the last row gives a new token.
      max_drafts: rows of drafts that may follow; their blocks are there.
    """

    request: Request
    ids: list[int]
    is_last: bool
    max_drafts: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the step that it can take."""
        return len(self.ids) + self.max_drafts


class Scheduler:
    """Admits requests in order, lets every running one advance, fills up with prompts.

    Blocks are taken as rows come. Where a row finds none, the youngest running request gives up
    everything it owns on the device and waits at the head of the queue, to compute its rows anew
    later: younger requests make way for older ones, never the other way round, so the oldest one
    always gets on. A resumed request is left alone until it made a token, and owns the blocks for
    that from the start, so it gets on as well. What can fit alone therefore ends.
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
        # Oldest first.
        self.running: list[Request] = []
        self.slots = FreeList(0, capacities.num_slots)
        self.blocks = FreeList(0, capacities.num_blocks)
        self.state_slots = FreeList(1, capacities.num_state_slots - 1)
        self.num_retractions = 0
        # Drafts at most for each of so many generating requests.
        self.draft_len: Callable[[int], int] = lambda batch_size: capacities.num_drafts
        self._num_arrived = 0
        # The step being planned, and the rows that it can still take.
        self._work: dict[Request, Work] = {}
        self._room = 0

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits."""
        return not self.waiting and not self.running

    def require_room(self, request: Request) -> None:
        """Raise a ValueError for a request that can never fit."""
        needed = self._blocks_for(request.max_len)
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
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(request)

    def plan(self) -> list[Work]:
        """The rows of the next step: a row of each generating request, what they may draft, then
        prompts."""
        self._work, self._room = {}, self.capacities.max_rows
        num_retractions = self.num_retractions
        for request in list(self.running):
            if request.slot >= 0 and request.remaining_prefill == 0 and self._room > 0:
                self._plan_rows(request, 1, is_last=True)
        generating = [r for r in self.running if r in self._work]
        most = min(self.draft_len(len(generating)), self.capacities.num_drafts)
        for request in generating:
            self._plan_drafts(request, most)
        # Who had to make way would come back at once and have to make way again.
        if self.num_retractions == num_retractions:
            self._admit()
        left = self.capacities.prefill_rows
        for request in list(self.running):
            remaining = request.remaining_prefill
            room = min(left, self._room)
            if request.slot >= 0 and remaining and room > 0:
                wanted = max(1, min(self.chunk_len(remaining), remaining, room))
                count = self._whole_blocks(request, wanted, room)
                left -= self._plan_rows(request, count, is_last=not request.output_ids)
        return list(self._work.values())

    def preempt(self, request: Request) -> None:
        """Take back everything a running request owns; it waits at the head of the queue.

        It keeps its tokens, its seed and whatever else the host knows of it. Called between steps,
        or by `plan`.
        """
        self._give_back(request)
        if request in self._work:
            self._room += self._work.pop(request).num_rows
        request.committed_len = request.sealed_len = 0
        request.num_retractions += 1
        request.preempted_at = len(request.output_ids)
        request.status = Status.WAITING
        self.waiting.appendleft(request)
        self.num_retractions += 1

    def release(self, request: Request) -> None:
        """Give back everything a request owns; the one way out."""
        if request in self.running:
            self._give_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def commit(self, item: Work, num_committed: int, sealed_len: int) -> None:
        """Count the rows that a step made final, and the seal it stored, as the device says."""
        request = item.request
        request.committed_len += num_committed
        if sealed_len > request.sealed_len:
            self.stored(request, sealed_len)

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

    def check_integrity(self) -> None:
        """Raise AssertionError unless owned and free add up to every pool."""
        for pool in (self.slots, self.blocks, self.state_slots):
            pool.check()
        owned = self.running
        assert self.slots.num_taken == len(owned), "slots leak"
        assert self.blocks.num_taken == sum(len(r.blocks) for r in owned), "blocks leak"
        states = sum((r.sealed_slot > 0) + (r.next_slot > 0) for r in owned)
        assert self.state_slots.num_taken == states, "state slots leak"
        for request in owned:
            held = len(request.blocks) * self.capacities.block_size
            assert request.committed_len <= held, "rows without a block"
        for request in self.waiting:
            assert request.slot < 0 and not request.blocks, "a waiting request owns something"

    def _blocks_for(self, num_rows: int) -> int:
        return -(-num_rows // self.capacities.block_size)

    def _admit(self) -> None:
        """Start waiting requests in order while there are blocks for all their rows so far."""
        while self.waiting and self.slots.num_free:
            request = self.waiting[0]
            # The row of the newest token comes after the prefill and gives the next one.
            needed = self._blocks_for(request.prefill_len + bool(request.output_ids))
            if needed > self.blocks.num_free - self._promised_blocks():
                return
            self.waiting.popleft()
            request.slot = self.slots.take(1)[0]
            request.num_admissions += 1
            if request.is_protected:
                request.blocks = self.blocks.take(needed)
            request.status = Status.RUNNING
            bisect.insort(self.running, request, key=lambda r: r.arrival)

    def _promised_blocks(self) -> int:
        """Blocks that the prompts being computed will come to take."""
        return sum(
            max(self._blocks_for(r.prefill_len) - len(r.blocks), 0)
            for r in self.running
            if r.remaining_prefill
        )

    def _plan_rows(self, request: Request, count: int, *, is_last: bool) -> int:
        """Plan up to `count` rows of a request; return how many.

        Args:
          is_last: the row after which nothing is left to prefill gives a token.
        """
        count = self._take_blocks(request, count)
        count = self._prepare_seal(request, count) if count else 0
        if count:
            last = is_last and count >= request.remaining_prefill
            self._work[request] = Work(request, request.next_ids(count), is_last=last)
            self._room -= count
        return count

    def _plan_drafts(self, request: Request, most: int) -> None:
        """Let drafts follow the row of a generating request, as far as nobody has to make way."""
        item, size = self._work[request], self.capacities.block_size
        # The last token of an output never becomes a row.
        left = request.params.max_new_tokens - len(request.output_ids) - 1
        count = min(most, left, self._room)
        start = request.committed_len + 1
        while len(request.blocks) * size < start + count and self.blocks.num_free:
            request.blocks += self.blocks.take(1)
        end = min(start + count, len(request.blocks) * size, self._log_end(request))
        if end > start:
            if self._seal_after(start, end) > request.sealed_len:
                # If no slot is free the seal waits, and the log has room for that.
                self.reserve_seal(request)
            self._work[request] = dataclasses.replace(item, max_drafts=end - start)
            self._room -= end - start

    def _seal_after(self, start: int, end: int) -> int:
        """The boundary that a step stores whose rows are certain up to `start` and end at `end`."""
        size = self.capacities.block_size
        return min(start // size, (end - 1) // size) * size

    def _log_end(self, request: Request) -> int:
        """Where rows end while no seal is stored.

        The log must hold all rows since the last seal, and a later step can fold one block on the
        fly, so none may begin past the end of the second.
        """
        size = self.capacities.block_size
        return request.sealed_len + min(self.capacities.log_rows, 2 * size - 1)

    def _take_blocks(self, request: Request, count: int) -> int:
        """Own blocks for the next rows, preempting younger requests; return for how many."""
        size = self.capacities.block_size
        end = request.committed_len + count
        while len(request.blocks) * size < end:
            while not self.blocks.num_free and self._preempt_younger(request):
                pass
            if not self.blocks.num_free:
                break
            request.blocks += self.blocks.take(1)
        return min(end, len(request.blocks) * size) - request.committed_len

    def _preempt_younger(self, request: Request) -> bool:
        """Preempt the youngest request that is younger; False if there is none."""
        for other in reversed(self.running):
            if other is request:
                return False
            if not other.is_protected:
                self.preempt(other)
                return True
        return False

    def _give_back(self, request: Request) -> None:
        self.running.remove(request)
        self.slots.give([request.slot])
        self.blocks.give(request.blocks)
        self.state_slots.give([s for s in (request.sealed_slot, request.next_slot) if s > 0])
        request.slot, request.blocks = -1, []
        request.sealed_slot, request.next_slot = 0, -1

    def _whole_blocks(self, request: Request, count: int, room: int) -> int:
        """Cut a chunk that the step's room cuts anyway down to whole blocks."""
        if count < room or count == request.remaining_prefill:
            return count
        size = self.capacities.block_size
        end = (request.committed_len + count) // size * size
        return end - request.committed_len if end > request.committed_len else count

    def _prepare_seal(self, request: Request, count: int) -> int:
        """Rows the request can take: fewer where no state slot is free for a due seal."""
        end = request.committed_len + count
        if self._seal_after(end, end) <= request.sealed_len or self.reserve_seal(request):
            return count
        return max(0, min(self._log_end(request), end) - request.committed_len)
