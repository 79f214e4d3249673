"""`drift`: plain decoding beside verify rounds, the state of every layer compared bit for bit."""

import argparse
import collections
import csv
import dataclasses
from pathlib import Path
from typing import Any

from pallas_kernels.gated_delta_net import StateDtype
from qwen_hybrid.prepare import prepare
from serve.cli.command import Command
from serve.cli.errors import EXIT_FAILED, EXIT_OK, UsageError
from serve.cli.flags import MODEL_FLAGS, Flag
from serve.cli.terminal import note
from serve.loading import load_model, use_compilation_cache
from serve.model_path import resolve_model_path
from serve.speculation import MAX_WIDTH
from spec.drift import (
    Cell,
    Fault,
    Point,
    Program,
    Report,
    Rounds,
    name,
    run,
    tokens_needed,
    write_heat_map,
)

EXPERIMENT_FLAGS = (
    Flag(name="input_ids", read=int, is_list=True, help="token ids of the prompt"),
    Flag(name="rounds", read=int, default=95, help="verify rounds"),
    Flag(
        name="num_draft_tokens",
        read=int,
        default=2,
        aliases=("--speculative-num-draft-tokens",),
        help="rows of a verify window: the drafts, and the target's own token",
    ),
    Flag(
        name="accept_pattern",
        default="reject",
        metavar="reject|accept|random|K",
        help="drafts that each round accepts: none, all, some, or K",
    ),
    Flag(name="pattern_seed", read=int, default=0, help="of the random pattern"),
    Flag(
        name="fault",
        choices=tuple(fault.value for fault in Fault),
        help="what the verify path is to do wrong",
    ),
)
OUTPUT_FLAGS = (
    Flag(
        name="plot",
        metavar="FILE",
        help="write a heat map, as PNG by its suffix; needs the extra plot",
    ),
    Flag(name="cells", metavar="FILE", help="write every difference as CSV"),
)
_MODEL_FLAGS = ("model_path", "load_format", "dtype", "mamba_ssm_dtype", "compilation_cache_dir")


def _model_flags() -> tuple[Flag, ...]:
    """The options of a model that matter without an engine."""
    flags = {flag.name: flag for flag in MODEL_FLAGS if flag.name in _MODEL_FLAGS}
    stored = flags["mamba_ssm_dtype"]
    flags["mamba_ssm_dtype"] = dataclasses.replace(stored, aliases=("--state-dtype",))
    return tuple(flags.values())


# What the first relation to break points at.
BREAKS = {
    Point.CARRIED: "something else wrote the state between two rounds",
    Point.VERIFY_IN: "the two runs did not start from the same state",
    Point.ROW: "the layers before it are equal: what this one computes of a row differs",
    Point.STORED: "the commit took another row, or put it in another place",
    Point.COMMIT: "the commit took another row, or put it in another place",
}
LATER_ROW = "row 0 is equal: what the rows of a window hand on to one another differs"


def run_drift(args: argparse.Namespace) -> int:
    """Run the experiment and print the table; exit code 1 if anything differs."""
    rounds = _rounds(args)
    use_compilation_cache(args.compilation_cache_dir or None)
    directory = resolve_model_path(args.model_path)
    config, params, dtype = load_model(
        directory, None, load_format=args.load_format, dtype=args.dtype
    )
    fault = None if args.fault is None else Fault(args.fault)
    program = Program(
        config,
        width=args.num_draft_tokens,
        max_tokens=tokens_needed(len(args.input_ids), rounds, args.num_draft_tokens),
        dtype=dtype,
        state_dtype=StateDtype(args.mamba_ssm_dtype),
        faults=() if fault is None else (fault,),
    )
    report = run(program, prepare(params), input_ids=args.input_ids, rounds=rounds, fault=fault)
    title = f"{args.model_path}, {dtype}, sealed states {args.mamba_ssm_dtype}"
    doing = "no fault" if fault is None else f"{fault.value}: {fault.what}"
    print("\n".join([title, doing, *_lines(report, args)]))
    if args.cells is not None:
        _write_cells(report, Path(args.cells))
        note(f"{args.cells}: {len(report.cells)} differences")
    if args.plot is not None:
        write_heat_map(report, Path(args.plot), title=f"{title}\n{doing}")
        note(f"{args.plot}: heat map")
    return EXIT_OK if report.is_zero else EXIT_FAILED


def _rounds(args: argparse.Namespace) -> Rounds:
    """What the flags ask for.

    Raises:
      UsageError: something is missing or out of its range.
    """
    for flag in ("model_path", "input_ids"):
        if not getattr(args, flag):
            raise UsageError(f"--{'model' if flag == 'model_path' else 'input-ids'} is required")
    if args.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {args.rounds}")
    if not 2 <= args.num_draft_tokens <= MAX_WIDTH:
        raise UsageError(
            f"--num-draft-tokens must be in [2, {MAX_WIDTH}], got {args.num_draft_tokens}"
        )
    rounds = Rounds(args.rounds, args.accept_pattern, args.pattern_seed)
    try:
        rounds.accepted(args.num_draft_tokens)
    except ValueError as error:
        raise UsageError(f"--accept-pattern: {error}") from error
    return rounds


def _lines(report: Report, args: argparse.Namespace) -> list[str]:
    """What was found, for a reader."""
    histogram = collections.Counter(report.accepted)
    counts = [histogram[c] for c in range(max(histogram) + 1)]
    lines = [
        f"{len(args.input_ids)} ids, {len(report.accepted)} rounds of {args.num_draft_tokens} "
        f"rows, accepted drafts {counts}",
        "",
    ]
    lines += _table(report)
    if report.cells:
        lines.append(_first_break(report.cells[0]))
    if report.tokens:
        first = report.tokens[0]
        lines.append(
            f"first token that differs: output index {first.index} (round {first.round}), "
            f"{first.plain} in plain decoding, {first.verified} by verify; "
            f"{len(report.tokens)} rounds have one"
        )
    else:
        lines.append("every token is plain decoding's")
    same = report.num_cells - len(report.cells)
    lines.append(f"{report.num_cells} comparisons, {same} exactly zero, {len(report.cells)} not")
    if args.fault is not None and report.is_zero:
        lines.append("the fault changed no bit: a rounding hides it here, or nothing it touches is")
    return lines


def _table(report: Report) -> list[str]:
    """One line for every layer and kind of state."""
    by_where: dict[Any, list[Cell]] = collections.defaultdict(list)
    for cell in report.cells:
        by_where[cell.where].append(cell)
    head = f"{'state':<34}{'first difference':<24}{'cells':>7}{'max abs':>12}{'max ulps':>12}"
    lines = [head]
    for where in report.wheres:
        cells = by_where[where]
        if not cells:
            lines.append(f"{name(where):<34}{'none':<24}{0:>7}{0:>12}{0:>12}")
            continue
        largest = max(cell.difference.max_abs for cell in cells)
        ulps = max(cell.difference.max_ulps for cell in cells)
        lines.append(
            f"{name(where):<34}{_place(cells[0]):<24}{len(cells):>7}{largest:>12.3g}{ulps:>12}"
        )
    return [*lines, ""]


def _place(cell: Cell) -> str:
    row = f" {cell.row}" if cell.point is Point.ROW else ""
    return f"round {cell.round}, {cell.point.name.lower()}{row}"


def _first_break(cell: Cell) -> str:
    hint = LATER_ROW if cell.point is Point.ROW and cell.row else BREAKS[cell.point]
    return f"first break: {_place(cell)}, {name(cell.where)} ({cell.point.value}): {hint}"


def _write_cells(report: Report, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        columns = ("elements", "different", "max_abs", "max_ulps")
        out.writerow(("round", "point", "row", "layer", "kind", *columns))
        for cell in report.cells:
            point = cell.point.name.lower()
            out.writerow(
                (cell.round, point, cell.row, *cell.where, *dataclasses.astuple(cell.difference))
            )


COMMAND = Command(
    name="drift",
    help="compare the state of plain decoding and of verify rounds, layer by layer",
    groups={"experiment": EXPERIMENT_FLAGS, "output": OUTPUT_FLAGS, "model": _model_flags()},
    run=run_drift,
    epilog="forced reject: qwen-hybrid drift --model demo --input-ids 1 2 3 --rounds 95\n"
    "what drift looks like: qwen-hybrid drift --model demo --input-ids 1 2 3 "
    "--fault beta-rounding --plot drift.png",
)
