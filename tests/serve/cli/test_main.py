"""Exit codes, one-line errors and where options come from."""

import json
import pathlib

import pytest

from serve.cli import main
from serve.cli.environment import compilation_cache_dir, default_compilation_cache
from serve.sampling_params import SamplingParams
from tests.serve.cli.toy import PIECES, ToyEngine

GENERATE = ["generate", "--model", "m", "--prompt", "x"]


@pytest.fixture(autouse=True)
def with_toy(toy):
    """Every test here uses the toy engine."""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["--max-new-tokens", "2", "--min-new-tokens", "3"], "min_new_tokens must be in [0, max"),
        (["--sampling-params", '{"temprature": 3}'], "did you mean 'temperature'?"),
        (
            ["--sampling-params", "[1]"],
            "--preferred-sampling-params: must be a JSON object, got [1]",
        ),
        (
            ["--sampling-params", "{"],
            "argument --sampling-params/--preferred-sampling-params: not JSON",
        ),
        (["--dtype", "float16"], "invalid value 'float16' (choose from auto, float32, bfloat16)"),
        (["--load-format", "gguf"], "(choose from auto, dummy)"),
        (["--mamba-ssm-dtype", "int8"], "(choose from float32, bfloat16"),
        (
            ["--max-running-requests", "0"],
            "max_running_requests must be an integer in [1, 1048576], got 0",
        ),
        (["--top-k", "x"], "argument --top-k: invalid int value 'x'"),
        (["--image", "x"], "unrecognized arguments: --image x\n"),
        (["--temprature=1"], "arguments: --temprature=1; did you mean --temperature?"),
        (["--input", "f.jsonl"], "give --prompt or --input, not both"),
    ],
)
def test_what_the_command_line_cannot_mean_is_one_line_and_exit_2(capsys, flags, message):
    assert main([*GENERATE, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qwen-hybrid: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("argv", [[], ["dance"], ["generate"], ["generate", "--prompt", "x"]])
def test_no_command_or_no_model_is_exit_2(capsys, argv):
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_bad_input_is_one_line_and_exit_1(capsys):
    assert main(["generate", "--model", "absent", "--prompt", "x"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "qwen-hybrid: error: no model directory 'absent'\n")
    assert main(["generate", "--model", "m", "--input", "absent.jsonl"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "absent.jsonl" in err


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        main(["generate", "--model", "m", "--prompt", "a bug"])


def test_an_interrupt_closes_the_engine_and_exits_130(monkeypatch):
    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ToyEngine, "generate", interrupted)
    num_closed = ToyEngine.num_closed
    assert main(GENERATE) == 130
    assert ToyEngine.num_closed == num_closed + 1


def test_help_names_every_flag_once(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--model-path",
        "--page-size",
        "--stop-token-ids",
        "--sampling-params",
        "--config",
    ):
        assert text.count(f"\n  {flag}") == 1, flag


def test_every_flag_reaches_the_engine():
    flags = (
        "--max-new-tokens 7 --min-new-tokens 2 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 "
        "--frequency-penalty 0.1 --presence-penalty 0.2 --repetition-penalty 1.5 --stop a --stop b "
        "--stop-token-ids 1 2 --seed 9 --ignore-eos --stream-interval 4 "
        "--dtype bfloat16 --load-format dummy --mamba-ssm-dtype bfloat16 --context-length 90 "
        "--max-running-requests 2 "
        "--chunked-prefill-size 32 --page-size 16 --memory-bytes 1000 --compilation-cache-dir kept "
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5 --speculative-adaptive "
        "--disable-self-check"
    )
    assert main([*GENERATE, *flags.split()]) == 0
    assert ToyEngine.flags == {
        "model_path": "m",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "state_dtype": "bfloat16",
        "context_length": 90,
        "max_running_requests": 2,
        "chunked_prefill_size": 32,
        "block_size": 16,
        "memory_bytes": 1000,
        "compilation_cache_dir": "kept",
        "skip_tokenizer_init": False,
        "sampling_defaults": "model",
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 5,
        "speculative_adaptive": True,
        "speculative_dspark_threshold": 0.0,
        "disable_self_check": True,
    }
    assert SamplingParams(**ToyEngine.calls[0][1].__dict__) == SamplingParams(
        max_new_tokens=7,
        min_new_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.5,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        sampling_seed=9,
        ignore_eos=True,
        stream_interval=4,
    )


def test_any_sampling_parameter_can_be_given_as_json_and_flags_come_first():
    params = {"seed": 3, "top_k": 5, "logit_bias": {"7": 1.5}, "stop_regex": "a+"}
    flags = ["--sampling-params", json.dumps(params), "--top-k", "6"]
    assert main([*GENERATE, *flags]) == 0
    expected = SamplingParams(sampling_seed=3, top_k=6, logit_bias={7: 1.5}, stop_regex="a+")
    assert ToyEngine.calls[0][1] == expected


def test_the_compilation_cache_can_be_switched_off():
    assert main([*GENERATE, "--compilation-cache-dir", ""]) == 0
    assert ToyEngine.flags["compilation_cache_dir"] is None


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
    assert default_compilation_cache(environment) == expected
    jax = {**environment, "JAX_COMPILATION_CACHE_DIR": "/j"}
    assert default_compilation_cache(jax) == "auto"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(
        "model: from-file\nmax-new-tokens: 7\ntemperature: 0\ntop_p: 0.5\nignore_eos: yes\n"
        "stop: [a, b]\nsampling_params: {seed: 4}\nsystem: only chat has this\n"
    )
    return path


def test_flag_before_environment_before_file(monkeypatch, file):
    monkeypatch.setenv("QWEN_HYBRID_TOP_P", "0.6")
    monkeypatch.setenv("QWEN_HYBRID_TEMPERATURE", "0.8")
    argv = ["generate", "--prompt", "x", "--config", str(file), "--top-p", "0.7", "--stop", "c"]
    assert main(argv) == 0
    assert ToyEngine.flags["model_path"] == "from-file"
    assert ToyEngine.calls[0][1] == SamplingParams(
        max_new_tokens=7,
        temperature=0.8,
        top_p=0.7,
        ignore_eos=True,
        stop=["c"],
        sampling_seed=4,
    )


def test_environment_alone_and_lists_in_it(monkeypatch, file):
    monkeypatch.setenv("QWEN_HYBRID_CONFIG", str(file))
    monkeypatch.setenv("QWEN_HYBRID_STOP", '["x y", "z"]')
    monkeypatch.setenv("QWEN_HYBRID_IGNORE_EOS", "off")
    assert main(["generate", "--prompt", "x"]) == 0
    params = ToyEngine.calls[0][1]
    assert (params.stop, params.ignore_eos, params.max_new_tokens) == (("x y", "z"), False, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature: 1", "unknown option 'temprature'; did you mean 'temperature'?"),
        ("dtype: float16", "dtype: invalid value 'float16' (choose from auto, float32, bfloat16)"),
        ("top_k: many", "top_k: invalid int value 'many'"),
        ("top_k: true", "top_k: invalid value True"),
        ("top_k: [1]", "top_k: invalid value [1]"),
        ("ignore_eos: 3", "ignore_eos: must be true or false, got 3"),
        ("config: other.yaml", "config cannot name another file"),
        ("- a", "must hold names and values, got list"),
        ("a: [", "is not YAML"),
        ("top_p: 2", "top_p must be in (0, 1], got 2.0"),
    ],
)
def test_bad_files_are_one_line_and_exit_2(capsys, tmp_path, text, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    assert main([*GENERATE, "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_absent_files_and_bad_variables_are_one_line_and_exit_2(capsys, monkeypatch):
    assert main([*GENERATE, "--config", "absent.yaml"]) == 2
    assert "absent.yaml cannot be read: No such file" in capsys.readouterr().err
    monkeypatch.setenv("QWEN_HYBRID_TEMPERATUR", "1")
    assert main(GENERATE) == 2
    assert "the environment: unknown option 'temperatur'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [GENERATE, [*GENERATE, "--prompt", "y"], ["chat", "--model", "m", "--message", "x"]]
)
def test_the_engine_is_told_whose_sampling_defaults_count_below_what_is_asked(argv):
    assert main([*argv, "--top-p", "0.5", "--max-new-tokens", "3"]) == 0
    assert ToyEngine.flags["sampling_defaults"] == "model"
    assert ToyEngine.calls[0][1] == SamplingParams(top_p=0.5, max_new_tokens=3)
    assert main([*argv, "--sampling-defaults", "openai"]) == 0
    assert ToyEngine.flags["sampling_defaults"] == "openai"


def test_the_start_is_announced_where_somebody_watches(capsys):
    assert main([*GENERATE, "--log-level", "info"]) == 0
    out, err = capsys.readouterr()
    assert "[starting; a first start compiles 2 programs, kept for the next start]\n" in err
    assert "[ready after" in err
    assert out == "".join(PIECES) + "\n"
    assert main(GENERATE) == 0
    assert "starting" not in capsys.readouterr().err
