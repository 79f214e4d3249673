"""Run the tests against deliberate bugs: every bug must make one fail.

    python -m tests.mutants.run [--only NAME ...] [--jobs N]

Prints a table and writes benchmarks/results/mutants.csv. The exit code is 1 if a mutant survives,
if a test fails for another reason than an assertion, or if the unchanged code is red.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.record import RESULTS, add_jobs_argument, provenance, write_csv
from tests.mutants.mutants import BY_NAME, MUTANTS, Mutant
from tests.source_tree import ROOT


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the tests made of a mutant.

    Attributes:
      mutant: its name, or "none" for the unchanged code.
      verdict: killed, survived, or crashed where a test fails for another reason than that what it
        asserts is false.
      killer: the first test that failed.
      how: the first line of its message.
      seconds: how long it took.
    """

    mutant: str
    breaks: str
    verdict: str
    killer: str
    how: str
    seconds: int


def run_tests(name: str, tests: tuple[str, ...]) -> tuple[int, dict[str, str], int]:
    """Run some tests on a mutant: (exit code, first failure, seconds)."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note.json"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x", "--full"),
            *("-p", "tests.mutants.plugin", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("--mutant", name, "--note", str(note), *tests),
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{name or 'control'}: pytest failed\n{done.stdout}{done.stderr}")
        failure = json.loads(note.read_text()) if note.exists() else {}
    return done.returncode, failure, round(time.monotonic() - start)


def judge(mutant: Mutant) -> Verdict:
    """Run a mutant's killers."""
    code, failure, seconds = run_tests(mutant.name, mutant.killers)
    verdict = "survived"
    if code:
        verdict = "killed" if failure.get("kind") == "AssertionError" else "crashed"
    killer = failure.get("test", "").rpartition("/")[2]
    how = " ".join(failure.get("message", "").split())[:120]
    if verdict == "crashed":
        how = f"{failure.get('kind')}: {how}"
    return Verdict(mutant.name, mutant.breaks, verdict, killer, how, seconds)


def control(mutants: list[Mutant]) -> Verdict:
    """Run the killers of some mutants on the unchanged code, which must survive them all."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.killers))
    code, failure, seconds = run_tests("", tests)
    killer, how = failure.get("test", ""), failure.get("message", "")[:120]
    return Verdict("none", "nothing", "killed" if code else "survived", killer, how, seconds)


def main() -> int:
    """Run every mutant and the control."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], choices=[*BY_NAME], metavar="NAME")
    parser.add_argument("--output", type=Path, default=RESULTS / "mutants.csv")
    add_jobs_argument(parser)
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.only or m.name in arguments.only]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = [pool.submit(control, chosen), *(pool.submit(judge, m) for m in chosen)]
        for future in as_completed(futures):
            verdict = future.result()
            print(
                f"{verdict.mutant:32}{verdict.verdict:10}{verdict.seconds:4} s  {verdict.killer}",
                flush=True,
            )
    verdicts = [future.result() for future in futures]
    common = provenance()
    write_csv(arguments.output, [dataclasses.asdict(verdict) | common for verdict in verdicts])
    expected = ["survived"] + ["killed"] * len(chosen)
    return int([verdict.verdict for verdict in verdicts] != expected)


if __name__ == "__main__":
    sys.exit(main())
