"""`chat`: one message, a conversation line by line, what is remembered, what stops it."""

import io
import json

import pytest

from serve.cli import main
from serve.sampling_params import SamplingParams
from tests.serve.cli.toy import CONTEXT, PIECES, ToyEngine, ToyTokenizer

ANSWER = "".join(PIECES)
CHAT = ["chat", "--model", "m"]


@pytest.fixture(autouse=True)
def with_toy(toy):
    """Every test here uses the toy engine."""


class Terminal(io.StringIO):
    """Standard input of somebody who sits there."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def prompts():
    """The texts that the engine was given."""
    return ["".join(map(chr, ids)) for ids, _, _ in ToyEngine.calls]


def test_one_message_is_answered_and_may_be_as_long_as_there_is_room(capsys):
    assert main([*CHAT, "--message", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert "[3 + 4 tokens, ended by length" in err
    assert prompts() == ["user:hi;assistant:"]
    expected = SamplingParams(max_new_tokens=CONTEXT - len("user:hi;assistant:"))
    assert ToyEngine.calls[0][1:] == (expected, True)
    assert ToyEngine.flags["max_running_requests"] == 1


def test_every_option_reaches_the_template_and_the_sampler(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "f"}]))
    flags = ["--system", "Be.", "--no-thinking", "--chat-template-kwargs", '{"x": 1}']
    flags += ["--tools", str(tmp_path / "tools.json"), "--max-new-tokens", "3", "--top-k", "2"]
    assert main([*CHAT, "--message", "hi", *flags, "--no-stream"]) == 0
    variables = {"x": 1, "enable_thinking": False}
    assert prompts() == [f"system:Be.;user:hi;{[{'name': 'f'}]}{variables}assistant:"]
    assert ToyEngine.calls[0][1:] == (SamplingParams(max_new_tokens=3, top_k=2), False)


def test_a_conversation_is_remembered_until_it_is_reset(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/help\n/exit\nfour\n"))
    assert main([*CHAT, "--system", "S"]) == 0
    said = f"system:S;user:one;assistant:{ANSWER};"
    assert prompts() == [
        "system:S;user:one;assistant:",
        f"{said}user:two;assistant:",
        "system:S;user:three;assistant:",
    ]
    out, err = capsys.readouterr()
    assert out == (ANSWER + "\n") * 3
    assert "no command '/help'; /reset forgets" in err


def test_the_end_of_the_input_ends_it(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one"))
    assert main(CHAT) == 0
    assert len(ToyEngine.calls) == 1


def test_an_interrupt_stops_the_answer_and_not_the_program(monkeypatch, capsys):
    def interrupt(count):
        if count == 1 and len(ToyEngine.calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setattr(ToyEngine, "after_pieces", staticmethod(interrupt))
    assert main(CHAT) == 0
    assert capsys.readouterr().out == f"{PIECES[0]} [stopped]\n{ANSWER}\n"
    assert prompts()[1] == f"user:one;assistant:{PIECES[0]};user:two;assistant:"


def test_an_interrupt_at_the_prompt_says_how_to_leave(monkeypatch, capsys):
    lines = iter([KeyboardInterrupt, "hi", EOFError])

    def ask(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(CHAT) == 0
    assert prompts() == ["user:hi;assistant:"]
    assert capsys.readouterr().err.count("/exit ends it") == 2


@pytest.mark.parametrize("where", ["one message", "a pipe"])
def test_an_interrupt_elsewhere_exits_130(monkeypatch, where):
    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    if where == "a pipe":
        stdin = io.StringIO()
        monkeypatch.setattr(stdin, "readline", lambda: interrupted(None))
        monkeypatch.setattr("sys.stdin", stdin)
    else:
        monkeypatch.setattr(ToyEngine, "generate", interrupted)
    assert main(CHAT if where == "a pipe" else [*CHAT, "--message", "hi"]) == 130


def test_a_message_that_is_refused_is_forgotten(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("refused\ntwo\n"))
    assert main(CHAT) == 0
    assert prompts() == ["user:two;assistant:"]
    assert "[not answered: the chat template: refused]" in capsys.readouterr().err
    assert main([*CHAT, "--message", "refused"]) == 1
    assert capsys.readouterr().err == "qwen-hybrid: error: the chat template: refused\n"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--n", "2"], 2, "a chat has one answer: --n must be 1"),
        (["--tools", "absent.json"], 1, "absent.json"),
        (["--chat-template-kwargs", "x"], 2, "not JSON"),
    ],
)
def test_bad_options_are_one_line(capsys, flags, code, message):
    assert main([*CHAT, "--message", "hi", *flags]) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["{", '{"name": "f"}'])
def test_tools_must_be_a_json_list(tmp_path, capsys, text):
    (tmp_path / "tools.json").write_text(text)
    assert main([*CHAT, "--message", "hi", "--tools", str(tmp_path / "tools.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_without_a_template_is_named(monkeypatch, capsys):
    monkeypatch.setattr(ToyTokenizer, "chat", None)
    assert main([*CHAT, "--message", "hi"]) == 1
    assert capsys.readouterr().err == "qwen-hybrid: error: m has no chat template\n"
