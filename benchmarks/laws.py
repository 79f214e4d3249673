"""The laws in full: random schedules, scores and a second process beside golden solo runs.

    python -m benchmarks.laws [--schedules 75] [--models demo demo-dense] [--dtypes ...] [--jobs N]

Prints a table and writes benchmarks/results/laws.csv. The exit code is 1 if any bit differs, or if
something that a law is about never happened.
"""

import argparse
import itertools
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, add_jobs_argument, provenance, write_csv
from serve.check import explain, run_laws, table
from serve.check.process import golden_elsewhere
from serve.model_path import PACKAGED_MODELS
from tests.laws.settings import DTYPES, TINY, setting_of


def rows_of(model: str, dtype: str, num_schedules: int) -> list[dict[str, Any]]:
    """The rows of one model in one dtype."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_of(model, dtype, Path(folder))
        there = golden_elsewhere(setting)
        run = run_laws(setting, num_schedules=num_schedules)
        run.compare_with_process(there)
        explain(run)
    seconds = round(time.monotonic() - start_s)
    lines = [f"{model} {dtype}, {seconds} s", *table(run.reports), run.happened.describe()]
    print("\n".join(lines), flush=True)
    return [
        {
            "law": report.law,
            "what": report.what,
            "model": model,
            "dtype": dtype,
            "status": report.status,
            "schedules": report.schedules,
            "tokens": report.tokens,
            "first_difference": str(report.first_difference or "none"),
            "seconds": seconds,
        }
        for report in run.reports
    ]


def main() -> int:
    """Run every model in every dtype; exit code 1 unless all that there is passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=75, help="of each model in each dtype")
    parser.add_argument(
        "--models", nargs="+", default=PACKAGED_MODELS, choices=[*PACKAGED_MODELS, *TINY]
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--output", type=Path, default=RESULTS / "laws.csv")
    add_jobs_argument(parser)
    arguments = parser.parse_args()
    runs = itertools.product(arguments.models, arguments.dtypes, [arguments.schedules])
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        futures = [pool.submit(rows_of, *run) for run in runs]
        rows = [row for future in futures for row in future.result()]
    common = provenance()
    write_csv(arguments.output, [row | common for row in rows])
    return int(any(row["status"] not in ("passed", "not available") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
