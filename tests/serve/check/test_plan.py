"""What a check plans and counts, without a device."""

import collections
import contextlib
import dataclasses
import json
import types
from typing import Any, cast

import pytest

from serve.check import laws, make_cases, speculations
from serve.check.happened import Happened, Met
from serve.check.laws import LawRun, by_engine, run_laws
from serve.check.setting import Setting
from serve.check.sizes import SHORT_OUTPUT, Sizes
from serve.check.speculation import GIVEN, Drafted, Drafting, Speculation
from serve.speculation import Given
from tests.serve.check.made_up import GOLDEN, OUTCOME, played


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_prompts_end_around_boundaries_and_span_more_than_two_spans_of_attention(block):
    sizes = Sizes.of(block, 1 << 20)
    rests = {n % block for n in sizes.prompt_lens if n >= block - 1}
    assert rests >= {block - 1, 0, 1}
    assert sizes.longest_prompt > 256
    assert {block - 1, block, block + 1, 1} <= set(sizes.chunks)
    assert sizes.longest_prompt + SHORT_OUTPUT <= sizes.context_len


def test_requests_fit_a_model_of_few_positions(setting):
    short = dataclasses.replace(setting)
    short.__dict__["sizes"] = Sizes.of(64, 150)
    for case in make_cases(short):
        assert 0 < case.max_len <= 150
    with pytest.raises(ValueError, match="two blocks of 64 tokens, the model has 100 positions"):
        Sizes.of(64, 100)


def test_cases_are_the_same_in_every_process(setting):
    assert make_cases(setting) == make_cases(Setting(**dataclasses.asdict(setting)))


def test_a_check_needs_a_neighbour(directory):
    with pytest.raises(ValueError, match="at least 2, a request and one beside it, got 1"):
        Setting(directory=str(directory), max_running_requests=1)


class FakeDrafts:
    """A drafter of the engine's, which says three tokens."""

    def given(self, request, most):
        return Given([7, 8, 9][:most], 16)


def rounds(speculation: Speculation) -> list[tuple[int, Given]]:
    """(drafts that may be given, those that are) in a run of a request."""
    rule, found = speculation.rule(3, cast(Any, FakeDrafts())), []
    request = cast(Any, types.SimpleNamespace(replay_ids=tuple(range(2, 42)), output_ids=[]))
    for most in [*range(17), *range(17)]:
        request.output_ids = list(range(2, 2 + len(found)))
        found.append((most, rule(request, most)))
    return found


@pytest.mark.parametrize("width", [2, 3, 4, 8, 17])
def test_patterns_together_accept_every_number_of_drafts(width):
    accepted = set()
    for speculation in speculations([Drafting(GIVEN, width)]):
        for at, (most, given) in enumerate(rounds(speculation)):
            most = min(most, width - 1)
            expected = list(range(2 + at, 42))
            tokens = given.tokens[:most]
            right = [a == b for a, b in zip(tokens, expected, strict=False)]
            accepted.add((right + [False]).index(False))
            if speculation.pattern == "right":
                assert tokens == expected[:most]
            if speculation.pattern == "reject":
                assert not any(right)
            assert given.min_accepted == 0
    assert accepted.issuperset(range(width))


def test_a_drafter_of_the_engine_is_limited_not_replaced():
    own, mixed, reject = speculations([Drafting("NEXTN", 4)])
    assert all(given.tokens == [7, 8, 9][:most] for most, given in rounds(own))
    assert all(given.max_accepted == 16 for _, given in rounds(own))
    assert {given.max_accepted for _, given in rounds(mixed)} == {0, 1, 2, 3}
    assert {given.max_accepted for _, given in rounds(reject)} == {0}
    assert Drafting("DSPARK", 8, "demo-dspark").arguments() == {
        "speculative_algorithm": "DSPARK",
        "speculative_num_draft_tokens": 8,
        "speculative_draft_model_path": "demo-dspark",
        "disable_self_check": True,
    }


def test_every_way_of_drafting_meets_every_way_of_cutting(setting):
    run = LawRun(setting, make_cases(setting), [], speculations([Drafting(GIVEN, 4)]))
    groups = dict(by_engine(run, 140))
    assert list(groups) == [None, Drafting(GIVEN, 4)]
    cuts = set(setting.sizes.cuts)
    schedules = [schedule for group in groups.values() for schedule in group]
    for choice in (None, *run.speculations):
        assert {s.chunk for s in schedules if s.speculation == choice} == cuts
    again = dict(by_engine(run, 20))
    assert all(again[choice] == groups[choice][: len(again[choice])] for choice in again)


def test_drafts_are_counted_by_engine():
    drafted, two, three = Drafted(), Drafting(GIVEN, 2), Drafting(GIVEN, 3)
    drafted.saw(three, [4, 0, 1])
    assert drafted.missing([three]) == ["1 of 2"]
    drafted.saw(three, [0, 2])
    drafted.saw(two, [9])
    assert drafted.missing([two, three]) == ["1 of 1"]
    own = Drafting("NEXTN", 3)
    drafted.saw(own, [3])
    assert drafted.missing([own]) == ["any of NEXTN"]
    drafted.saw(own, [0, 1])
    assert drafted.missing([own]) == []


def by_what(run):
    """(schedules, tokens) of each line about schedules."""
    return {(r.law, r.what.split()[0]): (r.schedules, r.tokens) for r in run.met}


def test_a_schedule_counts_for_what_its_requests_met(setting):
    run = LawRun(setting, make_cases(setting), [GOLDEN] * 16)
    [(_, (schedule,))] = by_engine(run, 1)
    drafted = {"spec_verified_by_position": [2]}
    some = [
        played(0),
        played(1, met=Met(num_pieces=2, num_shared=4)),
        played(2, met=Met(num_shared=1), num_retractions=1),
        played(3, met=Met(num_beside_nan=1), meta_info=drafted),
        played(4, meta_info=drafted, temperature=0.6),
    ]
    run.compare(schedule, some, Happened())
    assert by_what(run) == {
        ("L1", "drafts"): (1, 6),
        ("L2", "others"): (1, 6),
        ("L2", "one"): (1, 3),
        ("L3", "its"): (1, 3),
        ("L5", "it"): (1, 3),
        ("L7", "it"): (1, 3),
    }
    assert not run.is_passed


def test_a_difference_counts_wherever_it_came_from(setting):
    run = LawRun(setting, make_cases(setting), [GOLDEN] * 16)
    [(_, (schedule,))] = by_engine(run, 1)
    other = dataclasses.replace(OUTCOME, tokens=(7, 8, 1))
    run.compare(schedule, [played(3, outcome=other)], Happened())
    run.compare(schedule, [played(4, outcome=other, num_retractions=1)], Happened())
    failed = {r.law: str(r.first_difference) for r in run.reports if r.status == "failed"}
    marks = "schedule 0, chunk 1, poisoned, preempted"
    assert failed == {
        "L2": f"{marks}, request 3: token 2: 1, not 9",
        "L5": f"{marks}, request 4: token 2: 1, not 9",
    }
    assert by_what(run)["L2", "others"] == (0, 0)


def test_another_process_is_compared_row_by_row(setting):
    run = LawRun(setting, make_cases(setting), [GOLDEN] * 16)
    changed = json.loads(json.dumps(GOLDEN.to_json()))
    changed["outcome"]["digests"][1][1] = "cc"
    changed["state"]["rows"]["layers.1.key"]["2"] = "another"
    run.compare_with_process([GOLDEN] * 3 + [type(GOLDEN).from_json(changed)] + [GOLDEN] * 4)
    expected = "a new process, request 6: layer 1 key at position 2; state layers.1.key"
    assert str(run.process.first_difference) == expected
    assert run.process.tokens == 24


class ToyRunner(contextlib.AbstractContextManager):
    """Gives the golden outcomes, and accepts drafts by turns."""

    started: list[Drafting | None] = []
    most = 3

    def __init__(self, setting, cases, drafting, expected):
        assert expected == [list(GOLDEN.outcome.tokens)] * 16
        type(self).started.append(drafting)
        self.engine, self.cover = types.SimpleNamespace(numerics=None), None
        self._drafting = drafting

    def __exit__(self, *error):
        """Nothing was opened."""

    def run(self, schedule):
        """Every case of it."""
        assert schedule.drafting == self._drafting
        info = collections.defaultdict(int)
        if self._drafting is not None:
            counts = [int(n <= self.most) for n in range(4)]
            info |= {"spec_verified_by_position": [1], "spec_correct_drafts_histogram": counts}
        some = [played(i, meta_info=info, temperature=i % 2) for i in schedule.cases]
        return some, Happened()


@pytest.mark.parametrize(
    ("algorithm", "most", "missing"),
    [
        (GIVEN, 3, None),
        (GIVEN, 2, "accepted drafts that never came: 3 of 3"),
        ("NEXTN", 1, None),
        ("NEXTN", 0, "accepted drafts that never came: any of NEXTN"),
    ],
)
def test_schedules_are_spread_over_ways_of_drafting(setting, monkeypatch, algorithm, most, missing):
    monkeypatch.setattr(laws, "ScheduleRunner", ToyRunner)
    monkeypatch.setattr(laws, "scored", lambda *_: None)
    monkeypatch.setattr(ToyRunner, "started", [])
    monkeypatch.setattr(ToyRunner, "most", most)
    every = speculations([Drafting(algorithm, 4)])
    run = run_laws(setting, num_schedules=14, speculations=every, golden=[GOLDEN] * 16)
    assert ToyRunner.started == [None, Drafting(algorithm, 4)]
    of_drafts = [report for report in run.met if report.law in ("L1", "L7")]
    status = "not tested" if missing else "passed"
    assert [(r.status, r.missing) for r in of_drafts] == [(status, missing)] * 2
    assert of_drafts[0].schedules == sum(s.speculation is not None for s in run.schedules)


def test_laws_about_drafts_are_not_available_without(setting, monkeypatch):
    monkeypatch.setattr(laws, "ScheduleRunner", ToyRunner)
    monkeypatch.setattr(laws, "scored", lambda *_: None)
    run = run_laws(setting, num_schedules=2, golden=[GOLDEN] * 16)
    absent = {report.law for report in run.reports if report.status == "not available"}
    assert absent == {"L1", "L4", "L7"}
