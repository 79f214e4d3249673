"""Host decisions, without a device: named cases, and random runs beside an independent model."""

import dataclasses

import numpy as np
import pytest

from serve.request import Request, Status, StepResult
from serve.sampling_params import SamplingParams
from serve.scheduler import Capacities, Scheduler, Work

BLOCK = 64
LOG_ROWS = 80
SMALL = Capacities(
    num_slots=3,
    num_blocks=8,
    num_state_slots=5,
    block_size=BLOCK,
    log_rows=LOG_ROWS,
    max_rows=144,
    prefill_rows=128,
)


def request(name: str, prompt_len: int, max_new_tokens: int = 4) -> Request:
    """A request whose tokens tell whose they are."""
    return Request(
        rid=name,
        prompt_ids=[1000 * ord(name[0]) + i for i in range(prompt_len)],
        params=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        seed=0,
        eos_ids=frozenset(),
    )


def take(one: Request, token: int) -> None:
    """Hand a request a token."""
    one.take(StepResult(one, tokens=[token]))


def run(scheduler: Scheduler, work: list[Work]) -> None:
    """Do what the engine does after a step, each new token being the number of tokens so far."""
    for item in work:
        one = item.request
        scheduler.commit(item)
        if item.is_last:
            take(one, one.prompt_len + len(one.output_ids))
        if one.is_finished:
            scheduler.release(one)


def rows(work: list[Work]) -> dict[str, int]:
    """Rows of each request in a step."""
    return {item.request.rid: len(item.ids) for item in work}


# Admission.


def test_admits_in_order_while_slots_last():
    scheduler = Scheduler(SMALL)
    waiting = [request(name, 10) for name in "abcd"]
    for one in waiting:
        scheduler.add(one)
    scheduler.plan()
    assert [one.rid for one in scheduler.running] == ["a", "b", "c"]
    assert [one.slot for one in scheduler.running] == [0, 1, 2]
    assert [one.status for one in waiting] == [Status.RUNNING] * 3 + [Status.WAITING]
    scheduler.release(waiting[1])
    scheduler.plan()
    assert waiting[3].slot == 1


def test_a_long_request_at_the_head_is_not_overtaken():
    scheduler = Scheduler(SMALL)
    large, larger, small = request("a", 5 * BLOCK, 1), request("b", 4 * BLOCK, 1), request("c", 1)
    for one in (large, larger, small):
        scheduler.add(one)
    scheduler.plan()
    assert scheduler.running == [large]
    scheduler.release(large)
    scheduler.plan()
    assert scheduler.running == [larger, small]


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "blocks"),
    # The last token that is generated never becomes a row.
    [(1, 0, 1), (64, 1, 1), (64, 2, 2), (65, 0, 2), (60, 5, 1), (60, 6, 2), (512, 1, 8)],
)
def test_owns_blocks_for_the_longest_it_can_get(prompt_len, max_new_tokens, blocks):
    scheduler = Scheduler(SMALL)
    one = request("a", prompt_len, max_new_tokens)
    scheduler.add(one)
    scheduler.plan()
    assert len(one.blocks) == blocks


def test_refuses_what_can_never_fit():
    scheduler = Scheduler(SMALL)
    with pytest.raises(ValueError, match="request a needs 9 blocks, the pool has 8"):
        scheduler.add(request("a", 512, 2))
    assert scheduler.is_idle


# What a step computes.


def test_generating_requests_come_before_prompts():
    scheduler = Scheduler(SMALL)
    scheduler.add(request("a", 5))
    run(scheduler, scheduler.plan())
    scheduler.add(request("b", 300, 1))
    work = scheduler.plan()
    assert rows(work) == {"a": 1, "b": 128}
    assert [item.is_last for item in work] == [True, False]


def test_rows_are_bounded_by_the_step_and_by_the_prompts_share():
    scheduler = Scheduler(dataclasses.replace(SMALL, max_rows=32, prefill_rows=128))
    for name in "abc":
        scheduler.add(request(name, 40))
    assert sum(rows(scheduler.plan()).values()) == 32
    scheduler = Scheduler(dataclasses.replace(SMALL, prefill_rows=48))
    for name in "abc":
        scheduler.add(request(name, 40))
    assert rows(scheduler.plan()) == {"a": 40, "b": 8}


def test_a_chunk_that_the_room_cuts_ends_on_a_block():
    scheduler = Scheduler(dataclasses.replace(SMALL, prefill_rows=100))
    one = request("a", 200)
    scheduler.add(one)
    sizes = []
    while one.remaining_prefill:
        work = scheduler.plan()
        sizes.append(len(work[0].ids))
        run(scheduler, work)
    assert sizes == [64, 64, 72]


def test_a_chunk_too_small_for_a_block_is_taken_all_the_same():
    scheduler = Scheduler(dataclasses.replace(SMALL, prefill_rows=40))
    one = request("a", 100)
    scheduler.add(one)
    sizes = []
    while one.remaining_prefill:
        work = scheduler.plan()
        sizes.append(len(work[0].ids))
        run(scheduler, work)
    assert sizes == [40, 24, 36]


@pytest.mark.parametrize("asked", [-5, 0, 1, 17, 1000])
def test_the_chunk_rule_is_bounded_by_what_there_is(asked):
    scheduler = Scheduler(SMALL, chunk_len=lambda remaining: asked)
    one = request("a", 50)
    scheduler.add(one)
    assert rows(scheduler.plan()) == {"a": min(max(asked, 1), 50)}


def test_the_next_rows_are_the_prompt_then_the_output():
    scheduler = Scheduler(SMALL, chunk_len=lambda remaining: 3)
    one = request("a", 5, 4)
    scheduler.add(one)
    fed = []
    while not one.is_finished:
        work = scheduler.plan()
        fed += work[0].ids
        run(scheduler, work)
    assert fed == [*one.prompt_ids, *one.output_ids[:-1]]
    assert one.finish_reason == {"type": "length", "length": 4}


# Seals.


def without_spares(num_running: int) -> tuple[Scheduler, list[Request], list[int]]:
    """A scheduler whose state slots somebody else holds; the requests stand at row 63."""
    scheduler = Scheduler(SMALL)
    taken = scheduler.state_slots.take(scheduler.state_slots.num_free)
    requests = [request(name, 63, 70) for name in "abc"[:num_running]]
    for one in requests:
        scheduler.add(one)
    while any(one.committed_len < 63 for one in requests):
        run(scheduler, scheduler.plan())
    return scheduler, requests, taken


def test_a_seal_waits_for_a_slot_until_the_log_is_full():
    scheduler, (one,), taken = without_spares(1)
    for _ in range(LOG_ROWS - 63):
        work = scheduler.plan()
        assert rows(work) == {"a": 1}
        run(scheduler, work)
    assert (one.committed_len, one.sealed_len, one.next_slot) == (LOG_ROWS, 0, -1)
    assert scheduler.plan() == []
    scheduler.state_slots.give(taken[:1])
    work = scheduler.plan()
    assert rows(work) == {"a": 1} and one.next_slot == taken[0]
    run(scheduler, work)
    assert (one.sealed_len, one.sealed_slot, one.next_slot) == (BLOCK, taken[0], -1)


def test_a_prompt_goes_as_far_as_the_log_while_its_seal_waits():
    scheduler = Scheduler(SMALL)
    taken = scheduler.state_slots.take(scheduler.state_slots.num_free)
    one = request("a", 128, 1)
    scheduler.add(one)
    work = scheduler.plan()
    assert rows(work) == {"a": LOG_ROWS} and not work[0].is_last
    run(scheduler, work)
    assert scheduler.plan() == []
    scheduler.state_slots.give(taken)
    work = scheduler.plan()
    assert rows(work) == {"a": 128 - LOG_ROWS} and work[0].is_last


def test_a_waiting_seal_never_leaves_two_blocks_to_fold():
    # A log of whole tiles holds two blocks of 16; a step that began at row 32 would fold both.
    scheduler = Scheduler(dataclasses.replace(SMALL, block_size=16, log_rows=32))
    taken = scheduler.state_slots.take(scheduler.state_slots.num_free)
    scheduler.add(request("a", 40, 1))
    work = scheduler.plan()
    assert rows(work) == {"a": 31}
    run(scheduler, work)
    assert scheduler.plan() == []
    scheduler.state_slots.give(taken)
    assert rows(scheduler.plan()) == {"a": 9}


def test_one_waiting_seal_does_not_hold_up_the_others():
    scheduler, requests, taken = without_spares(2)
    scheduler.state_slots.give(taken[:1])
    for _ in range(LOG_ROWS - 63):
        run(scheduler, scheduler.plan())
    assert sorted(one.sealed_len for one in requests) == [0, BLOCK]
    assert rows(scheduler.plan()) == {requests[0].rid: 1}


def test_the_state_before_a_seal_goes_back():
    scheduler = Scheduler(SMALL)
    one = request("a", 300, 1)
    scheduler.add(one)
    owned = []
    while not one.is_finished:
        run(scheduler, scheduler.plan())
        owned.append(scheduler.state_slots.num_taken)
    assert owned == [1, 1, 0]


def test_reserving_a_seal_twice_takes_one_slot():
    scheduler = Scheduler(SMALL)
    one = request("a", 10)
    scheduler.add(one)
    scheduler.plan()
    assert scheduler.reserve_seal(one) and scheduler.reserve_seal(one)
    assert scheduler.state_slots.num_taken == 1
    scheduler.check_integrity()


# The way out.


def test_release_gives_everything_back_once():
    scheduler = Scheduler(SMALL)
    one = request("a", 200)
    scheduler.add(one)
    run(scheduler, scheduler.plan())
    scheduler.reserve_seal(one)
    scheduler.release(one)
    scheduler.release(one)
    assert scheduler.is_idle
    pools = (scheduler.slots, scheduler.blocks, scheduler.state_slots)
    assert [pool.num_taken for pool in pools] == [0, 0, 0]
    assert (one.slot, one.blocks, one.sealed_slot, one.next_slot) == (-1, [], 0, -1)
    scheduler.check_integrity()


def test_release_of_a_waiting_and_of_an_unknown_request():
    scheduler = Scheduler(SMALL)
    one = request("a", 10)
    scheduler.add(one)
    scheduler.release(request("b", 10))
    assert list(scheduler.waiting) == [one]
    scheduler.release(one)
    assert scheduler.is_idle


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s, r: s.slots.take(1), "slots leak"),
        (lambda s, r: s.blocks.take(1), "blocks leak"),
        (lambda s, r: s.state_slots.take(1), "state slots leak"),
        (lambda s, r: r.blocks.pop(), "blocks leak"),
        (lambda s, r: s.running.remove(r), "leak"),
    ],
)
def test_integrity_finds_what_is_wrong(spoil, message):
    scheduler = Scheduler(SMALL)
    one = request("a", 100)
    scheduler.add(one)
    run(scheduler, scheduler.plan())
    scheduler.check_integrity()
    spoil(scheduler, one)
    with pytest.raises(AssertionError, match=message):
        scheduler.check_integrity()


# Random runs.


@dataclasses.dataclass
class Expected:
    """What the model knows of a request: its whole text, and how far the device has come.

    Attributes:
      tokens: prompt and every token it will generate.
      prompt_len: how many of them are the prompt's.
      rows: rows computed.
      sealed: boundary of the last seal stored.
    """

    tokens: list[int]
    prompt_len: int
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
            num_blocks=int(self.rng.integers(6, 40)),
            # The empty state, one for each sequence, one spare: seals wait for one another.
            num_state_slots=1 + slots + 1,
            block_size=BLOCK,
            log_rows=LOG_ROWS,
            max_rows=int(self.rng.integers(slots, 200)),
            prefill_rows=int(self.rng.integers(1, 200)),
        )
        self.scheduler = Scheduler(self.capacities, self._chunk)
        self.expected: dict[str, Expected] = {}
        self.arrived: list[str] = []
        self.admitted: list[str] = []
        self.finished: dict[str, Request] = {}
        self.num_waits = 0

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
        work = self.scheduler.plan()
        self.admitted += [r.rid for r in self.scheduler.running if r.rid not in self.admitted]
        assert self.admitted == [n for n in self.arrived if n in self.admitted], "overtaken"
        self._check_ownership()
        assert len({item.request.rid for item in work}) == len(work)
        assert sum(len(item.ids) for item in work) <= self.capacities.max_rows
        assert work or not self.scheduler.running
        prompt_rows = 0
        for item in work:
            model = self.expected[item.request.rid]
            end = model.rows + len(item.ids)
            assert item.ids == model.tokens[model.rows : end]
            assert item.is_last == (end >= model.prompt_len)
            prompt_rows += len(item.ids) if model.rows < model.prompt_len else 0
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
        for one in running:
            assert len(one.blocks) * BLOCK >= one.max_len
            assert one.sealed_slot > 0 or one.sealed_len == 0, "state 0 is the empty sequence's"

    def _check_log(self, item: Work, model: Expected, end: int) -> None:
        """A row is kept until the block it is in has been folded into a stored seal."""
        if item.request.next_slot < 0:
            self.num_waits += end - model.sealed > BLOCK
            assert end - model.sealed <= LOG_ROWS, "a row that is still needed is overwritten"
            assert (end - 1) // BLOCK * BLOCK - model.sealed <= BLOCK, "two blocks to fold"

    def _advance(self, item: Work) -> None:
        one, model = item.request, self.expected[item.request.rid]
        model.rows += len(item.ids)
        boundary = (model.rows - 1) // BLOCK * BLOCK
        if one.next_slot > 0:
            assert boundary > model.sealed, "a slot was reserved for a seal that is not due"
            model.sealed, written = boundary, one.next_slot
            self.scheduler.stored(one, boundary)
            assert one.sealed_slot == written, "the log goes on from a state that is not its own"
        one.committed_len = model.rows
        assert one.sealed_len == model.sealed
        if item.is_last:
            take(one, model.tokens[model.rows])
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
    met["waits"] = sum(driver.num_waits for driver in drivers)
    assert min(met.values()) > 20, met
