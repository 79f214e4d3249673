"""The laws in full: random schedules, scores and a second process beside golden solo runs.

    python -m benchmarks.laws [--schedules 250] [--models demo demo-dense] [--dtypes ...] [--jobs N]

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
from serve.check import GIVEN, Drafting, explain, run_laws, speculations, table
from serve.check.process import golden_elsewhere
from serve.model_path import PACKAGED_MODELS
from tests.laws.settings import DTYPES, TINY, setting_of

ALGORITHMS = (GIVEN, "NGRAM", "NEXTN", "DSPARK")


def draftings_of(model: str) -> list[Drafting]:
    """Engines that draft, beside the one that does not."""
    draftings = [Drafting(GIVEN, 4), Drafting(GIVEN, 17), Drafting("NGRAM", 8)]
    if model in PACKAGED_MODELS:
        draftings.append(Drafting("NEXTN", 4))
        draftings.append(Drafting("DSPARK", 8, f"{model}-dspark"))
    return draftings


def rows_of(
    model: str, dtype: str, num_schedules: int, first_seed: int, algorithms: list[str]
) -> list[dict[str, Any]]:
    """The rows of one model in one dtype."""
    start_s = time.monotonic()
    draftings = [d for d in draftings_of(model) if d.algorithm in algorithms]
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_of(model, dtype, Path(folder))
        there = golden_elsewhere(setting)
        run = run_laws(
            setting,
            num_schedules=num_schedules,
            speculations=speculations(draftings),
            first_seed=first_seed,
        )
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
            "drafters": " ".join(f"{d.algorithm}:{d.width}" for d in draftings),
            "first_schedule": first_seed,
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
    parser.add_argument("--schedules", type=int, default=250, help="of each model in each dtype")
    parser.add_argument("--first-seed", type=int, default=0, help="number of the first of them")
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=list(ALGORITHMS),
        choices=ALGORITHMS,
        help="who drafts in some of them",
    )
    parser.add_argument(
        "--models", nargs="+", default=PACKAGED_MODELS, choices=[*PACKAGED_MODELS, *TINY]
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--output", type=Path, default=RESULTS / "laws.csv")
    add_jobs_argument(parser)
    arguments = parser.parse_args()
    runs = itertools.product(
        arguments.models,
        arguments.dtypes,
        [arguments.schedules],
        [arguments.first_seed],
        [arguments.algorithms],
    )
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        futures = [pool.submit(rows_of, *run) for run in runs]
        rows = [row for future in futures for row in future.result()]
    common = provenance()
    write_csv(arguments.output, [row | common for row in rows])
    return int(any(row["status"] not in ("passed", "not available") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
