"""What happens when blocks run out: named cases, without a device."""

import dataclasses

import pytest

from serve.request import Request, Status
from serve.scheduler import Capacities, Scheduler
from tests.serve.scheduling import BLOCK, LOG_ROWS, SMALL, request, rows, run


def started(num_blocks: int, *requests: Request) -> Scheduler:
    """A scheduler whose requests have computed their prompts."""
    scheduler = Scheduler(dataclasses.replace(SMALL, num_blocks=num_blocks))
    for one in requests:
        scheduler.add(one)
    while any(one.remaining_prefill for one in requests):
        run(scheduler, scheduler.plan())
    return scheduler


def test_the_youngest_makes_way_and_waits_at_the_head():
    first, second, third = (request(name, 63, 40) for name in "abc")
    scheduler = started(3, first, second, third)
    late = request("d", 1)
    scheduler.add(late)
    run(scheduler, scheduler.plan())
    # All stand at a boundary and no block is left: the first takes the third's.
    work = scheduler.plan()
    assert rows(work) == {"a": 1}
    assert scheduler.running == [first, second]
    assert list(scheduler.waiting) == [third, late]
    assert third.status is Status.WAITING
    assert (third.num_retractions, scheduler.num_retractions) == (1, 1)
    scheduler.check_integrity()


def test_what_is_kept_and_what_is_dropped():
    one = request("a", 100, 80)
    scheduler = started(4, one)
    for _ in range(30):
        run(scheduler, scheduler.plan())
    scheduler.reserve_seal(one)
    output, seed, first_token_s = list(one.output_ids), one.seed, one.first_token_s
    scheduler.preempt(one)
    assert (one.slot, one.blocks, one.sealed_slot, one.next_slot) == (-1, [], 0, -1)
    assert (one.committed_len, one.sealed_len) == (0, 0)
    assert (one.output_ids, one.seed, one.first_token_s) == (output, seed, first_token_s)
    pools = (scheduler.slots, scheduler.blocks, scheduler.state_slots)
    assert [pool.num_taken for pool in pools] == [0, 0, 0]


@pytest.mark.parametrize("num_tokens", [1, 2, 64, 65])
def test_a_resumed_request_computes_its_rows_anew_and_samples_nothing_again(num_tokens):
    one = request("a", 63, 70)
    scheduler = started(4, one)
    while len(one.output_ids) < num_tokens:
        run(scheduler, scheduler.plan())
    known = [*one.prompt_ids, *one.output_ids]
    scheduler.preempt(one)
    fed = []
    while len(fed) < len(known):
        (item,) = scheduler.plan()
        fed += item.ids
        # Only the row of the newest token gives another.
        assert item.is_last == (len(fed) == len(known))
        assert len(item.ids) == 1 or not item.is_last
        run(scheduler, [item])
    assert fed == known
    assert len(one.output_ids) == num_tokens + 1


def test_a_prompt_cut_by_preemption_starts_again_and_gives_its_token():
    scheduler = Scheduler(SMALL, chunk_len=lambda remaining: 20)
    one = request("a", 50)
    scheduler.add(one)
    run(scheduler, scheduler.plan())
    scheduler.preempt(one)
    assert one.remaining_prefill == 50
    sizes = []
    while not one.output_ids:
        work = scheduler.plan()
        sizes.append((len(work[0].ids), work[0].is_last))
        run(scheduler, work)
    assert sizes == [(20, False), (20, False), (10, True)]


def test_who_made_way_is_not_admitted_in_the_same_step():
    first, second = request("a", 63, 40), request("b", 130, 40)
    scheduler = started(4, first, second)
    work = scheduler.plan()
    run(scheduler, work)
    # The second owns three blocks, the first takes one of them: two would be free for its return.
    assert list(scheduler.waiting) == [second]
    run(scheduler, scheduler.plan())
    assert list(scheduler.waiting) == [second]
    scheduler.release(first)
    scheduler.plan()
    assert scheduler.running == [second]


def test_a_younger_request_waits_rather_than_preempting_an_older_one():
    first, second = request("a", 10, 60), request("b", 63, 40)
    scheduler = started(2, first, second)
    run(scheduler, scheduler.plan())
    for _ in range(40):
        work = scheduler.plan()
        assert rows(work) == {"a": 1}
        run(scheduler, work)
    assert (second.num_retractions, len(second.blocks)) == (0, 1)
    scheduler.release(first)
    assert rows(scheduler.plan()) == {"b": 1}


def test_an_older_prompt_takes_the_block_of_a_younger_one_that_was_planned():
    # While the first takes small pieces, the second decodes into a block that was promised to it.
    scheduler = Scheduler(
        dataclasses.replace(SMALL, num_blocks=5),
        chunk_len=lambda remaining: 60 if remaining <= 60 else 15,
    )
    first, second = request("a", 250, 1), request("b", 60, 80)
    scheduler.add(first)
    scheduler.add(second)
    while first.committed_len < 180:
        run(scheduler, scheduler.plan())
    assert (len(first.blocks), len(second.blocks)) == (3, 2)
    assert rows(scheduler.plan()) == {"a": 15}
    assert list(scheduler.waiting) == [second]
    scheduler.check_integrity()


def test_who_owns_no_block_makes_way_before_an_older_one_does():
    first, second, third = request("a", 63, 80), request("b", 60, 40), request("c", 60, 40)
    scheduler = started(3, first)
    scheduler.capacities = dataclasses.replace(scheduler.capacities, prefill_rows=10)
    scheduler.add(second)
    scheduler.add(third)
    run(scheduler, scheduler.plan())
    assert scheduler.running == [first, second, third]
    # The first decodes into the block that was promised to the third.
    while first.committed_len < 2 * BLOCK:
        run(scheduler, scheduler.plan())
        assert not third.blocks
    assert rows(scheduler.plan()) == {"a": 1}
    assert list(scheduler.waiting) == [second, third]


def test_a_resumed_request_is_left_alone_until_it_made_a_token():
    first, second = request("a", 60, 80), request("b", 60, 80)
    scheduler = started(3, first, second)
    scheduler.chunk_len = lambda remaining: 20
    scheduler.preempt(second)
    assert second.is_protected
    run(scheduler, scheduler.plan())
    assert second in scheduler.running
    third = request("c", 1, 1)
    scheduler.add(third)
    taken = scheduler.blocks.take(scheduler.blocks.num_free)
    while first.committed_len < BLOCK:
        run(scheduler, scheduler.plan())
    # The first has no block for its next row, and nobody may make way for it.
    while second.is_protected:
        assert "a" not in rows(work := scheduler.plan())
        run(scheduler, work)
    assert len(second.output_ids) == 2
    assert rows(scheduler.plan()) == {"a": 1}
    assert second.num_retractions == 2
    scheduler.blocks.give(taken)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_a_resumed_request_owns_the_blocks_until_its_next_token(num_tokens, blocks):
    one = request("a", 63, 10)
    scheduler = Scheduler(SMALL, chunk_len=lambda remaining: 10)
    scheduler.add(one)
    while len(one.output_ids) < num_tokens or not one.committed_len:
        run(scheduler, scheduler.plan())
    scheduler.preempt(one)
    scheduler.plan()
    assert len(one.blocks) == blocks


def test_preempted_requests_come_back_in_the_order_they_arrived():
    first, second, third = (request(name, 60, 10) for name in "abc")
    scheduler = started(8, first, second, third)
    for one in (third, second, first):
        scheduler.preempt(one)
    scheduler.plan()
    assert scheduler.running == [first, second, third]


def test_a_request_that_returns_is_as_old_as_before():
    first, second = request("a", 60, 80), request("b", 60, 80)
    scheduler = started(8, first, second)
    scheduler.preempt(first)
    run(scheduler, scheduler.plan())
    assert scheduler.running == [first, second]


def test_every_admission_is_counted():
    one = request("a", 5, 10)
    scheduler = started(8, one)
    assert one.num_admissions == 1
    for expected in (2, 3):
        scheduler.preempt(one)
        while one.is_protected:
            run(scheduler, scheduler.plan())
        assert (one.num_admissions, one.num_retractions) == (expected, expected - 1)


def test_what_fits_alone_ends_in_the_smallest_pool():
    capacities = Capacities(
        num_slots=3,
        num_blocks=4,
        num_state_slots=5,
        block_size=BLOCK,
        log_rows=LOG_ROWS,
        max_rows=80,
        prefill_rows=70,
    )
    scheduler = Scheduler(capacities)
    requests = [request(name, 100, 93) for name in "abcdefgh"]
    for one in requests:
        scheduler.add(one)
    while not scheduler.is_idle:
        run(scheduler, scheduler.plan())
        scheduler.check_integrity()
    assert all(len(one.output_ids) == 93 for one in requests)
    assert scheduler.num_retractions > 0
