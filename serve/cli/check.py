"""`check`: the laws of docs/design.md on a model and this device, bit for bit."""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

from serve.check import (
    GIVEN,
    Drafting,
    LawRun,
    Setting,
    Speculation,
    explain,
    run_laws,
    speculations,
    table,
)
from serve.check.process import golden_elsewhere
from serve.cli.command import Command
from serve.cli.errors import EXIT_FAILED, EXIT_OK, UsageError
from serve.cli.flags import MEMORY_FLAGS, MODEL_FLAGS, Flag, engine_config
from serve.cli.terminal import note
from serve.model_path import resolve_model_path

# The check decides how long its requests are, and how much memory they need.
OWN = ("context_length", "memory_bytes", "max_running_requests", "chunked_prefill_size")

CHECK_FLAGS = (
    Flag(
        name="schedules",
        read=int,
        default=20,
        help="random schedules; 300 make a thorough check",
    ),
    Flag(name="json", metavar="FILE", help="write the table as data too"),
    Flag(
        name="max_running_requests",
        read=int,
        default=Setting.max_running_requests,
        help="sequences side by side in a schedule",
    ),
    Flag(
        name="chunked_prefill_size",
        read=int,
        default=Setting.chunked_prefill_size,
        help="prompt tokens of one step at most",
    ),
)
DRAFT_FLAGS = (
    Flag(
        name="speculative_algorithm",
        metavar="NAME",
        help="who else drafts in some of the schedules: NEXTN, DSPARK or NGRAM; in others the "
        "check drafts what it expects, and what it does not",
    ),
    Flag(
        name="speculative_draft_model_path",
        metavar="NAME_OR_DIR",
        help="draft model of DSPARK: demo-dspark, demo-dense-dspark or a directory",
    ),
    Flag(
        name="speculative_num_draft_tokens",
        read=int,
        is_list=True,
        default=[4],
        help="rows of a verify step, drafts + 1; several take turns",
    ),
)


def run(args: argparse.Namespace) -> int:
    """Check every law, print a table; exit code 1 if a bit differs or a law was not tested."""
    start_s = time.monotonic()
    setting, drafts = _setting(args), _speculations(args)
    if args.schedules < 1:
        raise UsageError(f"schedules must be at least 1, got {args.schedules}")
    if sys.stderr.isatty():
        note("a first run compiles four programs; first, a new process runs some requests alone")
    # First: an accelerator that this process uses may have no memory for another one.
    there = golden_elsewhere(setting)
    laws = run_laws(setting, num_schedules=args.schedules, speculations=drafts, is_shown=True)
    laws.compare_with_process(there)
    if any(report.first_difference for report in laws.reports):
        note("bits differ; what led there runs again, to find the first row of the state that does")
        explain(laws)
    data = _data(laws) | {"seconds": round(time.monotonic() - start_s, 1)}
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print("\n".join(table(laws.reports)))
    print(f"{laws.happened.describe()}; {data['seconds']} s")
    print(_verdict(laws))
    return EXIT_OK if laws.is_passed else EXIT_FAILED


def _setting(args: argparse.Namespace) -> Setting:
    """What to check.

    Raises:
      UsageError: no model, or a value out of its range.
    """
    if args.model_path is None:
        raise UsageError("--model is required")
    shape: dict[str, Any] = {
        "dtype": args.dtype,
        "state_dtype": args.mamba_ssm_dtype,
        "block_size": args.page_size,
        "max_running_requests": args.max_running_requests,
        "chunked_prefill_size": args.chunked_prefill_size,
    }
    engine_config(shape)
    if args.max_running_requests < 2:
        raise UsageError("max_running_requests must be at least 2, a request and one beside it")
    return Setting(
        directory=str(resolve_model_path(args.model_path)),
        load_format=args.load_format,
        compilation_cache_dir=args.compilation_cache_dir or None,
        **shape,
    )


def _speculations(args: argparse.Namespace) -> tuple[Speculation, ...]:
    """Ways of drafting to spread the schedules over.

    Raises:
      UsageError: a drafter or a width that there is none of.
    """
    draftings = []
    for width in dict.fromkeys(args.speculative_num_draft_tokens):
        draftings.append(Drafting(GIVEN, width))
        if args.speculative_algorithm is not None:
            path = args.speculative_draft_model_path
            draftings.append(Drafting(args.speculative_algorithm, width, path))
    for drafting in draftings:
        engine_config(drafting.arguments())
    return speculations(draftings)


def _data(laws: LawRun) -> dict[str, Any]:
    """Return the run as plain data."""
    assert laws.numerics is not None
    happened = dataclasses.asdict(laws.happened)
    return {
        "setting": dataclasses.asdict(laws.setting),
        "numerics": dataclasses.asdict(laws.numerics),
        "passed": laws.is_passed,
        "laws": [report.to_json() for report in laws.reports],
        "happened": {k: sorted(v) if isinstance(v, set) else v for k, v in happened.items()},
    }


def _verdict(laws: LawRun) -> str:
    """Return how many lines of the table came out how."""
    states = [report.status for report in laws.reports]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


COMMAND = Command(
    name="check",
    help="whether this model on this device gives the same bits whatever happens beside a request",
    groups={
        "check": CHECK_FLAGS,
        "speculation": DRAFT_FLAGS,
        "model": tuple(f for f in (*MODEL_FLAGS, *MEMORY_FLAGS) if f.name not in OWN),
    },
    run=run,
    epilog="qwen-hybrid check --model demo\n"
    "thoroughly, as data: qwen-hybrid check --model demo --schedules 300 --json laws.json",
)
