"""`score`: sums and perplexities of log-probabilities that are written down here."""

import asyncio
import json
import math

import pytest

from serve.cli import main
from tests.serve.cli.toy import ToyEngine

SCORE = ["score", "--model", "m"]


@pytest.fixture(autouse=True)
def with_toy(toy):
    """Every test here uses the toy engine: every token but the first has log-probability -1."""


def results(capsysbinary):
    """What was written to standard output."""
    return [json.loads(line) for line in capsysbinary.readouterr().out.decode().splitlines()]


def test_texts_get_sums_perplexities_and_tokens(capsysbinary):
    assert main([*SCORE, "--prompt", "abcd", "--prompt", "é"]) == 0
    out, err = capsysbinary.readouterr()
    first, second = map(json.loads, out.decode().splitlines())
    assert first == {
        "id": 0,
        "prompt_tokens": 4,
        "num_scored": 3,
        "logprob": -3.0,
        "perplexity": pytest.approx(math.e),
        "input_token_logprobs": [[None, 97, "a"], [-1, 98, "b"], [-1, 99, "c"], [-1, 100, "d"]],
    }
    # A single token has nothing to be scored by.
    assert (second["num_scored"], second["perplexity"]) == (0, None)
    assert b"[2 done, 0 failed; 3 tokens scored, perplexity 2.7183, in" in err


def test_a_text_file_is_one_text(tmp_path, capsysbinary):
    (tmp_path / "book.txt").write_text("two\nlines\n")
    flags = ["--text-file", str(tmp_path / "book.txt"), "--no-token-logprobs"]
    assert main([*SCORE, *flags, "--top-logprobs-num", "2"]) == 0
    [result] = results(capsysbinary)
    assert result["prompt_tokens"] == 10
    assert "input_token_logprobs" not in result
    assert len(result["input_top_logprobs"]) == 10
    assert ToyEngine.calls[0][1] == {"top_logprobs_num": 2}


def test_lines_may_hold_ids_and_conversations_and_errors(tmp_path, capsysbinary):
    lines = [
        {"input_ids": [97, 98], "id": "ids"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": ""},
        {"promt": "x"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main([*SCORE, "--input", str(tmp_path / "in.jsonl")]) == 1
    ids, chat, empty, unknown = results(capsysbinary)
    assert (ids["id"], ids["logprob"]) == ("ids", -1.0)
    # A conversation is scored as it stands, without the header of an answer.
    assert chat["prompt_tokens"] == len("user:hi;")
    assert empty["error"]["message"] == "a prompt needs at least one token"
    assert "did you mean 'prompt'?" in unknown["error"]["message"]


def test_results_go_to_a_file_and_are_not_computed_twice(tmp_path):
    out = tmp_path / "out.jsonl"
    argv = [*SCORE, "--prompt", "ab", "--prompt", "cd", "--output", str(out)]
    assert main(argv) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[:-1])
    assert main(argv) == 0
    assert out.read_bytes() == whole
    assert ToyEngine.calls == [([99, 100], {})]


def test_an_interrupt_cancels_what_is_under_way(monkeypatch):
    cancelled = []

    async def interrupted(self, ids, **options):
        if ids == [98]:
            raise KeyboardInterrupt
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(ids)
            raise

    monkeypatch.setattr(ToyEngine, "async_score", interrupted)
    assert main([*SCORE, "--prompt", "a", "--prompt", "b"]) == 130
    assert cancelled == [[97]]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--text-file", "a", "--prompt", "b"], 2, "give one of --prompt, --input and --text-file"),
        (["--text-file", "absent.txt"], 1, "absent.txt"),
    ],
)
def test_bad_options_are_one_line(capsys, flags, code, message):
    assert main([*SCORE, *flags]) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_text_that_is_no_text_is_named(tmp_path, capsys):
    (tmp_path / "book.txt").write_bytes(b"\xff")
    assert main([*SCORE, "--text-file", str(tmp_path / "book.txt")]) == 1
    assert "book.txt is not UTF-8" in capsys.readouterr().err
