"""Random schedules against golden solo runs.

A golden run is one request alone in an engine of one slot, its prompt prefilled in one piece. A
schedule runs several of the same requests together in another engine: other batch shapes, other
slots and blocks, chunks of other sizes, other arrival times, sometimes beside a request full of
NaN. Tokens, log-probabilities and state digests must be the same bits.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from serve.engine import Engine
from serve.request import Request

CHUNKS = (1, 17, 63, 64, 65, 100)
CONTEXT = 512


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
    """Random requests whose prompts and outputs end on, before and after block boundaries.

    Prompts leave out the last id, the poisoned neighbour's.
    """
    lengths = (1, 2, 15, 16, 17, 62, 63, 64, 65, 100, 127, 128, 129, 190)
    cases = []
    for index in range(count):
        size = int(lengths[index % len(lengths)])
        params: dict[str, Any] = {
            "max_new_tokens": int(rng.integers(1, 70)),
            "sampling_seed": int(rng.integers(0, 1 << 62)),
            "ignore_eos": True,
            "temperature": float(rng.choice([0.0, 0.6, 1.0, 1.5])),
            "top_p": float(rng.choice([1.0, 0.9, 0.5])),
            "top_k": int(rng.choice([-1, 1, 20])),
            "min_p": float(rng.choice([0.0, 0.1])),
        }
        cases.append(Case(rng.integers(0, vocab_size - 1, size).tolist(), params))
    return cases


def _engine(directory: str | Path, **arguments: Any) -> Engine:
    return Engine(directory, skip_tokenizer_init=True, context_length=CONTEXT, **arguments)


def request_of(engine: Engine, case: Case) -> Request:
    """A fresh request of a case."""
    (request,), _ = engine.requests(None, case.params, case.prompt, None)
    request.return_logprob = request.return_state_digest = True
    return request


def golden_outcomes(
    directory: str | Path, cases: list[Case], **arguments: Any
) -> tuple[list[Case], list[Outcome]]:
    """Every case alone, prefilled in one piece; cases that made the poisoned id are left out."""
    kept, outcomes = [], []
    with _engine(
        directory, max_running_requests=1, chunked_prefill_size=CONTEXT // 2, **arguments
    ) as engine:
        for case in cases:
            request = request_of(engine, case)
            engine.scheduler.add(request)
            while not request.is_finished:
                engine.step()
            if engine.model_config.vocab_size - 1 not in request.output_ids:
                kept.append(case)
                outcomes.append(Outcome.of(request))
    return kept, outcomes


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How some cases run together.

    Attributes:
      cases: indices, in order of arrival.
      arrivals: step at which each arrives.
      chunk: prefill chunk, 0 for random sizes.
      is_poisoned: a request of NaN runs beside them.
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


def make_schedule(seed: int, num_cases: int) -> Schedule:
    """A random schedule; chunk sizes take turns so that all of them occur."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 9))
    chosen = tuple(int(i) for i in rng.choice(num_cases, min(size, num_cases), replace=False))
    arrivals = tuple(sorted(int(i) for i in rng.integers(0, 40, len(chosen))))
    chunk = (*CHUNKS, 0)[seed % (len(CHUNKS) + 1)]
    return Schedule(chosen, arrivals, chunk, bool(seed % 3 == 0), seed)


class ScheduleRunner:
    """An engine of several slots that runs schedules one after another, over what earlier ones
    left in its pools."""

    def __init__(self, directory: str | Path, **arguments: Any):
        self.engine = _engine(
            directory, max_running_requests=4, chunked_prefill_size=128, **arguments
        )
        self._poison = self.engine.model_config.vocab_size - 1
        params = self.engine._runner._params
        row = params["embed_tokens"].at[self._poison].set(jnp.nan)
        params["embed_tokens"] = row

    def run(self, schedule: Schedule, cases: list[Case]) -> list[Outcome]:
        """Outcomes of the schedule's cases, in its order."""
        engine = self.engine
        engine.scheduler.chunk_len = schedule.chunk_len()
        requests = [request_of(engine, cases[i]) for i in schedule.cases]
        if schedule.is_poisoned:
            poisoned = Case([self._poison] * 70, {"max_new_tokens": 40, "ignore_eos": True})
            engine.scheduler.add(request_of(engine, poisoned))
        waiting, at = list(zip(schedule.arrivals, requests, strict=True)), 0
        while waiting or not engine.scheduler.is_idle:
            while waiting and waiting[0][0] <= at:
                engine.scheduler.add(waiting.pop(0)[1])
            if not engine.scheduler.is_idle:
                engine.step()
            at += 1
        engine.scheduler.check_integrity()
        return [Outcome.of(request) for request in requests]


def scored(engine: Engine, case: Case, outcome: Outcome) -> bytes:
    """Log-probabilities of a case's output, scored again by prefill (law L6)."""
    ids = [*case.prompt, *outcome.tokens]
    result = engine.score(ids)
    assert isinstance(result, dict)
    rows = result["meta_info"]["input_token_logprobs"][len(case.prompt) :]
    return np.asarray([row[0] for row in rows], np.float32).tobytes()
