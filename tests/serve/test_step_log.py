"""The decode log line, totals, and how many drafts are worth verifying."""

import re

import pytest

from serve.adaptive import AdaptiveLength
from serve.request import StepResult
from serve.scheduler import Scheduler
from serve.step_log import StepLog
from tests.serve.scheduling import SMALL, request

LINE = re.compile(
    r"Decode batch, #running-req: \d+, #full token: \d+, full token usage: \d\.\d\d, "
    r"mamba num: \d+, mamba usage: \d\.\d\d, (accept len: (\d+\.\d\d), accept rate: (\d\.\d\d), )?"
    r"cuda graph: (True|False), gen throughput \(token/s\): \d+\.\d\d, #queue-req: \d+"
)


def rounds(*accepted: int, num_drafts: int = 3) -> list[StepResult]:
    """One step of some requests."""
    one = request("a", 4)
    return [
        StepResult(
            one,
            tokens=[1] * (number + 1),
            is_round=True,
            num_drafts=num_drafts,
            num_accepted=number,
        )
        for number in accepted
    ]


def test_a_line_every_forty_decode_steps(caplog):
    caplog.set_level("INFO")
    log, scheduler = StepLog(num_drafts=3), Scheduler(SMALL)
    for _ in range(39):
        log.saw(rounds(3, 1), scheduler)
    log.saw([StepResult(request("b", 9), tokens=[5])], scheduler)
    assert not caplog.records
    log.saw(rounds(3, 1), scheduler)
    (record,) = caplog.records
    found = LINE.fullmatch(record.getMessage())
    # Healthy identity: accept len = 1 + accept rate * drafts.
    assert found and (found[2], found[3]) == ("3.00", "0.67")
    for _ in range(40):
        log.saw(rounds(0), scheduler)
    found = LINE.fullmatch(caplog.records[-1].getMessage())
    assert found and (found[2], found[3]) == ("1.00", "0.00")


def test_without_speculation_nothing_is_said_of_it():
    log = StepLog(num_drafts=0)
    found = LINE.fullmatch(log.line(Scheduler(SMALL)))
    assert found and found[1] is None
    log.saw([StepResult(request("a", 4), tokens=[1])], Scheduler(SMALL))
    assert log.counters() == {"num_generated_tokens": 1}


def test_totals():
    log = StepLog(num_drafts=3)
    log.saw(rounds(3, 0, 1), Scheduler(SMALL))
    log.saw(rounds(1, num_drafts=1), Scheduler(SMALL))
    totals = log.counters()
    assert totals["num_generated_tokens"] == 9
    assert (totals["spec_verify_calls_total"], totals["spec_num_correct_drafts"]) == (4, 5)
    assert totals["spec_num_verified_drafts"] == 10
    assert totals["avg_spec_accept_length"] == 1 + 5 / 4
    assert totals["spec_correct_drafts_histogram"] == [1, 2, 0, 1]
    assert totals["spec_verified_by_position"] == [4, 3, 3]
    assert totals["spec_accepted_by_position"] == [3, 1, 1]


@pytest.mark.parametrize(
    ("accepted", "batch_size", "length"),
    [(7, 1, 7), (0, 1, 1), (2, 1, 3), (2.5, 1, 5), (3, 8, 3), (0, 8, 1), (3, 40, 1), (3, 64, 0)],
)
def test_length_follows_what_is_accepted_and_the_batch(accepted, batch_size, length):
    adaptive = AdaptiveLength(7)
    for i in range(200):
        # A mean that is no integer is met by turns.
        adaptive.saw(int(accepted + (i % 2) * (accepted % 1) * 2), 7)
    assert adaptive.length(batch_size) == length


def test_length_starts_from_the_most_and_rounds_without_drafts_say_nothing():
    adaptive = AdaptiveLength(3)
    for _ in range(100):
        adaptive.saw(0, 0)
    assert adaptive.length(1) == 3
    assert AdaptiveLength(17 - 1).length(1) == 7
