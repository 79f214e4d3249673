"""What the command is told, without a device."""

import re

import pytest

from qwen_hybrid.numerics import numerics
from qwen_hybrid.state import StateConfig
from serve.check import GIVEN, Drafting, LawRun
from serve.cli import check, main
from tests.serve.check.made_up import GOLDEN

STATE = StateConfig(num_slots=1, num_blocks=1, num_state_slots=2, blocks_per_slot=1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model is required"),
        (["--model", "demo", "--schedules", "0"], "schedules must be at least 1, got 0"),
        (["--model", "demo", "--max-running-requests", "1"], "max_running_requests must be at le"),
        (["--model", "demo", "--page-size", "24"], "block_size must be a multiple of 16, got 24"),
        (
            ["--model", "demo", "--speculative-num-draft-tokens", "4", "18"],
            "speculative_num_draft_tokens must be in [2, 17], got 18",
        ),
    ],
)
def test_what_cannot_be_is_exit_2(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(check, "golden_elsewhere", None)
    assert main(["check", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.fixture
def asked(monkeypatch, setting):
    """What the laws were asked to do; nothing runs, and every law passes."""
    calls = []

    def run_laws(setting, **options):
        calls.append((setting, options))
        run = LawRun(setting, [], [GOLDEN])
        run.numerics = numerics(STATE)
        for report in run.reports:
            report.tokens, report.is_available = 5, report.law not in ("L1", "L4", "L7")
        return run

    monkeypatch.setattr(check, "golden_elsewhere", lambda setting: [])
    monkeypatch.setattr(check, "run_laws", run_laws)
    return calls


def test_flags_reach_the_engines(asked):
    flags = ["--page-size", "32", "--mamba-ssm-dtype", "bfloat16", "--chunked-prefill-size", "96"]
    assert main(["check", "--model", "demo", *flags, "--schedules", "300"]) == 0
    [(setting, options)] = asked
    assert (setting.block_size, setting.state_dtype) == (32, "bfloat16")
    assert (setting.max_running_requests, setting.chunked_prefill_size) == (4, 96)
    assert (setting.load_format, setting.dtype) == ("auto", "auto")
    assert setting.directory.endswith("demo")
    assert options["num_schedules"] == 300
    assert {s.drafting for s in options["speculations"]} == {Drafting(GIVEN, 4)}


def test_drafters_and_widths_reach_the_schedules(asked):
    argv = ["check", "--model", "demo", "--speculative-algorithm", "NEXTN"]
    assert main([*argv, "--speculative-num-draft-tokens", "2", "4"]) == 0
    drafts = asked[-1][1]["speculations"]
    pairs = {(draft.drafting.algorithm, draft.drafting.width) for draft in drafts}
    assert pairs == {("NEXTN", 2), ("NEXTN", 4), (GIVEN, 2), (GIVEN, 4)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculative-num-draft-tokens", "18"], r"in \[2, 17\]"),
        (["--speculative-algorithm", "DFLASH"], "DFLASH is not supported"),
        (["--speculative-algorithm", "DSPARK"], "draft_model_path is needed by DSPARK"),
    ],
)
def test_drafters_that_there_are_none_of_are_refused(asked, capsys, flags, message):
    assert main(["check", "--model", "demo", *flags]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not asked
