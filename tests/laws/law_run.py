"""One run of the laws over one model: golden outcomes, schedules, scores, the first difference."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qwen_hybrid.config import HybridConfig
from serve.model_path import resolve_model_path
from tests import tiny_models
from tests.laws.moments import Cover
from tests.laws.schedules import (
    Case,
    Happened,
    Outcome,
    ScheduleRunner,
    Setting,
    golden_outcomes,
    make_cases,
    make_schedule,
    scored,
)

DTYPES = ("float32", "bfloat16")
# Two layers each, to be compiled in seconds: what mutants are run against.
TINY = {"tiny-q4": "q4_all", "tiny-dense": "q35_dense"}


def setting_of(model: str, dtype: str, folder: Path) -> Setting:
    """A packaged model, or one of two layers with random weights, made in the folder."""
    if model not in TINY:
        return Setting(resolve_model_path(model), dtype=dtype)
    config = tiny_models.two_layers(TINY[model])
    return Setting(tiny_models.write(folder / model, config), "dummy", dtype)


@dataclasses.dataclass
class Report:
    """How a law fared.

    Attributes:
      law: which.
      schedules: how many.
      tokens: tokens compared.
      first_difference: where two runs first parted, or None.
    """

    law: str
    schedules: int = 0
    tokens: int = 0
    first_difference: str | None = None

    def saw(self, tokens: int, difference: str | None, where: str) -> None:
        """Count a comparison."""
        self.tokens += tokens
        if difference is not None and self.first_difference is None:
            self.first_difference = f"{where}: {difference}"


@dataclasses.dataclass
class LawRun:
    """What the laws are checked on.

    Attributes:
      cases, golden: requests, and what each gave alone.
      schedules: laws L2, L3 and L5.
      scores: law L6.
      happened: what the schedules came to do.
      cover: the moments at which they preempted requests.
    """

    cases: list[Case]
    golden: list[Outcome]
    schedules: Report
    scores: Report
    happened: Happened
    cover: Cover


def run_laws(setting: Setting, *, num_schedules: int, num_cases: int = 16) -> LawRun:
    """Run random schedules of a model beside the same requests alone, then score them.

    Three programs: the golden engine's, and those of the schedules' engine for prefill and for
    decoding. All have other shapes.
    """
    vocab_size = HybridConfig.from_directory(setting.directory).vocab_size
    cases = make_cases(np.random.default_rng(11), vocab_size, num_cases)
    golden = golden_outcomes(setting, cases)
    runner = ScheduleRunner(setting)
    schedules, scores = Report("L2 L3 L5"), Report("L6")
    run = LawRun(cases, golden, schedules, scores, Happened(), runner.cover)
    with runner.engine:
        for where, happened in _schedules(run, runner, num_schedules):
            # In a starved pool the poisoned request may have run alone.
            is_checked = "poisoned" in where and "starved" not in where
            if happened.num_poisoned == 0 and is_checked:
                raise AssertionError(f"{where}: no rows of NaN beside others")
        for index, (case, outcome) in enumerate(zip(cases, golden, strict=True)):
            difference = scored(runner.engine, case, outcome)
            scores.saw(len(outcome.tokens), difference, f"case {index}")
            scores.schedules += 1
    return run


def _schedules(
    run: LawRun, runner: ScheduleRunner, num_schedules: int
) -> Iterator[tuple[str, Happened]]:
    for seed in range(num_schedules):
        schedule = make_schedule(seed, run.cases)
        outcomes, happened = runner.run(schedule, run.cases)
        run.happened.add(happened)
        run.schedules.schedules += 1
        kind = " poisoned" if schedule.is_poisoned else ""
        kind += " preempted" if schedule.is_preempted else ""
        kind += " starved" if schedule.is_starved else ""
        where = f"schedule {seed} chunk {schedule.chunk or 'random'}{kind}"
        for index, outcome in zip(schedule.cases, outcomes, strict=True):
            difference = run.golden[index].first_difference(outcome)
            run.schedules.saw(len(outcome.tokens), difference, f"{where}, case {index}")
        yield where, happened
