"""The laws of docs/design.md on one model: schedules, scores and another process beside golden
runs."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import tqdm

from qwen_hybrid.numerics import Numerics
from serve.check.cases import Case, make_cases
from serve.check.golden import Golden, golden_runs
from serve.check.happened import Happened
from serve.check.moments import Cover
from serve.check.outcome import Outcome, Parting
from serve.check.report import Difference, Report
from serve.check.runner import Played, ScheduleRunner
from serve.check.schedule import Schedule, make_schedule
from serve.check.setting import Setting
from serve.check.speculation import Drafted, Drafting, Speculation
from serve.engine import Engine

# Cases that another process runs: every other one, so that all kinds of lengths are among them.
ELSEWHERE = slice(0, None, 2)

# Of what a schedule brings about: (law, what, whether a request met it).
_MET: tuple[tuple[str, str, Callable[[Played], bool]], ...] = (
    ("L1", "drafts of it are verified", lambda p: p.is_drafted),
    ("L2", "others run beside it", lambda p: p.met.num_shared > 0),
    ("L2", "one beside it is NaN", lambda p: p.met.num_beside_nan > 0),
    ("L3", "its prompt is cut into chunks", lambda p: p.met.num_pieces > 0),
    ("L5", "it is preempted and resumed", lambda p: p.num_retractions > 0),
    ("L7", "it is sampled with drafts", lambda p: p.is_drafted and p.temperature > 0),
)
# In another batch it is in any case.
_ALWAYS = 1


@dataclasses.dataclass
class LawRun:
    """What the laws are checked on, and how they fared.

    Attributes:
      setting: the model and the engine.
      cases, golden: requests, and what each gave alone.
      speculations: ways of drafting that schedules are spread over.
      first_seed: number of the first schedule.
      met: reports of what schedules bring about.
      cached, process, scored: those of the prefix cache, of another process, of scores.
      schedules: that were run.
      happenings: what each of them came to do.
      covers: the moments at which they preempted requests, by engine.
      drafted: what came of their drafts.
      numerics: what the bits belong to.
    """

    setting: Setting
    cases: list[Case]
    golden: list[Golden]
    speculations: tuple[Speculation, ...] = ()
    first_seed: int = 0
    met: list[Report] = dataclasses.field(
        default_factory=lambda: [Report(law, what) for law, what, _ in _MET]
    )
    cached: Report = dataclasses.field(
        default_factory=lambda: Report("L4", "its prompt is cached", is_available=False)
    )
    process: Report = dataclasses.field(
        default_factory=lambda: Report("L5", "it runs in a new process")
    )
    scored: Report = dataclasses.field(
        default_factory=lambda: Report("L6", "prefill scores its output")
    )
    schedules: list[Schedule] = dataclasses.field(default_factory=list)
    happenings: list[Happened] = dataclasses.field(default_factory=list)
    covers: list[Cover] = dataclasses.field(default_factory=list)
    drafted: Drafted = dataclasses.field(default_factory=Drafted)
    numerics: Numerics | None = None

    @property
    def draftings(self) -> tuple[Drafting, ...]:
        """The engines that draft."""
        return tuple(dict.fromkeys(speculation.drafting for speculation in self.speculations))

    @property
    def expected(self) -> list[list[int]]:
        """The output of each case."""
        return [list(golden.outcome.tokens) for golden in self.golden]

    @property
    def reports(self) -> list[Report]:
        """All of them, by law."""
        every = [*self.met, self.cached, self.process, self.scored]
        return sorted(every, key=lambda report: report.law)

    @property
    def is_passed(self) -> bool:
        """No bit differs, and everything that the engine has was tested."""
        return all(report.status in ("passed", "not available") for report in self.reports)

    @property
    def happened(self) -> Happened:
        """What all schedules came to do."""
        return Happened.total(self.happenings)

    def compare(self, schedule: Schedule, played: list[Played], happened: Happened) -> None:
        """Compare the requests of a schedule with their golden runs."""
        self.schedules.append(schedule)
        self.happenings.append(happened)
        met = set()
        for one in played:
            golden = self.golden[one.case].outcome
            parting = golden.parting(one.outcome)
            difference = parting and Difference(str(schedule), one.case, parting, schedule.seed)
            now = [i for i, (_, _, is_met) in enumerate(_MET) if is_met(one)]
            met.update(now)
            for index in now:
                self.met[index].saw(len(golden.tokens), difference)
            if not now:
                self.met[_ALWAYS].saw(0, difference)
        for index in met:
            self.met[index].schedules += 1

    def compare_with_process(self, there: list[Golden]) -> None:
        """Compare what another process gave for the cases `ELSEWHERE`."""
        indices = range(len(self.cases))[ELSEWHERE]
        self.process.schedules += 1
        for index, other in zip(indices, there, strict=True):
            mine = self.golden[index]
            parting = mine.outcome.parting(other.outcome)
            difference = None
            if parting is not None:
                state = mine.state.first_difference(other.state, parting.rows)
                difference = Difference("a new process", index, parting, state=state)
            self.process.saw(len(mine.outcome.tokens), difference)

    def score(self, engine: Engine) -> None:
        """Score every case's output by prefill."""
        for index, (case, golden) in enumerate(zip(self.cases, self.golden, strict=True)):
            parting = scored(engine, case, golden.outcome)
            self.scored.schedules += 1
            difference = parting and Difference("a score by prefill", index, parting)
            self.scored.saw(len(golden.outcome.tokens), difference)


def scored(engine: Engine, case: Case, outcome: Outcome) -> Parting | None:
    """Where an output's log-probabilities differ when prefill scores them again, if they do."""
    num_top = case.wanted["top_logprobs_num"]
    result = engine.score([*case.prompt, *outcome.tokens], top_logprobs_num=num_top)
    assert isinstance(result, dict)
    info, start = result["meta_info"], len(case.prompt)
    values = [row[0] for row in info["input_token_logprobs"][start:]]
    theirs = np.asarray(values, np.float32).view(np.uint32)
    mine = np.frombuffer(outcome.log_probabilities, np.uint32)
    if (mine != theirs).any():
        at = int(np.argmax(mine != theirs))
        return Parting(f"log-probability of token {at}", rows=start + at)
    if num_top:
        top = [[row[:2] for row in rows] for rows in info["input_top_logprobs"][start:]]
        if repr(top) != dict(outcome.others)["output_top_logprobs"]:
            return Parting("output_top_logprobs")
    return None


def run_laws(
    setting: Setting,
    *,
    num_schedules: int,
    speculations: tuple[Speculation, ...] = (),
    first_seed: int = 0,
    golden: list[Golden] | None = None,
    is_shown: bool = False,
) -> LawRun:
    """Run random schedules of a model beside the same requests alone, then score these.

    The engines run one after another, each with programs of its own for prefill and decoding.

    Args:
      speculations: ways of drafting to spread schedules over; none where that is not available.
      first_seed: number of the first schedule.
      golden: what `golden_runs` gave, if it was called before.
      is_shown: show progress bars, on a terminal.
    """
    cases = make_cases(setting)
    if golden is None:
        golden = golden_runs(setting, cases, is_shown=is_shown)
    run = LawRun(setting, cases, golden, speculations, first_seed)
    with tqdm.tqdm(
        total=num_schedules, desc="schedules", disable=None if is_shown else True
    ) as bar:
        for drafting, schedules in by_engine(run, num_schedules):
            with ScheduleRunner(setting, cases, drafting, run.expected) as runner:
                _run_group(run, runner, schedules, bar)
                if drafting is None:
                    run.numerics = runner.engine.numerics
                    run.score(runner.engine)
    _judge_drafts(run)
    return run


def _run_group(
    run: LawRun, runner: ScheduleRunner, schedules: list[Schedule], bar: tqdm.tqdm
) -> None:
    """Run the schedules of one engine."""
    for schedule in schedules:
        played, happened = runner.run(schedule)
        for one in played:
            if schedule.speculation is not None:
                histogram = one.meta_info["spec_correct_drafts_histogram"]
                run.drafted.saw(schedule.speculation.drafting, histogram)
        run.compare(schedule, played, happened)
        bar.update()
    run.covers.append(runner.cover)


def by_engine(run: LawRun, num_schedules: int) -> Iterator[tuple[Drafting | None, list[Schedule]]]:
    """The first schedules by the engine that they need, that without drafts first."""
    choices = (None, *run.speculations)
    schedules = [
        make_schedule(seed, run.cases, sizes=run.setting.sizes, speculations=choices)
        for seed in range(run.first_seed, run.first_seed + num_schedules)
    ]
    for drafting in (None, *run.draftings):
        some = [schedule for schedule in schedules if schedule.drafting == drafting]
        if some:
            yield drafting, some


def _judge_drafts(run: LawRun) -> None:
    """Say of the laws about drafts whether they were tested."""
    missing = run.drafted.missing(run.draftings)
    for report in run.met:
        if report.law in ("L1", "L7"):
            report.is_available = bool(run.speculations)
            if missing:
                report.missing = f"accepted drafts that never came: {', '.join(missing)}"
