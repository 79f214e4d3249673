"""`bench-offline`: throughput of the whole engine on random prompts, all given at once."""

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from serve.cli.command import Command
from serve.cli.errors import EXIT_OK, UsageError
from serve.cli.flags import ENGINE_GROUPS, Flag, engine_arguments
from serve.engine import Engine
from serve.engine_config import DEFAULT_CONTEXT

# How far back "last" reaches.
LAST_S = 1.0
WARM_UP_TOKENS = 4

BENCH_FLAGS = (
    Flag(
        name="dataset_name",
        choices=("random",),
        default="random",
        help="random tokens, lengths even from 1 or the ratio's share of the length to the length",
    ),
    Flag(name="num_prompts", read=int, default=1000, help="requests"),
    Flag(name="random_input_len", read=int, default=1024, help="tokens of the longest prompt"),
    Flag(name="random_output_len", read=int, default=1024, help="tokens of the longest completion"),
    Flag(
        name="random_range_ratio",
        read=float,
        default=0.0,
        help="shortest length by longest; 1 makes all lengths equal",
    ),
    Flag(name="seed", read=int, default=1, help="fixes prompts and lengths"),
    Flag(
        name="result_filename",
        default="",
        metavar="FILE",
        help="the figures are appended to it as JSON; empty writes none",
    ),
)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens each generates."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


def random_workload(args: argparse.Namespace, vocab_size: int) -> Workload:
    """Return random prompts; the same arguments give the same ones."""
    rng = np.random.default_rng(args.seed)

    def lengths(longest: int) -> list[int]:
        shortest = max(int(longest * args.random_range_ratio), 1)
        return rng.integers(shortest, longest + 1, args.num_prompts).tolist()

    input_lens, output_lens = lengths(args.random_input_len), lengths(args.random_output_len)
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in input_lens]
    return Workload(prompts, output_lens)


def run(args: argparse.Namespace) -> int:
    """Generate everything once and print the figures."""
    arguments = _arguments(args)
    start_s = time.perf_counter()
    with Engine(**arguments) as engine:
        num_programs = engine.core.runner.num_compiles
        print(f"Compile. {num_programs} programs, start: {time.perf_counter() - start_s:.1f} s")
        workload = random_workload(args, engine.model_config.vocab_size)
        _generate(engine, workload.prompts[:1], [min(workload.output_lens[0], WARM_UP_TOKENS)])
        start_s = time.perf_counter()
        # The results are on the host when this returns: nothing is left on the device.
        results = _generate(engine, workload.prompts, workload.output_lens)
        seconds = time.perf_counter() - start_s
    figures = measure(workload, results, seconds)
    _print(figures)
    if args.result_filename:
        with pathlib.Path(args.result_filename).open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")
    return EXIT_OK


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's arguments: those given, and room for the longest request."""
    for name in ("num_prompts", "random_input_len", "random_output_len"):
        if getattr(args, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(args, name)}")
    if not 0 <= args.random_range_ratio <= 1:
        raise UsageError(f"random_range_ratio must be in [0, 1], got {args.random_range_ratio}")
    arguments = engine_arguments(args) | {"skip_tokenizer_init": True}
    longest = args.random_input_len + args.random_output_len
    if args.context_length is None and longest > DEFAULT_CONTEXT:
        arguments["context_length"] = longest
    return arguments


def _generate(engine: Engine, prompts: list[list[int]], lens: list[int]) -> list[dict[str, Any]]:
    """Return the results of greedy requests of known length."""
    params: Any = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in lens]
    return cast(list, engine.generate(input_ids=prompts, sampling_params=params))


def measure(
    workload: Workload, results: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Return the figures of a run.

    Args:
      seconds: from the first request to the last result.
    """
    infos = [result["meta_info"] for result in results]
    num_generated = sum(info["completion_tokens"] for info in infos)
    num_input = workload.num_input_tokens
    return {
        "backend": "engine",
        "successful_requests": len(results),
        "total_latency": seconds,
        "total_input_tokens": num_input,
        "total_output_tokens": num_generated,
        "last_gen_throughput": last_throughput(infos),
        "request_throughput": len(results) / seconds,
        "input_throughput": num_input / seconds,
        "output_throughput": num_generated / seconds,
        "total_throughput": (num_input + num_generated) / seconds,
    }


def last_throughput(infos: Sequence[dict[str, Any]]) -> float:
    """Tokens per second at the end of the run.

    The tokens of a request count as evenly spaced from its first to its last.

    Args:
      infos: `meta_info` of requests that arrived together.
    """
    end = max(info["e2e_latency"] for info in infos)
    start = max(end - LAST_S, 0.0)
    num_tokens = 0.0
    for info in infos:
        first, last = info["first_token_latency"], info["e2e_latency"]
        if last > first:
            share = max(last - max(first, start), 0.0) / (last - first)
            num_tokens += share * (info["completion_tokens"] - 1)
        # The first token has no time before it that it could be spread over.
        num_tokens += first >= start
    return num_tokens / (end - start)


def _print(figures: dict[str, Any]) -> None:
    """Print the table."""
    rows = [
        ("Backend:", figures["backend"]),
        ("Successful requests:", figures["successful_requests"]),
        ("Benchmark duration (s):", f"{figures['total_latency']:.2f}"),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Last generation throughput (tok/s):", f"{figures['last_gen_throughput']:.2f}"),
        ("Request throughput (req/s):", f"{figures['request_throughput']:.2f}"),
        ("Input token throughput (tok/s):", f"{figures['input_throughput']:.2f}"),
        ("Output token throughput (tok/s):", f"{figures['output_throughput']:.2f}"),
        ("Total token throughput (tok/s):", f"{figures['total_throughput']:.2f}"),
    ]
    print(" Offline Throughput Benchmark Result ".center(50, "="))
    for label, value in rows:
        print(f"{label:<40} {value:<10}".rstrip())
    print("=" * 50)


COMMAND = Command(
    name="bench-offline",
    help="time the whole engine on many random requests",
    groups={"benchmark": BENCH_FLAGS, **ENGINE_GROUPS},
    run=run,
    epilog="qwen-hybrid bench-offline --model demo --num-prompts 32 --random-input-len 256",
)
