"""`generate`: text of one prompt; results of many in the order of the input, whatever happens."""

import io
import json
import random
import types

import pytest

from serve.cli import main
from serve.cli.results_file import ResultsFile, result_line
from serve.sampling_params import SamplingParams
from tests.serve.cli.toy import PIECES, ToyEngine


@pytest.fixture(autouse=True)
def with_toy(toy):
    """Every test here uses the toy engine."""


def lines_of(path):
    """The results in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_prompts(path, count, **more):
    """Write that many prompts with ids; return their lines."""
    lines = [json.dumps({"id": f"n{i}", "prompt": f"p{i}", **more}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return lines


def test_one_prompt_streams_text_and_sums_up_on_standard_error(capsys):
    assert main(["generate", "--model", "demo", "--prompt", "def f():"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(PIECES) + "\n"
    assert "[3 + 4 tokens, ended by length, first text after" in err
    assert "seed 5]" in err
    assert ToyEngine.calls == [("def f():", SamplingParams(), True)]
    assert ToyEngine.flags["max_running_requests"] == 1


def test_without_streaming_and_with_the_prompt(capsys):
    args = ["generate", "--model", "demo", "--prompt", "def f():", "--no-stream", "--echo"]
    assert main(args) == 0
    assert capsys.readouterr().out == "def f():" + "".join(PIECES) + "\n"
    assert ToyEngine.calls[0][2] is False


def test_results_come_in_the_order_of_the_input_under_random_completion(tmp_path, capsys):
    write_prompts(tmp_path / "in.jsonl", 60)
    argv = ["generate", "--model", "m", "--input", str(tmp_path / "in.jsonl")]
    assert main([*argv, "--output", str(tmp_path / "out.jsonl")]) == 0
    results = lines_of(tmp_path / "out.jsonl")
    assert [r["id"] for r in results] == [f"n{i}" for i in range(60)]
    assert [r["text"] for r in results] == [f"p{i}" for i in range(60)]
    # They did run side by side, and ended in another order.
    assert ToyEngine.most_under_way > 10
    assert [prompt for prompt, *_ in ToyEngine.calls] != [f"p{i}" for i in range(60)]
    assert "max_running_requests" not in ToyEngine.flags
    out, err = capsys.readouterr()
    assert out == ""
    assert "[60 done, 0 failed; 180 + 240 tokens, " in err


def test_at_most_a_window_is_under_way(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.cli.batch.WINDOW", 4)
    write_prompts(tmp_path / "in.jsonl", 30)
    assert main(["generate", "--model", "m", "--input", str(tmp_path / "in.jsonl")]) == 0
    assert 2 <= ToyEngine.most_under_way <= 4


def test_several_prompts_of_the_command_line_give_json_lines(capsysbinary):
    assert main(["generate", "--model", "m", "--prompt", "ü", "--prompt", "b", "--n", "2"]) == 0
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert lines[0].startswith('{"id": 0, "samples": [{"text": "ü"')
    assert [len(json.loads(line)["samples"]) for line in lines] == [2, 2]


@pytest.mark.parametrize("flags", [["--return-logprob"], ["--top-logprobs-num", "2"]])
def test_what_text_cannot_show_makes_one_prompt_a_json_line(capsysbinary, flags):
    assert main(["generate", "--model", "m", "--prompt", "x", *flags]) == 0
    assert json.loads(capsysbinary.readouterr().out)["text"] == "x"
    assert ToyEngine.calls[0][2]["return_logprob"] is True
    assert main(["generate", "--model", "m", "--prompt", "x", "--echo", *flags]) == 2


def test_standard_input_holds_every_kind_of_prompt(monkeypatch, capsysbinary):
    text = (
        '\ufeff{"prompt": "a\u2028b"}\n'
        "\n"
        '{"input_ids": [1, 2], "id": "ids", "sampling_params": {"seed": 2, "top_k": 9}}\n'
        '{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": 1}}\n'
        '{"prompt": "c", "return_logprob": true, "token_ids_logprob": [3]}'
    )
    stdin = types.SimpleNamespace(buffer=io.BytesIO(text.encode()), isatty=lambda: False)
    monkeypatch.setattr("sys.stdin", stdin)
    argv = ["generate", "--model", "m", "--seed", "1", "--logprob-start-len", "0", "--input", "-"]
    assert main([*argv, "--top-p", "0.5"]) == 0
    results = [json.loads(line) for line in capsysbinary.readouterr().out.decode().split("\n")[:-1]]
    assert [(r["id"], r["text"]) for r in results] == [
        (0, "a\u2028b"),
        ("ids", "[1, 2]"),
        (2, "user:hi;{'a': 1}assistant:"),
        (3, "c"),
    ]
    calls = {str(content): (params, options) for content, params, options in ToyEngine.calls}
    assert calls["[1, 2]"][0] == SamplingParams(sampling_seed=2, top_k=9, top_p=0.5)
    assert calls["[1, 2]"][1] == {"return_logprob": True, "logprob_start_len": 0}
    assert calls["c"][0] == SamplingParams(sampling_seed=1, top_p=0.5)
    assert calls["c"][1]["token_ids_logprob"] == [3]


BAD_LINES = {
    "{": "not JSON: ",
    "[" * 100_000: "not JSON: ",
    "3": "a line must be a JSON object, got int",
    '{"id": 1.5, "prompt": "x"}': "id must be a string or an integer, got 1.5",
    '{"id": "\\ud800", "prompt": "x"}': "id must be a string or an integer",
    '{"promt": "x"}': "unknown key 'promt'; did you mean 'prompt'?",
    '{"id": 77}': "give exactly one of prompt, messages, input_ids; got none",
    '{"prompt": "x", "input_ids": [1]}': "got prompt, input_ids",
    '{"prompt": ["x"]}': "prompt must be a string, got ['x']",
    '{"input_ids": [[1], [2]]}': "input_ids must be a list of integers, got a list of lists",
    '{"prompt": "x", "sampling_params": 3}': "sampling_params must be a JSON object, got 3",
    '{"prompt": "x", "sampling_params": {"top_p": 2}}': "top_p must be in (0, 1], got 2",
    '{"prompt": "", "id": "empty"}': "a prompt needs at least one token",
    '{"messages": [{"role": "user", "content": "refused"}]}': "the chat template: refused",
}


def test_a_bad_line_is_an_error_in_its_place_and_exit_1(tmp_path, capsys):
    good = '{"prompt": "good", "id": "good%d"}'
    lines = [line for i, bad in enumerate(BAD_LINES) for line in (good % i, bad)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out.jsonl"
    argv = ["generate", "--model", "m", "--input", str(tmp_path / "in.jsonl"), "--output", str(out)]
    assert main(argv) == 1
    results = lines_of(out)
    assert len(results) == len(lines)
    for index, (result, message) in enumerate(zip(results[1::2], BAD_LINES.values(), strict=True)):
        assert message in result["error"]["message"]
        assert result["error"]["index"] == 2 * index + 1
        assert result["error"]["type"] == "ValueError"
    assert [r["text"] for r in results[::2]] == ["good"] * len(BAD_LINES)
    count = len(BAD_LINES)
    assert f"[{count} done, {count} failed; " in capsys.readouterr().err
    # Run again, there is nothing to do, and it still has not succeeded.
    num_started = ToyEngine.num_started
    assert main(argv) == 1
    assert ToyEngine.num_started == num_started
    assert lines_of(out) == results
    err = capsys.readouterr().err
    assert f"[0 done, 0 failed, {len(lines)} skipped ({count} of those in the file failed)" in err


def test_two_lines_with_one_id_are_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "id": 1}\n{"prompt": "b"}\n')
    assert main(["generate", "--model", "m", "--input", str(tmp_path / "in.jsonl")]) == 1
    assert "lines 1 and 2 have the same id 1" in capsys.readouterr().err


def test_a_run_cut_off_at_any_byte_is_completed(tmp_path, monkeypatch):
    write_prompts(tmp_path / "in.jsonl", 6)
    out = tmp_path / "out.jsonl"
    argv = ["generate", "--model", "m", "--input", str(tmp_path / "in.jsonl"), "--output", str(out)]
    assert main(argv) == 0
    whole = out.read_bytes()
    cuts = random.Random(0).sample(range(len(whole) + 1), 40) + [0, len(whole), len(whole) - 1, 1]
    for cut in cuts:
        out.write_bytes(whole[:cut])
        num_kept = whole[:cut].count(b"\n")
        assert main(argv) == 0
        assert out.read_bytes() == whole, cut
        assert num_kept == 6 or len(ToyEngine.calls) == 6 - num_kept, cut


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("notes", "last line: not a result; it is left as it is"),
        ("notes\n", "line 1: not a result"),
        ('{"id": 1, "text": ""}\n{"text": ""}\n', "line 2: not a result: it has no id"),
        ('{"id": 1, "te\n{"id": 2}\n', "line 1: not a result"),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path, capsys, content, message):
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    assert main(["generate", "--model", "m", "--prompt", "x", "--output", str(out)]) == 1
    assert message in capsys.readouterr().err
    assert out.read_text() == content


def test_results_hold_what_utf_8_has_not(tmp_path):
    with ResultsFile(tmp_path / "out.jsonl") as file:
        file.add({"text": "\ud800 ü", "id": 1})
    line = (tmp_path / "out.jsonl").read_bytes()
    assert line == result_line({"id": 1, "text": "\ud800 ü"})
    assert json.loads(line) == {"id": 1, "text": "\ud800 ü"}


def test_an_interrupt_cancels_what_is_under_way_and_keeps_what_is_done(tmp_path, monkeypatch):
    write_prompts(tmp_path / "in.jsonl", 40)
    cancelled = []
    answers = ToyEngine.async_generate

    async def answer(self, prompt=None, *args, **kwargs):
        if prompt == "p3":
            raise KeyboardInterrupt
        try:
            return await answers(self, prompt, *args, **kwargs)
        except BaseException as error:
            cancelled.append(type(error).__name__)
            raise

    monkeypatch.setattr(ToyEngine, "async_generate", answer)
    num_closed = ToyEngine.num_closed
    out = tmp_path / "out.jsonl"
    argv = ["generate", "--model", "m", "--input", str(tmp_path / "in.jsonl"), "--output", str(out)]
    assert main(argv) == 130
    assert ToyEngine.num_closed == num_closed + 1
    assert set(cancelled) == {"CancelledError"}
    assert [r["id"] for r in lines_of(out)] == [f"n{i}" for i in range(len(lines_of(out)))]


def test_without_prompts_at_a_terminal_nothing_waits(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(isatty=lambda: True))
    assert main(["generate", "--model", "m"]) == 2
    assert "give --prompt, --input or JSON lines" in capsys.readouterr().err


def test_without_a_tokenizer_messages_are_refused_and_ids_are_not(tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "x"}]}\n{"input_ids": [7]}\n'
    )
    out = tmp_path / "out.jsonl"
    argv = ["generate", "--model", "m", "--skip-tokenizer-init", "--output", str(out)]
    assert main([*argv, "--input", str(tmp_path / "in.jsonl")]) == 1
    first, second = lines_of(out)
    assert "messages need the model's tokenizer" in first["error"]["message"]
    assert second["text"] == "[7]"


def test_an_answer_that_was_cut_off_is_a_failure(monkeypatch, capsys):
    async def aborted(self, prompt=None, *args, **kwargs):
        return {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "why"}}}

    monkeypatch.setattr(ToyEngine, "async_generate", aborted)
    assert main(["generate", "--model", "m", "--prompt", "x", "--output", "-"]) == 1
    assert "[0 done, 1 failed; " in capsys.readouterr().err
