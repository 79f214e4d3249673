"""The command line over a toy engine whose answers are written down here."""

import pathlib

import pytest

from serve.cli import generate, main
from serve.cli.environment import compilation_cache_dir
from serve.sampling_params import SamplingParams

PIECES = [" return", "", " 🙂", "\n"]


class ToyEngine:
    """Answers every prompt with `PIECES`; keeps what it was asked."""

    flags: dict = {}
    calls: list = []
    closed = 0

    def __init__(self, **flags):
        if flags["model_path"] == "absent":
            raise FileNotFoundError("no model directory 'absent'")
        type(self).flags = flags
        type(self).calls = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        type(self).closed += 1

    def generate(self, prompt, sampling_params, *, stream=False):
        """Return the whole answer or an iterator over its growing parts."""
        self.calls.append((prompt, sampling_params, stream))
        parts = [self.part(count) for count in range(1, len(PIECES) + 1)]
        return iter(parts) if stream else parts[-1]

    def part(self, count):
        """Return the result after `count` pieces."""
        info = {
            "prompt_tokens": 3,
            "completion_tokens": count,
            "finish_reason": {"type": "length"} if count == len(PIECES) else None,
            "sampling_seed": 5,
        }
        return {"text": "".join(PIECES[:count]), "output_ids": [0] * count, "meta_info": info}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(generate, "Engine", ToyEngine)
    return ToyEngine


def test_streams_the_text_and_sums_up_on_standard_error(capsys):
    assert main(["generate", "--model", "demo", "--prompt", "def f():"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(PIECES) + "\n"
    assert "3 + 4 tokens, ended by length, first text after" in err
    assert "seed 5" in err
    [(prompt, params, stream)] = ToyEngine.calls
    assert (prompt, params, stream) == ("def f():", SamplingParams(), True)


def test_without_streaming_and_with_the_prompt(capsys):
    args = ["generate", "--model", "demo", "--prompt", "def f():", "--no-stream", "--echo"]
    assert main(args) == 0
    assert capsys.readouterr().out == "def f():" + "".join(PIECES) + "\n"
    assert ToyEngine.calls[0][2] is False


def test_every_flag_reaches_the_engine(monkeypatch):
    flags = (
        "--max-new-tokens 7 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --seed 9 "
        "--ignore-eos --dtype bfloat16 --load-format dummy --compilation-cache-dir kept"
    )
    assert main(["generate", "--model", "m", "--prompt", "x", *flags.split()]) == 0
    assert ToyEngine.flags == {
        "model_path": "m",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_running_requests": 1,
        "compilation_cache_dir": "kept",
    }
    assert ToyEngine.calls[0][1] == SamplingParams(
        max_new_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        sampling_seed=9,
        ignore_eos=True,
    )


def test_the_compilation_cache_can_be_switched_off():
    args = ["generate", "--model", "m", "--prompt", "x", "--compilation-cache-dir", ""]
    assert main(args) == 0
    assert ToyEngine.flags["compilation_cache_dir"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-p", "2"], "qwen-hybrid: error: top_p must be in (0, 1], got 2.0\n"),
        (["--model", "absent"], "qwen-hybrid: error: no model directory 'absent'\n"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(capsys, flags, message):
    assert main(["generate", "--model", "demo", "--prompt", "x", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", message)


@pytest.mark.parametrize(
    "flags", [["--dtype", "float16"], ["--load-format", "gguf"], ["--top-k", "x"], ["--image", "x"]]
)
def test_unknown_flags_and_values_exit_2(capsys, flags):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--model", "demo", "--prompt", "x", *flags])
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_interrupt_closes_the_engine_and_exits_130(monkeypatch):
    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ToyEngine, "generate", interrupted)
    closed = ToyEngine.closed
    assert main(["generate", "--model", "demo", "--prompt", "x"]) == 130
    assert ToyEngine.closed == closed + 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/qwen-hybrid/compiled"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/qwen-hybrid/compiled"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/qwen-hybrid/compiled"),
    ],
)
def test_compiled_programs_are_kept_in_the_users_cache(environment, expected):
    assert compilation_cache_dir(environment) == pathlib.Path(expected)
