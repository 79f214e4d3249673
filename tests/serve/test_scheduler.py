"""Host decisions, without a device: admission, rows, seals, the way out."""

import dataclasses

import pytest

from serve.request import Request, Status
from serve.scheduler import Scheduler
from tests.serve.scheduling import BLOCK, LOG_ROWS, SMALL, request, rows, run

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


@pytest.mark.parametrize("prompt_len", [1, 63, 64, 65, 200])
def test_blocks_are_owned_as_rows_come(prompt_len):
    scheduler = Scheduler(SMALL, chunk_len=lambda remaining: 50)
    one = request("a", prompt_len, 70)
    scheduler.add(one)
    while not one.is_finished:
        work = scheduler.plan()
        num_rows = one.committed_len + len(work[0].ids)
        assert len(one.blocks) == -(-num_rows // BLOCK)
        run(scheduler, work)
    # The last token that is generated never becomes a row.
    assert one.committed_len == prompt_len + 69


def test_a_prompt_is_admitted_only_beside_what_others_were_promised():
    scheduler = Scheduler(SMALL, chunk_len=lambda remaining: 10)
    first, second, third = request("a", 4 * BLOCK, 1), request("b", 3 * BLOCK, 1), request("c", 65)
    for one in (first, second, third):
        scheduler.add(one)
    run(scheduler, scheduler.plan())
    # Seven of eight blocks are promised, though two are taken.
    assert scheduler.blocks.num_taken == 2
    assert scheduler.running == [first, second]


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
