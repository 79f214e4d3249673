"""`bench-one-batch`: how fast one fixed batch is prefilled and decoded, step by step.

Nothing is scheduled: all prompts are computed, then every step decodes one token of each. The
scheduler only gives out the memory.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np

from serve.cli.command import Command
from serve.cli.errors import EXIT_FAILED, EXIT_OK, UsageError
from serve.cli.flags import ENGINE_GROUPS, Flag, engine_arguments, engine_config
from serve.cli.terminal import note
from serve.core import EngineCore
from serve.engine import Engine
from serve.engine_config import DEFAULT_CONTEXT
from serve.request import Request
from serve.sampling_params import SamplingParams

WARM_UP_TOKENS = 4
# Decode steps that get a line of their own; the median covers all of them.
NUM_SHOWN_STEPS = 5

BENCH_FLAGS = (
    Flag(name="batch_size", read=int, is_list=True, default=[1], help="sequences of a batch"),
    Flag(name="input_len", read=int, is_list=True, default=[1024], help="tokens of a prompt"),
    Flag(name="output_len", read=int, is_list=True, default=[16], help="tokens to generate"),
    Flag(name="run_name", default="default", metavar="NAME", help="names the run in the results"),
    Flag(
        name="result_filename",
        default="result.jsonl",
        metavar="FILE",
        help="results are appended to it; empty writes none",
    ),
    Flag(name="profile", read=bool, default=False, help="trace every run with JAX's profiler"),
    Flag(
        name="correctness_test",
        read=bool,
        default=False,
        help="compare the tokens with those of the engine instead; exit 1 if they differ",
    ),
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of a run: sequences, tokens of each prompt, tokens that each generates."""

    batch_size: int
    input_len: int
    output_len: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts, the same every time."""
        rng = np.random.default_rng(0)
        return rng.integers(0, vocab_size, (self.batch_size, self.input_len)).tolist()

    @property
    def params(self) -> SamplingParams:
        """Greedy, of known length."""
        return SamplingParams(temperature=0, max_new_tokens=self.output_len, ignore_eos=True)


class FixedBatch:
    """A batch that runs from its prompts to its ends alone on an idle engine.

    Attributes:
      requests: its sequences, with what they have generated.
    """

    def __init__(self, engine: Engine, shape: Shape):
        """Queue the requests; nothing is computed yet."""
        prompts = cast(Any, shape.prompts(engine.model_config.vocab_size))
        batch = engine.inputs.read(input_ids=prompts, sampling_params=shape.params)
        self._core: EngineCore = engine.core
        self.requests: list[Request] = batch.requests
        for request in self.requests:
            self._core.add(request)

    def prefill(self) -> float:
        """Compute all prompts and the first token of each; return the seconds it took."""
        start_s = time.perf_counter()
        while any(request.remaining_prefill for request in self.requests):
            self._step(is_prefill=True)
        return time.perf_counter() - start_s

    def decode(self) -> Iterator[float]:
        """Compute one more token of each until they end; give the seconds of every step."""
        while not all(request.is_finished for request in self.requests):
            start_s = time.perf_counter()
            self._step(is_prefill=False)
            yield time.perf_counter() - start_s

    def _step(self, *, is_prefill: bool) -> None:
        """Run one step to its end on the device; while prompts are left, no other row is in it."""
        core = self._core
        planned = core.plan()
        work = [w for w in planned if bool(w.request.remaining_prefill) == is_prefill]
        core.advance(work, core.run(work))
        if not core.runner.is_whole():
            raise RuntimeError("the decode state is lost")
        if core.scheduler.num_retractions:
            raise ValueError("the batch does not fit the memory; raise --memory-bytes")


def run(args: argparse.Namespace) -> int:
    """Run every combination of the sizes and print its figures."""
    shapes = [
        Shape(*sizes)
        for sizes in itertools.product(args.batch_size, args.input_len, args.output_len)
    ]
    arguments = _arguments(args, shapes)
    start_s = time.perf_counter()
    with Engine(**arguments) as engine:
        # Compilation and whatever else the first run waits for is over before anything is timed.
        count, rows = engine.core.runner.num_compiles, engine.engine_config.row_buckets
        print(f"Compile. {count} programs of {rows} rows, start: {_since(start_s):.1f} s")
        if args.correctness_test:
            return _compare(engine, shapes)
        for shape in shapes:
            with _profile(args, shape):
                result = {"run_name": args.run_name, **_time(engine, shape)}
            _append(args.result_filename, result)
    return EXIT_OK


def _since(start_s: float) -> float:
    return time.perf_counter() - start_s


def _arguments(args: argparse.Namespace, shapes: list[Shape]) -> dict[str, Any]:
    """Return the engine's arguments: those given, and room for the largest run."""
    for shape in shapes:
        for field in dataclasses.fields(shape):
            if getattr(shape, field.name) < 1:
                value = getattr(shape, field.name)
                raise UsageError(f"{field.name} must be at least 1, got {value}")
    longest = max(shape.input_len + shape.output_len for shape in shapes)
    largest = max(shape.batch_size for shape in shapes)
    arguments = {"max_running_requests": largest, **engine_arguments(args)}
    arguments["skip_tokenizer_init"] = True
    if args.context_length is None and longest > DEFAULT_CONTEXT:
        arguments["context_length"] = longest
    if engine_config(arguments).max_running_requests < largest:
        raise UsageError(f"a batch of {largest} does not fit --max-running-requests")
    return arguments


def _time(engine: Engine, shape: Shape) -> dict[str, Any]:
    """Run one shape twice, a few tokens to warm up and then in full; return its figures."""
    short = dataclasses.replace(shape, output_len=min(shape.output_len, WARM_UP_TOKENS))
    _run(engine, short)
    _, prefill_s, steps_s = _run(engine, shape)
    size = shape.batch_size
    print(f"Benchmark ... batch size {size}, input {shape.input_len}, output {shape.output_len}")
    print(f"Prefill. {_figures(prefill_s, shape.input_len * size)}")
    for i, step_s in enumerate(steps_s[:NUM_SHOWN_STEPS]):
        print(f"Decode {i}. Batch size: {size}, {_figures(step_s, size)}")
    result = {
        **dataclasses.asdict(shape),
        "prefill_latency": prefill_s,
        "prefill_throughput": shape.input_len * size / prefill_s,
    }
    if steps_s:
        median_s = statistics.median(steps_s)
        print(f"Decode.  median {_figures(median_s, size, 'median ')}")
        result |= {
            "median_decode_latency": median_s,
            "median_decode_throughput": size / median_s,
        }
    total_s = prefill_s + sum(steps_s)
    total = (shape.input_len + shape.output_len) * size
    print(f"Total. {_figures(total_s, total)}")
    return result | {
        "total_latency": total_s,
        "overall_throughput": total / total_s,
        # Without speculation every step gives one token.
        "accept_length": 1.0,
    }


def _run(engine: Engine, shape: Shape) -> tuple[FixedBatch, float, list[float]]:
    """Run a batch; return it, the seconds of the prefill and those of every decode step."""

    def timed() -> tuple[FixedBatch, float, list[float]]:
        batch = FixedBatch(engine, shape)
        prefill_s = batch.prefill()
        return batch, prefill_s, list(batch.decode())

    return engine.loop.call(timed)


def _figures(seconds: float, num_tokens: int, kind: str = "") -> str:
    return f"latency: {seconds:.5f} s, {kind}throughput: {num_tokens / seconds:.2f} token/s"


@contextlib.contextmanager
def _profile(args: argparse.Namespace, shape: Shape) -> Iterator[None]:
    """Trace what runs inside, if that was asked for."""
    if not args.profile:
        yield
        return
    name = (
        f"{args.run_name}_batch{shape.batch_size}_input{shape.input_len}_output{shape.output_len}"
    )
    folder = pathlib.Path(f"{name}.trace")
    with jax.profiler.trace(str(folder)):
        yield
    note(f"trace in {folder}")


def _append(path: str, result: dict[str, Any]) -> None:
    """Add a line to the file of results, if there is to be one."""
    if path:
        with pathlib.Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def _compare(engine: Engine, shapes: list[Shape]) -> int:
    """Compare fixed batches with the engine's own schedule, token by token."""
    num_wrong = 0
    for shape in shapes:
        batch, *_ = _run(engine, shape)
        prompts = shape.prompts(engine.model_config.vocab_size)
        results = cast(list, engine.generate(input_ids=prompts, sampling_params=shape.params))
        pairs = zip(batch.requests, results, strict=True)
        wrong = sum(request.output_ids != result["output_ids"] for request, result in pairs)
        print(f"Correctness. {shape}: {wrong} of {shape.batch_size} sequences differ")
        num_wrong += wrong
    return EXIT_FAILED if num_wrong else EXIT_OK


COMMAND = Command(
    name="bench-one-batch",
    help="time prefill and decode of one fixed batch",
    groups={"benchmark": BENCH_FLAGS, **ENGINE_GROUPS},
    run=run,
    epilog="qwen-hybrid bench-one-batch --model demo --batch-size 1 4 --input-len 256",
)
