"""Time the engine beside transformers on the demo models, in one run, compilation apart.

    python -m benchmarks.run [--models demo demo-dense] [--dtypes bfloat16 float32] [--skip-tests]

Runs the laws first and refuses to time on red. Every figure is the median of several rounds, in
which the contenders take turns. Writes benchmarks/results/engine.csv. Exit code 1 if the laws are
red, 2 if a ratio is below what is wanted of it.
"""

import argparse
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.contenders import CONTENDERS, MAX_BATCH, Process
from benchmarks.record import RESULTS, provenance, write_csv
from serve.model_path import resolve_model_path

ROUNDS = 5
PREFILL_LEN = 2000
# (what, argument, unit of the rate, how many units one measurement is)
METRICS = (
    ("decode", 1, 1),
    ("decode", MAX_BATCH, MAX_BATCH),
    ("prefill", PREFILL_LEN, PREFILL_LEN),
)
# Wanted of the engine's rate over that of transformers, by model, in the order of the metrics.
WANTED = {"demo": (2.0, 1.5, 1.0), "demo-dense": (1.2, 1.0, 0.5)}


def measure(model: str, dtype: str) -> list[dict[str, Any]]:
    """Rates of every contender on one model."""
    directory = resolve_model_path(model)
    processes = {name: Process(name, directory, dtype) for name in CONTENDERS}
    rows = []
    for index, (what, argument, units) in enumerate(METRICS):
        seconds: dict[str, list[float]] = {name: [] for name in processes}
        # The first round warms up.
        for round_ in range(ROUNDS + 1):
            for name, process in processes.items():
                taken = process.ask(what, argument)
                if round_ > 0:
                    seconds[name].append(taken)
        peer = statistics.median(seconds["transformers"])
        for name, taken in seconds.items():
            middle = statistics.median(taken)
            rows.append(
                {
                    "model": model,
                    "dtype": dtype,
                    "what": f"{what} {argument}",
                    "contender": name,
                    "tokens_per_s": round(units / middle, 1),
                    "milliseconds": round(1000 * middle, 2),
                    "spread_percent": round(100 * (max(taken) - min(taken)) / middle),
                    "over_transformers": round(peer / middle, 2),
                    "wanted": WANTED[model][index] if name == "engine" else "",
                    "start_s": round(processes[name].start_s, 1),
                }
            )
    for process in processes.values():
        process.quit()
    return rows


def laws_are_green() -> bool:
    """Run the schedule laws."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/laws"]
    return subprocess.run(command, check=False).returncode == 0


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(WANTED), choices=list(WANTED))
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], choices=("bfloat16", "float32")
    )
    parser.add_argument("--skip-tests", action="store_true", help="time although nothing was run")
    arguments = parser.parse_args()
    if not arguments.skip_tests and not laws_are_green():
        print("the laws are red: nothing is timed", file=sys.stderr)
        return 1
    common = provenance()
    rows = []
    for model in arguments.models:
        for dtype in arguments.dtypes:
            for row in measure(model, dtype):
                rows.append(row | common)
                print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    write_csv(RESULTS / "engine.csv", rows)
    print(common)
    short = [row for row in rows if row["wanted"] and row["over_transformers"] < row["wanted"]]
    for row in short:
        print(f"below what is wanted: {row}", file=sys.stderr)
    return 2 if short else 0


if __name__ == "__main__":
    sys.exit(main())
