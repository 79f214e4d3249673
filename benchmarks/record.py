"""What every record says of the machine and the code."""

import argparse
import csv
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def revision() -> str:
    """The commit that is measured, with a mark if files differ from it."""

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


def add_jobs_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--jobs`."""
    jobs = max(1, (os.cpu_count() or 1) // 2)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes side by side")


def provenance() -> dict[str, str]:
    """Columns of every row: the processor, jaxlib and the revision."""
    return {
        "processor": processor(),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "revision": revision(),
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
