"""Time the engine on a demo model: prefill, decode by batch size, compilation apart.

    python -m benchmarks.run [--model demo] [--dtype bfloat16] [--skip-tests]

Runs the law schedules first and refuses to time on red. Writes benchmarks/results/engine.csv.
"""

import argparse
import csv
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serve.engine import Engine

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 4, 16)
PROMPT_LEN = 256
NEW_TOKENS = 64
REPEATS = 5


def revision() -> str:
    """The commit that is timed, with a mark if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "--short", "HEAD") + dirty


def processor() -> str:
    """Model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _timed(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    start = time.monotonic()
    params: Any = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    engine.generate(input_ids=prompts, sampling_params=params)
    return time.monotonic() - start


def measure(engine: Engine, batch: int) -> dict[str, Any]:
    """Median and spread of prefill and decode rates for one batch size."""
    prefill, decode = [], []
    for repeat in range(REPEATS):
        prompts = [[(7 * i + b + repeat) % 4000 for i in range(PROMPT_LEN)] for b in range(batch)]
        first = _timed(engine, prompts, 1)
        whole = _timed(engine, prompts, NEW_TOKENS + 1)
        prefill.append(batch * PROMPT_LEN / first)
        decode.append(batch * NEW_TOKENS / (whole - first))
    return {
        "batch": batch,
        "prefill_tokens_per_s": round(statistics.median(prefill), 1),
        "prefill_spread": round(max(prefill) - min(prefill), 1),
        "decode_tokens_per_s": round(statistics.median(decode), 1),
        "decode_spread": round(max(decode) - min(decode), 1),
    }


def main() -> int:
    """Run the benchmark; exit code 1 if the laws are red."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--skip-tests", action="store_true", help="time although nothing was run")
    arguments = parser.parse_args()
    if not arguments.skip_tests:
        command = [sys.executable, "-m", "pytest", "-q", "tests/laws"]
        if subprocess.run(command, check=False).returncode:
            print("the laws are red: nothing is timed", file=sys.stderr)
            return 1
    start = time.monotonic()
    with Engine(
        arguments.model,
        dtype=arguments.dtype,
        max_running_requests=max(BATCHES),
        context_length=1024,
    ) as engine:
        start_s = round(time.monotonic() - start, 1)
        rows = [measure(engine, batch) for batch in BATCHES]
    common = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "prompt_len": PROMPT_LEN,
        "new_tokens": NEW_TOKENS,
        "start_and_compile_s": start_s,
        "processor": processor(),
        "revision": revision(),
    }
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "engine.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *common])
        writer.writeheader()
        writer.writerows(row | common for row in rows)
    for row in rows:
        print(row)
    print(common)
    return 0


if __name__ == "__main__":
    sys.exit(main())
