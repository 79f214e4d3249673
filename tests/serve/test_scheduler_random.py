"""Random runs of the scheduler beside an independent model."""

import collections
import dataclasses

import numpy as np

from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler import Capacities, Scheduler, Work
from tests.serve.scheduling import BLOCK, LOG_ROWS, stored_boundary, take


@dataclasses.dataclass
class Expected:
    """What the model knows of a request: its whole text, and how far the device has come.

    Attributes:
      tokens: prompt and every token it will generate.
      num_known: how many of them are the prompt's or have been generated.
      rows: rows computed.
      sealed: boundary of the last seal stored.
    """

    tokens: list[int]
    num_known: int
    rows: int = 0
    sealed: int = 0


class Run:
    """Drives a scheduler with random arrivals, chunks and aborts, checking every step.

    The model is its own bookkeeping: texts as flat lists, no pools.
    """

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        slots = int(self.rng.integers(1, 6))
        self.takes_all = bool(self.rng.integers(0, 2))
        self.capacities = Capacities(
            num_slots=slots,
            num_blocks=int(self.rng.integers(4, 24)),
            # The empty state, one for each sequence, one spare: seals wait for one another.
            num_state_slots=1 + slots + 1,
            block_size=BLOCK,
            log_rows=LOG_ROWS,
            max_rows=int(self.rng.integers(slots, 200)),
            prefill_rows=int(self.rng.integers(1, 200)),
            num_drafts=int(self.rng.choice([0, 0, 1, 3, 16])),
        )
        self.scheduler = Scheduler(self.capacities, self._chunk)
        self.expected: dict[str, Expected] = {}
        self.arrived: list[str] = []
        self.admitted: list[str] = []
        self.finished: dict[str, Request] = {}
        self.num_waits = self.num_preempted = self.num_forced = self.num_accepted = 0

    def _chunk(self, remaining: int) -> int:
        return remaining if self.takes_all else int(self.rng.integers(1, remaining + 1))

    def arrive(self) -> None:
        """Queue a request that fits."""
        name = str(len(self.expected))
        most = self.capacities.num_blocks * BLOCK
        prompt_len = int(self.rng.integers(1, most + 1))
        if self.rng.random() < 0.7:
            # Several come to their second boundary together, so that seals wait.
            prompt_len = 126
        new = int(self.rng.integers(1, min(150, most - prompt_len + 1) + 1))
        tokens = self.rng.integers(0, 1 << 20, prompt_len + new).tolist()
        self.expected[name] = Expected(tokens, prompt_len)
        self.arrived.append(name)
        one = Request(name, tokens[:prompt_len], SamplingParams(max_new_tokens=new), 0, frozenset())
        self.scheduler.add(one)

    def step(self) -> None:
        """Plan, check the plan, pretend to compute it."""
        before = [(r, r.is_protected, len(r.blocks)) for r in self.scheduler.running]
        work = self.scheduler.plan()
        self._check_preempted(before)
        self.admitted += [r.rid for r in self.scheduler.running if r.rid not in self.admitted]
        assert self.admitted == [n for n in self.arrived if n in self.admitted], "overtaken"
        self._check_ownership()
        assert len({item.request.rid for item in work}) == len(work)
        assert sum(item.num_rows for item in work) <= self.capacities.max_rows
        assert work or not self.scheduler.running
        prompt_rows = 0
        for item in work:
            model = self.expected[item.request.rid]
            end = model.rows + len(item.ids)
            assert item.ids == model.tokens[model.rows : end]
            assert item.is_last == (end == model.num_known)
            prompt_rows += len(item.ids) if end < model.num_known or len(item.ids) > 1 else 0
            assert item.max_drafts == 0 or model.num_known + item.max_drafts < len(model.tokens)
            end += item.max_drafts
            assert len(item.request.blocks) * BLOCK >= end, "a row without a block"
            self._check_log(item, model, end)
        assert prompt_rows <= self.capacities.prefill_rows
        for item in work:
            self._advance(item)
        self.scheduler.check_integrity()

    def _check_ownership(self) -> None:
        running = self.scheduler.running
        for own in (
            [r.slot for r in running],
            [b for r in running for b in r.blocks],
            [s for r in running for s in (r.sealed_slot, r.next_slot) if s > 0],
        ):
            assert len(set(own)) == len(own), "two requests own the same"
        assert sum(len(r.blocks) for r in running) <= self.capacities.num_blocks
        for one in running:
            # None is owned ahead of the rows, but by those that came back.
            known = self.expected[one.rid].num_known + self.capacities.num_drafts
            assert len(one.blocks) <= -(-known // BLOCK)
            assert one.sealed_slot > 0 or one.sealed_len == 0, "state 0 is the empty sequence's"

    def _check_preempted(self, before: list[tuple[Request, bool, int]]) -> None:
        """The youngest made way, for want of a block, and wait at the head of the queue."""
        scheduler = self.scheduler
        gone = [entry for entry in before if entry[0].slot < 0]
        head = [one for one, _ in zip(scheduler.waiting, gone, strict=False)]
        assert head == [one for one, _, _ in gone], "not at the head, oldest first"
        for one, was_protected, num_blocks in gone:
            assert not was_protected, "preempted again without a token"
            assert scheduler.blocks.num_free <= num_blocks, "there was a block"
            self._forget(one)
        stayed = [one for one, was_protected, _ in before if one.slot >= 0 and not was_protected]
        if gone:
            assert all(one.arrival < gone[0][0].arrival for one in stayed), "an older one made way"
        self.num_preempted += len(gone)

    def _forget(self, one: Request) -> None:
        """A preempted request starts from its first row."""
        model = self.expected[one.rid]
        model.rows = model.sealed = 0
        assert (one.slot, one.blocks, one.sealed_slot, one.next_slot) == (-1, [], 0, -1)
        assert [*one.prompt_ids, *one.output_ids] == model.tokens[: model.num_known]

    def force(self) -> None:
        """Preempt a request although there are blocks."""
        some = [one for one in self.scheduler.running if not one.is_protected]
        if some:
            one = some[int(self.rng.integers(0, len(some)))]
            self.scheduler.preempt(one)
            self._forget(one)
            self.num_forced += 1

    def _check_log(self, item: Work, model: Expected, end: int) -> None:
        """A row is kept until the block it is in has been folded into a stored seal."""
        if item.request.next_slot < 0:
            self.num_waits += end - model.sealed > BLOCK
            assert end - model.sealed <= LOG_ROWS, "a row that is still needed is overwritten"
            assert (end - 1) // BLOCK * BLOCK - model.sealed <= BLOCK, "two blocks to fold"

    def _advance(self, item: Work) -> None:
        one, model = item.request, self.expected[item.request.rid]
        verified = int(self.rng.integers(0, item.max_drafts + 1))
        accepted = int(self.rng.integers(0, verified + 1))
        certain, written = model.rows + len(item.ids), one.next_slot
        boundary = min(certain // BLOCK, (certain + verified - 1) // BLOCK) * BLOCK
        stored = written > 0 and boundary > model.sealed
        assert stored or written <= 0 or item.max_drafts, "a slot for a seal that is not due"
        model.rows = certain + accepted
        model.sealed = boundary if stored else model.sealed
        self.scheduler.commit(item, len(item.ids) + accepted, model.sealed)
        self.num_accepted += accepted
        assert (one.committed_len, one.sealed_len) == (model.rows, model.sealed)
        if stored:
            assert one.sealed_slot == written, "the log goes on from a state that is not its own"
        if item.is_last:
            for token in model.tokens[certain : certain + accepted + 1]:
                take(one, token)
                model.num_known += 1
        if one.is_finished:
            self._end(one)

    def _end(self, one: Request) -> None:
        self.scheduler.release(one)
        self.finished[one.rid] = one

    def abort(self) -> None:
        """End a request, wherever it is."""
        some = [*self.scheduler.waiting, *self.scheduler.running]
        if some:
            one = some[int(self.rng.integers(0, len(some)))]
            one.finish({"type": "abort", "message": "", "status_code": None})
            self._end(one)
            if one.rid not in self.admitted:
                self.arrived.remove(one.rid)


def finish_run(driver: Run) -> None:
    """Random operations, then steps until all is done; check what every request got."""
    for _ in range(200):
        draw = driver.rng.random()
        if draw < 0.04:
            for _ in range(int(driver.rng.integers(1, 9))):
                driver.arrive()
        elif draw < 0.06:
            driver.abort()
        elif draw < 0.09:
            driver.force()
        else:
            driver.step()
    while not driver.scheduler.is_idle:
        driver.step()
    pools = (driver.scheduler.slots, driver.scheduler.blocks, driver.scheduler.state_slots)
    assert [pool.num_taken for pool in pools] == [0, 0, 0]
    for name, one in driver.finished.items():
        if one.finish_reason == {"type": "length", "length": one.params.max_new_tokens}:
            assert [*one.prompt_ids, *one.output_ids] == driver.expected[name].tokens
        else:
            assert one.finish_reason and one.finish_reason["type"] == "abort"


def test_random_runs_beside_a_model():
    drivers = [Run(seed) for seed in range(40)]
    for driver in drivers:
        finish_run(driver)
    reasons = [(r.finish_reason or {})["type"] for d in drivers for r in d.finished.values()]
    met = {kind: reasons.count(kind) for kind in ("abort", "length")}
    for name in ("num_waits", "num_preempted", "num_forced", "num_accepted"):
        met[name] = sum(getattr(driver, name) for driver in drivers)
    assert min(met.values()) > 20, met


def token_after(tokens: list[int]) -> int:
    """What a model that sees all tokens might say: another token for every text."""
    return (31 * tokens[-1] + 7 * len(tokens) + tokens[0]) % 1009


class FakeRunner:
    """Keeps rows by block and computes tokens from them, as a device would.

    A row that was lost, overwritten or put into another's block changes what is generated.
    """

    def __init__(self, num_blocks: int):
        self.pages = [[-1] * BLOCK for _ in range(num_blocks)]

    def run(self, scheduler: Scheduler, work: list[Work]) -> None:
        """Write the rows, read back the whole text, hand out the next token."""
        for item in work:
            one = item.request
            for position, token in enumerate(item.ids, one.committed_len):
                self.pages[one.blocks[position // BLOCK]][position % BLOCK] = token
            scheduler.commit(item, len(item.ids), stored_boundary(item))
            if item.is_last:
                pages = [token for block in one.blocks for token in self.pages[block]]
                take(one, token_after(pages[: one.committed_len]))
            if one.is_finished:
                scheduler.release(one)


def test_thousands_of_requests_through_a_pool_that_is_too_small():
    rng = np.random.default_rng(3)
    slots, num_blocks = 8, 14
    scheduler = Scheduler(
        Capacities(
            num_slots=slots,
            num_blocks=num_blocks,
            num_state_slots=1 + slots + 1,
            block_size=BLOCK,
            log_rows=LOG_ROWS,
            max_rows=208,
            prefill_rows=200,
        )
    )
    runner, requests = FakeRunner(num_blocks), []
    for index in range(1000):
        prompt = rng.integers(0, 1009, int(rng.integers(1, 200))).tolist()
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 200)))
        requests.append(Request(str(index), prompt, params, 0, frozenset()))
    waiting = collections.deque(requests)
    while waiting or not scheduler.is_idle:
        while waiting and len(scheduler.waiting) < 4:
            scheduler.add(waiting.popleft())
        work = scheduler.plan()
        assert work, "nothing gets on"
        runner.run(scheduler, work)
        scheduler.check_integrity()
    assert scheduler.num_retractions > 300
    assert scheduler.num_retractions == sum(one.num_retractions for one in requests)
    for one in requests:
        text = list(one.prompt_ids)
        for token in one.output_ids:
            assert token == token_after(text)
            text.append(token)
        assert len(one.output_ids) == one.params.max_new_tokens
