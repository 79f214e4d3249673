"""The instrument on a tiny model: zero everywhere without a fault, and where each fault shows."""

import csv
import importlib
from typing import Any

import numpy as np
import pytest

from pallas_kernels.gated_delta_net import StateDtype
from qwen_hybrid import digest
from serve.cli import drift, main
from spec.drift import (
    Cell,
    Difference,
    Fault,
    Point,
    Program,
    Report,
    Rounds,
    heat_map,
    magnitudes,
    run,
)
from tests.spec.drift.conftest import WIDTH, Tiny, make

# Whole groups of index keys, so that none is pending.
IDS = [17, 4, 250, 9, 33, 33, 8, 120, 77, 5, 61, 2, 300, 14, 90, 41, 6, 18, 200, 3]
# Past the first block in the random pattern.
NUM_ROUNDS = 30
ALL = [Rounds(NUM_ROUNDS, "random"), Rounds(12, "accept"), Rounds(8), Rounds(8, "2")]

# State kinds of the recurrent layer that differ after row 0 of the first window, and some that do
# not, which tell the fault's place: what is computed before it is the same.
ARITHMETIC = {
    Fault.BETA_ROUNDING: ({"log_value"}, {"conv_state", "log_key", "log_key_scale", "log_gate"}),
    Fault.L2NORM_FORM: ({"log_key", "log_value"}, {"conv_state", "log_key_scale", "log_gate"}),
    Fault.STATE_ROUNDING: ({"log_value"}, {"conv_state", "log_key", "log_key_scale", "log_gate"}),
    Fault.CONV_TAPS: ({"log_key", "log_value"}, {"conv_state", "log_gate"}),
    Fault.SPLIT_BY_ROWS: ({"conv_state", "log_key", "log_value"}, {"log_gate"}),
}
# The same after the first commit; the rows of the window are right.
COMMITS = {
    Fault.RING_OVERWRITE: {(-1, "ids"), (0, "conv_state"), (0, "ple_conv_state")},
    Fault.COMMIT_OFF_BY_ONE: {(-1, "committed_len"), (0, "log_value"), (0, "conv_state")},
    Fault.COMMIT_ONE_SHORT: {(-1, "committed_len"), (0, "log_value"), (0, "conv_state")},
}


def test_every_fault_is_tested():
    assert {*ARITHMETIC, *COMMITS} == {*Fault}


@pytest.mark.parametrize("rounds", ALL, ids=lambda rounds: rounds.pattern)
def test_without_a_fault_every_cell_is_exactly_zero(tiny: Tiny, rounds: Rounds):
    report = run(tiny.program, tiny.params, input_ids=IDS, rounds=rounds)
    assert report.cells == [] and report.tokens == []
    assert report.accepted == rounds.accepted(WIDTH)
    # Before and after each round, carried over, as stored, and after each committed row.
    num_points = 4 * rounds.count - 1 + sum(c + 1 for c in report.accepted)
    assert report.num_cells == num_points * len(report.wheres)


def test_everything_that_a_digest_covers_is_compared(tiny: Tiny):
    program = tiny.program
    report = run(program, tiny.params, input_ids=IDS, rounds=Rounds(1))
    part = program.reader.snapshot(program.start().model).part
    names = set(digest.canonical(part, 0, program.config, program.state_config))
    names |= {
        f"layers.{i}.running_state" for i, m in enumerate(part.layers) if hasattr(m.mixer, "log")
    }
    found = {kind if i < 0 else f"layers.{i}.{kind}" for i, kind in report.wheres}
    assert found == names | {"committed_len"}


def test_the_program_of_the_faults_has_the_bits_of_plain_steps_if_none_is_chosen(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
):
    program, plain = tiny.program, Program.plain

    def steps(params: Any, state: Any, drafted: Any) -> Any:
        if drafted.drafts:
            return program.faulty(params, state, drafted, fault=None)
        return plain(program, params, state, drafted)

    monkeypatch.setattr(program, "plain", steps)
    report = run(program, tiny.params, input_ids=IDS, rounds=ALL[0])
    assert report.is_zero


def kinds_of(report: Report, point: Point) -> set[tuple[int, str]]:
    """What differs at a point of the first round, row 0."""
    cells = (c for c in report.cells if c.round == 0 and c.row == 0 and c.point is point)
    return {cell.where for cell in cells}


@pytest.mark.parametrize("fault", ARITHMETIC, ids=lambda fault: fault.value)
def test_a_fault_of_a_layer_shows_in_what_it_computes_and_all_that_follows(
    tiny: Tiny, fault: Fault
):
    broken, sound = ARITHMETIC[fault]
    rounds = Rounds(8, "1")
    report = run(tiny.program, tiny.params, input_ids=IDS, rounds=rounds, fault=fault)
    assert report.cells[0].point is Point.ROW and report.cells[0].round == 0
    found = kinds_of(report, Point.ROW)
    assert {(0, kind) for kind in broken | {"running_state"}} <= found
    assert not {(0, kind) for kind in sound} & found
    # The layer after it, and every later round.
    assert {(1, "key"), (1, "value")} <= found
    for number in range(1, rounds.count):
        assert any(c.round == number and c.point is Point.VERIFY_IN for c in report.cells)
    # The commit is sound: it keeps what the rows left.
    assert not any(c.point in (Point.CARRIED, Point.STORED) for c in report.cells)


@pytest.mark.parametrize("fault", COMMITS, ids=lambda fault: fault.value)
def test_a_fault_of_the_commit_shows_after_it_and_not_in_the_rows(tiny: Tiny, fault: Fault):
    report = run(tiny.program, tiny.params, input_ids=IDS, rounds=Rounds(8), fault=fault)
    assert report.cells[0].point is Point.STORED and report.cells[0].round == 0
    assert not kinds_of(report, Point.ROW)
    for point in (Point.STORED, Point.COMMIT):
        assert COMMITS[fault] <= kinds_of(report, point)
    assert not any(c.point is Point.CARRIED for c in report.cells)
    assert report.tokens


def test_pending_index_keys_are_lost_before_they_are_pooled(tiny: Tiny):
    # 23 rows, a group of 4 not complete: a window of 4 passes over the places of the pending ones.
    ids = [*IDS, 7, 7, 7]
    assert tiny.program.config.qsa is not None and tiny.program.config.qsa.ratio == 4
    fault = Fault.RING_OVERWRITE
    report = run(tiny.program, tiny.params, input_ids=ids, rounds=Rounds(1), fault=fault)
    # Layers before it are sound in this window, and so are the raw keys.
    assert kinds_of(report, Point.ROW) == {(1, "pooled_index_keys")}


@pytest.fixture
def shared(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The command over the programs that are compiled already."""

    def program(config: Any, *, width: int, max_tokens: int, faults: Any, **types: Any) -> Program:
        assert config == tiny.program.config and width == WIDTH
        assert max_tokens <= tiny.program.max_tokens and {*faults} <= {*Fault}
        assert types == {"dtype": "float32", "state_dtype": StateDtype.FLOAT32}
        return tiny.program

    monkeypatch.setattr(drift, "Program", program)
    return tiny


def command(tiny: Tiny, *more: str) -> list[str]:
    """Arguments of a short run."""
    return [
        *("drift", "--model", str(tiny.directory), "--load-format", "dummy"),
        *("--dtype", "float32", "--state-dtype", "float32", "--compilation-cache-dir", ""),
        *("--num-draft-tokens", str(WIDTH), "--rounds", "6", "--input-ids", *map(str, IDS), *more),
    ]


def test_command_without_a_fault_is_zero_and_exits_with_0(shared: Tiny, capsys):
    assert main(command(shared, "--accept-pattern", "random")) == 0
    text = capsys.readouterr().out
    assert "no fault" in text and "every token is plain decoding's" in text
    assert "exactly zero, 0 not" in text


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_command_with_a_fault_exits_with_1_and_names_the_first_break(
    shared: Tiny, capsys, tmp_path, fault: Fault
):
    file = tmp_path / "cells.csv"
    assert main(command(shared, "--fault", fault.value, "--cells", str(file))) == 1
    text = capsys.readouterr().out
    point = "stored" if fault in COMMITS else "row 0"
    assert fault.what in text and f"first break: round 0, {point}, " in text
    with file.open(encoding="utf-8") as lines:
        cells = list(csv.DictReader(lines))
    assert f"exactly zero, {len(cells)} not" in text
    assert all(int(cell["different"]) > 0 for cell in cells)


def test_a_fault_without_an_effect_is_said_to_have_none(shared: Tiny, capsys):
    # No verified row is left that a commit could count too many.
    assert main(command(shared, "--fault", "commit-off-by-one", "--accept-pattern", "accept")) == 0
    assert "the fault changed no bit" in capsys.readouterr().out


def test_heat_map_is_a_picture(shared: Tiny, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "drift.png"
    assert main(command(shared, "--fault", "state-rounding", "--plot", str(file))) == 1
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


def test_heat_map_without_matplotlib_names_the_extra(shared: Tiny, tmp_path, monkeypatch, capsys):
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    file = tmp_path / "drift.png"
    assert main(command(shared, "--plot", str(file))) == 1
    assert "qwen-hybrid[plot]" in capsys.readouterr().err and not file.exists()


def test_magnitudes_are_largest_differences_and_bits_without_one_are_infinite():
    where = (0, "value"), (1, "key")
    cells = [
        Cell(0, Point.ROW, 0, where[0], Difference(4, 1, 0.25, 3)),
        Cell(0, Point.ROW, 1, where[0], Difference(4, 1, 0.5, 3)),
        Cell(1, Point.ROW, 0, where[1], Difference(4, 2)),
        Cell(1, Point.COMMIT, 0, where[0], Difference(4, 1, 8.0, 3)),
    ]
    report = Report(wheres=where, num_cells=9, cells=cells, accepted=[1, 0])
    np.testing.assert_array_equal(magnitudes(report, Point.ROW), [[0.5, np.nan], [np.nan, np.inf]])
    assert heat_map.name((-1, "ids")) == "ids" and heat_map.name((2, "key")) == "layer 2 key"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--num-draft-tokens", "1"), "must be in [2, 17]"),
        (("--num-draft-tokens", "18"), "must be in [2, 17]"),
        (("--accept-pattern", "most"), "reject, accept, random or a number"),
        (("--fault", "none"), "choose from beta-rounding"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tiny: Tiny, capsys, more, text):
    assert main(command(tiny, *more)) == 2
    assert text in capsys.readouterr().err


def test_a_prompt_and_a_model_are_needed(capsys):
    assert main(["drift", "--model", "demo"]) == 2
    assert "--input-ids is required" in capsys.readouterr().err
    assert main(["drift", "--input-ids", "1"]) == 2
    assert "--model is required" in capsys.readouterr().err


def test_what_a_program_cannot_run_is_refused(tiny: Tiny):
    def attempt(ids: list[int], rounds: Rounds, fault: Fault | None = None) -> None:
        run(tiny.program, tiny.params, input_ids=ids, rounds=rounds, fault=fault)

    for ids in ([], [-1], [tiny.program.config.vocab_size]):
        with pytest.raises(ValueError, match="input ids must be"):
            attempt(ids, Rounds(1))
    with pytest.raises(ValueError, match="may need 332 positions; there are 320"):
        attempt(IDS, Rounds(76))


@pytest.mark.full
@pytest.mark.parametrize("model", ["tiny-q4", "tiny-dense"])
def test_bfloat16_too(tmp_path, model):
    tiny = make(tmp_path, model, "bfloat16")
    for rounds in ALL:
        assert run(tiny.program, tiny.params, input_ids=IDS, rounds=rounds).is_zero
    # The others change the last bits of float32, which most roundings to bfloat16 hide.
    for fault in (Fault.BETA_ROUNDING, Fault.STATE_ROUNDING, *COMMITS):
        report = run(tiny.program, tiny.params, input_ids=IDS, rounds=Rounds(8), fault=fault)
        assert report.cells, fault
