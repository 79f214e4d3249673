"""Random schedules against golden solo runs.

A golden run is one request alone in an engine of one slot, its prompt prefilled in one piece. A
schedule runs several of the same requests together in another engine: other batch shapes, other
slots and blocks, chunks of other sizes, other arrival times, sometimes beside a request full of
NaN, or in a pool that is too small, and preempted at every kind of moment. Tokens,
log-probabilities and state digests must be the same bits.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bits import to_bits
from qwen_hybrid.state import GdnState
from serve.engine import Engine
from serve.engine_config import EngineConfig
from serve.inputs import Wanted
from serve.request import Request
from serve.runner import StepResult
from serve.scheduler import Work
from tests.laws.moments import BLOCK, Cover, Held

CHUNKS = (1, 17, 63, 64, 65, 100)
RANDOM = 0
# Longer than one span of attention.
CONTEXT = 384
MAX_PROMPT = 270
# By place in the list of lengths: these decode into another block, one through a whole one.
LONG_OUTPUTS = {1: 70, 4: 52, 5: 70, 6: 40}
MAX_BY_ROW = 100


@dataclasses.dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
      prompt: token ids.
      params: sampling parameters, with a seed.
      wanted: which log-probabilities.
    """

    prompt: list[int]
    params: dict[str, Any]
    wanted: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def max_len(self) -> int:
        """Rows that it can come to."""
        return len(self.prompt) + self.params["max_new_tokens"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a request gave; equality is equality of bits.

    Attributes:
      tokens: the output.
      log_probabilities: of the output, float32.
      others: every other log-probability that was asked for; `repr` writes all digits.
      digests: of the state, by part.
    """

    tokens: tuple[int, ...]
    log_probabilities: bytes
    others: tuple[tuple[str, str], ...]
    digests: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, request: Request) -> "Outcome":
        """The outcome of a finished request."""
        assert request.state_digests is not None
        others = (
            "input_logprobs",
            "input_top_logprobs",
            "input_token_ids_logprobs",
            "output_top_logprobs",
            "output_token_ids_logprobs",
        )
        return cls(
            tuple(request.output_ids),
            np.asarray(request.output_logprobs, np.float32).tobytes(),
            tuple((name, repr(getattr(request, name))) for name in others),
            tuple(sorted(request.state_digests.items())),
        )

    def first_difference(self, other: "Outcome") -> str | None:
        """Where two outcomes part, or None."""
        for at, (a, b) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if a != b:
                return f"token {at}: {a} != {b}"
        if len(self.tokens) != len(other.tokens):
            return f"{len(self.tokens)} tokens != {len(other.tokens)}"
        mine, theirs = (np.frombuffer(o.log_probabilities, np.uint32) for o in (self, other))
        if (mine != theirs).any():
            return f"log-probability {int(np.argmax(mine != theirs))}"
        for (name, a), (_, b) in zip(self.others, other.others, strict=True):
            if a != b:
                return name
        for (name, a), (_, b) in zip(self.digests, other.digests, strict=True):
            if a != b:
                return f"state {name}"
        return None


def make_cases(rng: np.random.Generator, vocab_size: int, count: int) -> list[Case]:
    """Random requests whose prompts and outputs end on, before and after block boundaries."""
    lengths = (1, 2, 15, 16, 17, 62, 63, 64, 65, 100, 127, 128, 129, 190, 255, MAX_PROMPT)
    cases = []
    for index in range(count):
        size = int(lengths[index % len(lengths)])
        new = LONG_OUTPUTS.get(index % len(lengths), int(rng.integers(1, 16)))
        prompt = rng.integers(0, vocab_size, size).tolist()
        cases.append(
            Case(prompt, _params(rng, vocab_size, new), _wanted(rng, vocab_size, size, index))
        )
    return cases


def _params(rng: np.random.Generator, vocab_size: int, new: int) -> dict[str, Any]:
    """Sampling parameters of every kind but those that need a tokenizer."""
    some = [int(token) for token in rng.integers(0, vocab_size, 40)]
    # Where end tokens count, some may come and are put off for a while.
    ends = bool(rng.integers(0, 3) == 0)
    return {
        "max_new_tokens": new,
        "sampling_seed": int(rng.integers(0, 1 << 62)),
        "ignore_eos": not ends,
        "stop_token_ids": some if ends else None,
        "min_new_tokens": int(rng.integers(0, new + 1)) if ends else 0,
        "temperature": float(rng.choice([0.0, 0.6, 1.0, 1.5])),
        "top_p": float(rng.choice([1.0, 0.9, 0.5])),
        "top_k": int(rng.choice([-1, 1, 20])),
        "min_p": float(rng.choice([0.0, 0.1])),
        "frequency_penalty": float(rng.choice([0.0, 0.0, 0.8, -0.4])),
        "presence_penalty": float(rng.choice([0.0, 0.0, 0.6, -0.2])),
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.3, 0.9])),
        "logit_bias": {some[0]: 2.5, some[1]: -1.5} if rng.integers(0, 2) else None,
    }


def _wanted(rng: np.random.Generator, vocab_size: int, size: int, index: int) -> dict[str, Any]:
    """Log-probabilities of every kind."""
    ids = [int(token) for token in rng.integers(0, vocab_size, 5)]
    return {
        "return_logprob": True,
        "logprob_start_len": (-1, 0, size // 2)[index % 3],
        "top_logprobs_num": int(rng.choice([0, 1, 20])),
        "token_ids_logprob": ids if rng.integers(0, 2) else None,
        "return_state_digest": True,
    }


POISONED = Case(
    [1] * 70,
    {"max_new_tokens": 25, "ignore_eos": True},
    {"return_logprob": True, "return_state_digest": True},
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an engine runs; hashable, so that it names the results of a golden run.

    Attributes:
      directory: of the model.
      load_format: of the weights.
      dtype: of the activations.
      state_dtype: of the sealed states.
    """

    directory: Path
    load_format: str = "auto"
    dtype: str = "float32"
    state_dtype: str = "float32"

    def engine(self, **arguments: Any) -> Engine:
        """An engine without a tokenizer, its memory filled with NaN."""
        engine = Engine(
            self.directory,
            load_format=self.load_format,
            dtype=self.dtype,
            state_dtype=self.state_dtype,
            skip_tokenizer_init=True,
            context_length=CONTEXT,
            **arguments,
        )
        _fill_with_nan(engine)
        return engine


@contextlib.contextmanager
def one_program() -> Iterator[None]:
    """Compile engines for the widest step only: half the time, and the same bits by law."""
    widest = property(lambda config: (config.max_rows,))
    with mock.patch.object(EngineConfig, "row_buckets", widest):
        yield


def nan_of(array: jax.Array) -> jax.Array:
    """What an array of the state holds for a NaN."""
    return to_bits(jnp.asarray(jnp.nan, jnp.float32), array.dtype)


def _fill_with_nan(engine: Engine) -> None:
    """Make every row that nobody wrote a NaN, but the state that sequences start from."""
    runner = engine.core.runner

    def fill(path: Any, array: jax.Array) -> jax.Array:
        if array.dtype == jnp.int32:
            return array
        bad = jnp.full_like(array, nan_of(array))
        return bad.at[0].set(array[0]) if ".sealed" in jax.tree_util.keystr(path) else bad

    runner._state = jax.tree_util.tree_map_with_path(fill, runner._state)


def request_of(engine: Engine, case: Case) -> Request:
    """A fresh request of a case."""
    wanted = Wanted(**case.wanted)
    (request,) = engine.inputs.read(None, case.params, case.prompt, wanted=wanted).requests
    return request


def golden_outcomes(setting: Setting, cases: list[Case]) -> list[Outcome]:
    """Every case alone in an engine of one slot, its prompt in one piece."""
    with (
        one_program(),
        setting.engine(max_running_requests=1, chunked_prefill_size=MAX_PROMPT) as engine,
    ):
        return engine.loop.call(lambda: [run_alone(engine, case) for case in cases])


def run_alone(engine: Engine, case: Case) -> Outcome:
    """One case with nobody beside it."""
    request = request_of(engine, case)
    engine.core.scheduler.add(request)
    while not request.is_finished:
        engine.core.step()
    return Outcome.of(request)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How some cases run together.

    Attributes:
      cases: indices, in order of arrival.
      arrivals: step at which each arrives.
      chunk: prefill chunk, 0 for random sizes.
      is_poisoned: a request whose rows are NaN runs beside them.
      is_preempted: requests are preempted at moments that were not met yet.
      is_starved: the blocks hold the largest request and no more.
      seed: of the random chunks.
    """

    cases: tuple[int, ...]
    arrivals: tuple[int, ...]
    chunk: int
    is_poisoned: bool
    is_preempted: bool
    is_starved: bool
    seed: int

    def chunk_len(self) -> Callable[[int], int]:
        """Rows to take when some are left."""
        rng = np.random.default_rng(self.seed)
        if self.chunk:
            return lambda remaining: min(self.chunk, remaining)
        return lambda remaining: int(rng.integers(1, remaining + 1))


def make_schedule(seed: int, cases: list[Case]) -> Schedule:
    """A random schedule; chunk sizes take turns so that all of them occur."""
    rng = np.random.default_rng(seed)
    chunk = (*CHUNKS, RANDOM)[seed % (len(CHUNKS) + 1)]
    # A long prompt that is fed row by row takes as many steps as all other schedules.
    longest = MAX_BY_ROW if chunk == 1 else MAX_PROMPT
    # Where blocks are few, requests that begin with one and come to need another run out of them.
    is_starved = seed % 2 == 1 and chunk <= BLOCK + 1
    longest = BLOCK + 1 if is_starved else longest
    fitting = [i for i, case in enumerate(cases) if len(case.prompt) <= longest]
    size = len(fitting) if is_starved else min(int(rng.integers(3, 8)), len(fitting))
    chosen = tuple(int(i) for i in rng.choice(fitting, size, replace=False))
    arrivals = tuple(sorted(int(i) for i in rng.integers(0, 4 if is_starved else 12, len(chosen))))
    return Schedule(
        chosen,
        arrivals,
        chunk,
        is_poisoned=seed % 3 == 0,
        is_preempted=seed % 4 != 3,
        is_starved=is_starved,
        seed=seed,
    )


@dataclasses.dataclass
class Happened:
    """What a schedule, or several, came to do.

    Attributes:
      pieces: sizes of the pieces of prompts that were computed in several.
      num_steps, num_shared: steps, and those with rows of more than one request.
      num_poisoned: steps with rows of NaN beside others.
      num_seals: states stored.
      num_forced, num_starved: preemptions by the schedule, and for want of blocks.
      slots: batch slots that requests ran in.
    """

    pieces: set[int] = dataclasses.field(default_factory=set)
    num_steps: int = 0
    num_shared: int = 0
    num_poisoned: int = 0
    num_seals: int = 0
    num_forced: int = 0
    num_starved: int = 0
    slots: set[int] = dataclasses.field(default_factory=set)

    def add(self, other: "Happened") -> None:
        """Count another schedule's as well."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, mine | theirs if isinstance(mine, set) else mine + theirs)

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.num_steps} steps, {self.num_shared} of several requests, {self.num_poisoned} "
            f"beside rows of NaN, {len(self.pieces)} sizes of prompt pieces, {self.num_seals} "
            f"seals, {self.num_forced} forced preemptions, {self.num_starved} for want of blocks"
        )

    def saw(self, work: list[Work], results: list[StepResult], poison: Request | None) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_shared += len(work) > 1
        self.slots |= {item.request.slot for item in work}
        for item in work:
            if item.request.remaining_prefill and len(item.ids) < item.request.prompt_len:
                self.pieces.add(len(item.ids))
        is_nan = [
            np.isnan(log_probability)
            for result in results
            if result.request is poison
            for log_probability in result.sampled.tokens
        ]
        self.num_poisoned += any(is_nan) and len(work) > 1


class ScheduleRunner:
    """An engine of several slots that runs schedules one after another, over what earlier ones
    left in its pools.

    Attributes:
      cover: the moments at which requests were preempted.
    """

    def __init__(self, setting: Setting):
        self.engine = setting.engine(max_running_requests=4, chunked_prefill_size=128)
        self.cover = Cover()
        self._run = self.engine.core.runner.run
        self.engine.core.runner.run = self._observed  # type: ignore[method-assign]
        self._happened, self._poison = Happened(), None

    def _observed(self, work: list[Work]) -> list[StepResult]:
        poison = self._poison
        if poison is not None and poison.slot >= 0 and poison.committed_len > 0:
            self._spoil(poison.slot)
        results = self._run(work)
        self._happened.saw(work, results, self._poison)
        return results

    def _spoil(self, slot: int) -> None:
        """Make NaN of the last rows that the first layer's convolution looks back to."""
        runner = self.engine.core.runner
        first, *others = runner._state.layers
        assert isinstance(first.mixer, GdnState)
        mixer = dataclasses.replace(
            first.mixer, conv=first.mixer.conv.at[slot].set(nan_of(first.mixer.conv))
        )
        layers = (dataclasses.replace(first, mixer=mixer), *others)
        runner._state = dataclasses.replace(runner._state, layers=layers)

    def run(self, schedule: Schedule, cases: list[Case]) -> tuple[list[Outcome], Happened]:
        """Outcomes of the schedule's cases, in its order, and what happened."""
        return self.engine.loop.call(lambda: self._run_schedule(schedule, cases))

    def _run_schedule(
        self, schedule: Schedule, cases: list[Case]
    ) -> tuple[list[Outcome], Happened]:
        core, self._happened = self.engine.core, Happened()
        scheduler = core.scheduler
        scheduler.chunk_len = schedule.chunk_len()
        before = scheduler.num_retractions
        requests = [request_of(self.engine, cases[i]) for i in schedule.cases]
        self._poison = request_of(self.engine, POISONED) if schedule.is_poisoned else None
        if self._poison is not None:
            core.add(self._poison)
        held = Held(scheduler, self._num_blocks(schedule, cases))
        waiting, at = list(zip(schedule.arrivals, requests, strict=True)), 0
        while waiting or not core.is_idle:
            while waiting and waiting[0][0] <= at:
                core.add(waiting.pop(0)[1])
            if not core.is_idle:
                held.between_steps()
                self._step(schedule)
            at += 1
        held.give_back()
        scheduler.check_integrity()
        scheduler.chunk_len = lambda remaining: remaining
        self._happened.num_starved = scheduler.num_retractions - before - self._happened.num_forced
        self._happened.num_seals = sum((r.committed_len - 1) // BLOCK for r in requests)
        return [Outcome.of(request) for request in requests], self._happened

    def _num_blocks(self, schedule: Schedule, cases: list[Case]) -> int:
        """Blocks of the pool that a schedule may use."""
        scheduler = self.engine.core.scheduler
        if not schedule.is_starved:
            return scheduler.capacities.num_blocks
        longest = max(case.max_len for case in [POISONED, *(cases[i] for i in schedule.cases)])
        return -(-longest // BLOCK)

    def _step(self, schedule: Schedule) -> None:
        """A step, with preemptions before it and of what was admitted for it."""
        core, chunk = self.engine.core, schedule.chunk
        if schedule.is_preempted:
            self._happened.num_forced += self.cover.between_steps(core.scheduler, chunk)
        work = core.plan()
        for item in list(work):
            new = item.request.committed_len == 0
            if schedule.is_preempted and new and self.cover.is_met(item.request, chunk):
                core.scheduler.preempt(item.request)
                self._happened.num_forced += 1
                work.remove(item)
        if work:
            core.advance(work, core.run(work))


def scored(engine: Engine, case: Case, outcome: Outcome) -> str | None:
    """How an output's log-probabilities differ when prefill scores them again, if they do (L6)."""
    num_top = case.wanted["top_logprobs_num"]
    result = engine.score([*case.prompt, *outcome.tokens], top_logprobs_num=num_top)
    assert isinstance(result, dict)
    info, start = result["meta_info"], len(case.prompt)
    values = [row[0] for row in info["input_token_logprobs"][start:]]
    if np.asarray(values, np.float32).tobytes() != outcome.log_probabilities:
        return "scores"
    if num_top:
        top = [[row[:2] for row in rows] for rows in info["input_top_logprobs"][start:]]
        if repr(top) != dict(outcome.others)["output_top_logprobs"]:
            return "top scores"
    return None
