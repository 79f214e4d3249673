"""Random schedules against golden solo runs.

A golden run is one request alone in an engine of one slot, its prompt prefilled in one piece. A
schedule runs several of the same requests together in another engine: other batch shapes, other
slots and blocks, chunks of other sizes, other arrival times, sometimes beside a request full of
NaN. Tokens, log-probabilities and state digests must be the same bits.
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

from qwen_hybrid.state import GdnState
from serve.engine import Engine
from serve.engine_config import EngineConfig
from serve.request import Request
from serve.runner import StepResult
from serve.scheduler import Work

CHUNKS = (1, 17, 63, 64, 65, 100)
# Longer than one span of attention.
CONTEXT = 384
MAX_PROMPT = 270
MAX_BY_ROW = 65


@dataclasses.dataclass(frozen=True)
class Case:
    """One request and what it gave alone.

    Attributes:
      prompt: token ids.
      params: sampling parameters, with a seed.
    """

    prompt: list[int]
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a request gave; equality is equality of bits."""

    tokens: tuple[int, ...]
    log_probabilities: bytes
    digests: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, request: Request) -> "Outcome":
        """The outcome of a finished request."""
        assert request.state_digests is not None
        return cls(
            tuple(request.output_ids),
            np.asarray(request.output_logprobs, np.float32).tobytes(),
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
        params: dict[str, Any] = {
            # One decodes through a whole block.
            "max_new_tokens": 70 if index % 16 == 5 else int(rng.integers(1, 16)),
            "sampling_seed": int(rng.integers(0, 1 << 62)),
            "ignore_eos": True,
            "temperature": float(rng.choice([0.0, 0.6, 1.0, 1.5])),
            "top_p": float(rng.choice([1.0, 0.9, 0.5])),
            "top_k": int(rng.choice([-1, 1, 20])),
            "min_p": float(rng.choice([0.0, 0.1])),
        }
        cases.append(Case(rng.integers(0, vocab_size, size).tolist(), params))
    return cases


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


def _fill_with_nan(engine: Engine) -> None:
    """Make every row that nobody wrote a NaN, but the state that sequences start from."""
    runner = engine.core.runner

    def fill(path: Any, array: jax.Array) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        bad = jnp.full_like(array, jnp.nan)
        return bad.at[0].set(array[0]) if ".sealed" in jax.tree_util.keystr(path) else bad

    runner._state = jax.tree_util.tree_map_with_path(fill, runner._state)


def request_of(engine: Engine, case: Case) -> Request:
    """A fresh request of a case."""
    (request,) = engine.inputs.read(None, case.params, case.prompt).requests
    request.return_logprob = request.return_state_digest = True
    return request


def golden_outcomes(setting: Setting, cases: list[Case]) -> list[Outcome]:
    """Every case alone in an engine of one slot, its prompt in one piece."""
    with (
        one_program(),
        setting.engine(max_running_requests=1, chunked_prefill_size=MAX_PROMPT) as engine,
    ):
        return [run_alone(engine, case) for case in cases]


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
      seed: of the random chunks.
    """

    cases: tuple[int, ...]
    arrivals: tuple[int, ...]
    chunk: int
    is_poisoned: bool
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
    chunk = (*CHUNKS, 0)[seed % (len(CHUNKS) + 1)]
    # A long prompt that is fed row by row takes as many steps as all other schedules.
    longest = MAX_BY_ROW if chunk == 1 else MAX_PROMPT
    fitting = [i for i, case in enumerate(cases) if len(case.prompt) <= longest]
    size = min(int(rng.integers(2, 7)), len(fitting))
    chosen = tuple(int(i) for i in rng.choice(fitting, size, replace=False))
    arrivals = tuple(sorted(int(i) for i in rng.integers(0, 25, len(chosen))))
    return Schedule(chosen, arrivals, chunk, bool(seed % 3 == 0), seed)


@dataclasses.dataclass
class Happened:
    """What a schedule, or several, came to do.

    Attributes:
      pieces: sizes of the pieces of prompts that were computed in several.
      num_steps, num_shared: steps, and those with rows of more than one request.
      num_poisoned: steps with rows of NaN beside others.
      num_seals: states stored.
      slots: batch slots that requests ran in.
    """

    pieces: set[int] = dataclasses.field(default_factory=set)
    num_steps: int = 0
    num_shared: int = 0
    num_poisoned: int = 0
    num_seals: int = 0
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
            f"beside rows of NaN, {len(self.pieces)} sizes of prompt pieces, {self.num_seals} seals"
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
    left in its pools."""

    def __init__(self, setting: Setting):
        self.engine = setting.engine(max_running_requests=4, chunked_prefill_size=128)
        self._run = self.engine.core.runner.run
        self.engine.core.runner.run = self._observed  # type: ignore[method-assign]
        self._happened, self._poison = Happened(), None

    def _observed(self, work: list[Work]) -> list[StepResult]:
        poison = self._poison
        if poison is not None and not poison.is_finished and poison.committed_len > 0:
            self._spoil(poison.slot)
        results = self._run(work)
        self._happened.saw(work, results, self._poison)
        return results

    def _spoil(self, slot: int) -> None:
        """Make NaN of the last rows that the first layer's convolution looks back to."""
        runner = self.engine.core.runner
        first, *others = runner._state.layers
        assert isinstance(first.mixer, GdnState)
        mixer = dataclasses.replace(first.mixer, conv=first.mixer.conv.at[slot].set(jnp.nan))
        layers = (dataclasses.replace(first, mixer=mixer), *others)
        runner._state = dataclasses.replace(runner._state, layers=layers)

    def run(self, schedule: Schedule, cases: list[Case]) -> tuple[list[Outcome], Happened]:
        """Outcomes of the schedule's cases, in its order, and what happened."""
        engine, self._happened = self.engine, Happened()
        engine.core.scheduler.chunk_len = schedule.chunk_len()
        requests = [request_of(engine, cases[i]) for i in schedule.cases]
        self._poison = None
        if schedule.is_poisoned:
            poisoned = Case([1] * 70, {"max_new_tokens": 25, "ignore_eos": True})
            self._poison = request_of(engine, poisoned)
            engine.core.scheduler.add(self._poison)
        waiting, at = list(zip(schedule.arrivals, requests, strict=True)), 0
        while waiting or not engine.core.scheduler.is_idle:
            while waiting and waiting[0][0] <= at:
                engine.core.scheduler.add(waiting.pop(0)[1])
            if not engine.core.scheduler.is_idle:
                engine.core.step()
            at += 1
        engine.core.scheduler.check_integrity()
        engine.core.scheduler.chunk_len = lambda remaining: remaining
        self._happened.num_seals = sum(
            (request.committed_len - 1) // engine.engine_config.block_size for request in requests
        )
        return [Outcome.of(request) for request in requests], self._happened


def scored(engine: Engine, case: Case, outcome: Outcome) -> bytes:
    """Log-probabilities of a case's output, scored again by prefill (law L6)."""
    ids = [*case.prompt, *outcome.tokens]
    result = engine.score(ids)
    assert isinstance(result, dict)
    rows = result["meta_info"]["input_token_logprobs"][len(case.prompt) :]
    return np.asarray([row[0] for row in rows], np.float32).tobytes()
