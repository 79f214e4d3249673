"""The laws in full: random schedules, scores and a second process beside golden solo runs.

    python -m benchmarks.laws [--schedules 75] [--models demo demo-dense] [--dtypes ...] [--jobs N]

Prints a table and writes benchmarks/results/laws.csv. The exit code is 1 if any bit differs.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.record import RESULTS, add_jobs_argument, provenance, write_csv
from serve.model_path import PACKAGED_MODELS
from tests.laws.law_run import (
    DTYPES,
    TINY,
    LawRun,
    Report,
    run_laws,
    setting_of,
)
from tests.laws.solo_digest import NUM_CASES, digests

COLUMNS = ("law", "model", "dtype", "schedules", "tokens", "first_difference", "seconds")


def second_process(run: LawRun, model: str, dtype: str, folder: Path) -> Report:
    """Compare golden outcomes with those of a process that compiles anew."""
    command = [sys.executable, "-m", "tests.laws.solo_digest", model, dtype, str(folder / "other")]
    there = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    report = Report("L5", schedules=1)
    golden = run.golden[:NUM_CASES]
    for index, pair in enumerate(zip(digests(golden), there, strict=True)):
        difference = None if pair[0] == pair[1] else "digests of the two processes"
        report.saw(len(golden[index].tokens), difference, f"case {index}")
    return report


def rows_of(model: str, dtype: str, num_schedules: int) -> list[dict]:
    """The rows of one model in one dtype."""
    with tempfile.TemporaryDirectory() as folder:
        return _rows_of(model, dtype, num_schedules, Path(folder))


def _rows_of(model: str, dtype: str, num_schedules: int, folder: Path) -> list[dict]:
    start, rows = time.monotonic(), []

    def add(report: Report) -> None:
        nonlocal start
        now = time.monotonic()
        values = (
            report.law,
            model,
            dtype,
            report.schedules,
            report.tokens,
            report.first_difference or "none",
            round(now - start),
        )
        start = now
        row = dict(zip(COLUMNS, values, strict=True))
        print("  ".join(str(value).ljust(12) for value in row.values()), flush=True)
        rows.append(row)

    setting = setting_of(model, dtype, folder)
    run = run_laws(setting, num_schedules=num_schedules)
    add(run.schedules)
    add(run.scores)
    add(second_process(run, model, dtype, folder))
    print("  ", run.happened.describe(), flush=True)
    return rows


def main() -> int:
    """Run every model in every dtype; exit code 1 on a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=75, help="of each model in each dtype")
    parser.add_argument(
        "--models", nargs="+", default=PACKAGED_MODELS, choices=[*PACKAGED_MODELS, *TINY]
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--output", type=Path, default=RESULTS / "laws.csv")
    add_jobs_argument(parser)
    arguments = parser.parse_args()
    print("  ".join(name.ljust(12) for name in COLUMNS), flush=True)
    runs = itertools.product(arguments.models, arguments.dtypes, [arguments.schedules])
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        futures = [pool.submit(rows_of, *run) for run in runs]
        rows = [row for future in futures for row in future.result()]
    common = provenance()
    write_csv(arguments.output, [row | common for row in rows])
    return int(any(row["first_difference"] != "none" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
