"""What a check plans and counts, without a device."""

import collections
import contextlib
import dataclasses
import json
import types

import pytest

from serve.check import laws, make_cases, speculations
from serve.check.happened import Happened, Met
from serve.check.laws import LawRun, by_engine, run_laws
from serve.check.setting import Setting
from serve.check.sizes import SHORT_OUTPUT, Sizes
from serve.check.speculation import Drafted, Speculation
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


@pytest.mark.parametrize("width", [2, 3, 4, 8, 17])
def test_patterns_together_accept_every_number_of_drafts(width):
    accepted = {"reject": 0, "oracle": width - 1}
    every = speculations("NGRAM", [width])
    numbers = {
        accepted[s.pattern] if s.pattern in accepted else int(s.pattern.partition(":")[2])
        for s in every
        if s.pattern not in (None, "random")
    }
    assert numbers == set(range(width))
    assert every[0].arguments() == {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": width,
        "speculative_debug": None,
    }


def test_every_way_of_drafting_meets_every_way_of_cutting(setting):
    run = LawRun(setting, make_cases(setting), [], speculations("NGRAM", [4]))
    groups = dict(by_engine(run, 49))
    assert list(groups) == [None, *run.speculations]
    cuts = set(setting.sizes.cuts)
    for schedules in groups.values():
        assert {schedule.chunk for schedule in schedules} == cuts
    again = dict(by_engine(run, 20))
    assert all(again[choice] == groups[choice][: len(again[choice])] for choice in again)


def test_drafts_are_counted_by_width():
    drafted = Drafted()
    drafted.saw(3, [4, 0, 1])
    assert drafted.missing([3]) == [(3, 1)]
    drafted.saw(3, [0, 2])
    drafted.saw(2, [9])
    assert drafted.missing([2, 3]) == [(2, 1)]


def by_what(run):
    """(schedules, tokens) of each line about schedules."""
    return {(r.law, r.what.split()[0]): (r.schedules, r.tokens) for r in run.met}


def test_a_schedule_counts_for_what_its_requests_met(setting):
    run = LawRun(setting, make_cases(setting), [GOLDEN] * 16)
    [(_, (schedule,))] = by_engine(run, 1)
    drafted = {"spec_verify_ct": 2}
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
    """Gives the golden outcomes, and drafts that its pattern says are accepted."""

    started: list[Speculation | None] = []
    broken = "none"

    def __init__(self, setting, cases, speculation):
        type(self).started.append(speculation)
        self.engine, self.cover = types.SimpleNamespace(numerics=None), None
        self._speculation = speculation

    def __exit__(self, *error):
        """Nothing was opened."""

    def run(self, schedule):
        """Every case of it."""
        assert schedule.speculation == self._speculation
        info = collections.defaultdict(int)
        if self._speculation is not None:
            number = {"reject": 0, "accept:1": 1, "adversarial:2": 2, "oracle": 3}
            at = number.get(self._speculation.pattern, 0)
            if self._speculation.pattern != self.broken:
                info["spec_verify_ct"] = 1
            info["spec_correct_drafts_histogram"] = [int(n == at) for n in range(4)]
            if self._speculation.pattern == self.broken:
                info["spec_correct_drafts_histogram"] = [0] * 4
        some = [played(i, meta_info=info, temperature=i % 2) for i in schedule.cases]
        return some, Happened()


@pytest.mark.parametrize(
    ("broken", "status", "missing"),
    [
        ("none", "passed", None),
        ("oracle", "not tested", "accepted drafts that never came: 3 of 3"),
    ],
)
def test_schedules_are_spread_over_ways_of_drafting(setting, monkeypatch, broken, status, missing):
    monkeypatch.setattr(laws, "ScheduleRunner", ToyRunner)
    monkeypatch.setattr(laws, "scored", lambda *_: None)
    monkeypatch.setattr(ToyRunner, "started", [])
    monkeypatch.setattr(ToyRunner, "broken", broken)
    every = speculations("NEXTN", [4])
    run = run_laws(setting, num_schedules=14, speculations=every, golden=[GOLDEN] * 16)
    assert ToyRunner.started == [None, *every]
    of_drafts = [report for report in run.met if report.law in ("L1", "L7")]
    assert [(r.status, r.missing) for r in of_drafts] == [(status, missing)] * 2
    num_drafted = sum(s.speculation is not None for s in run.schedules)
    assert of_drafts[0].schedules == num_drafted - (0 if broken == "none" else 2)


def test_laws_about_drafts_are_not_available_without(setting, monkeypatch):
    monkeypatch.setattr(laws, "ScheduleRunner", ToyRunner)
    monkeypatch.setattr(laws, "scored", lambda *_: None)
    run = run_laws(setting, num_schedules=2, golden=[GOLDEN] * 16)
    absent = {report.law for report in run.reports if report.status == "not available"}
    assert absent == {"L1", "L4", "L7"}
