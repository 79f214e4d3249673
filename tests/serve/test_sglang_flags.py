"""Every flag that this project set out with, and how it is met: honoured, mapped, fixed or refused.

The list is the specification's, in its groups; limits and security are with the server.
"""

import pytest

from serve.cli import main
from serve.cli.main import COMMANDS
from serve.engine_config import EngineConfig
from serve.sglang_flags import FIXED, HONOURED, MAPPED, REFUSED, engine_fields
from tests.serve.cli.toy import ToyEngine

SPECIFIED = {
    "model": (
        "--model-path --model --tokenizer-path --served-model-name --revision --load-format "
        "--dtype --quantization --kv-cache-dtype --mamba-ssm-dtype --context-length "
        "--json-model-override-args --skip-tokenizer-init --chat-template"
    ),
    "memory and schedule": (
        "--mem-fraction-static --max-total-tokens --max-running-requests "
        "--max-queued-requests --chunked-prefill-size --max-prefill-tokens --schedule-policy "
        "--page-size --disable-radix-cache --max-mamba-cache-size --mamba-track-interval"
    ),
    "parallel, device": ("--tp-size --device --random-seed --watchdog-timeout"),
    "speculative": (
        "--speculative-algorithm --speculative-draft-model-path --speculative-num-steps "
        "--speculative-num-draft-tokens --speculative-dspark-block-size --speculative-debug "
        "--disable-self-check"
    ),
    "sampling": (
        "--sampling-defaults --preferred-sampling-params --allow-auto-truncate "
        "--stream-interval --grammar-backend --reasoning-parser"
    ),
    "server": (
        "--host --port --grpc-services --metrics-port --max-queued-tokens --queue-timeout "
        "--request-timeout --stall-timeout --shutdown-timeout --allow-insecure-bind "
        "--ssl-certfile --ssl-keyfile --ssl-ca-certs --enable-ssl-refresh --api-key "
        "--api-key-file --admin-api-key"
    ),
    "logs": (
        "--log-level --log-requests --log-requests-level --decode-log-interval "
        "--enable-metrics --config"
    ),
}
SPELLINGS = [spelling for line in SPECIFIED.values() for spelling in line.split()]
GENERATE = ["generate", "--model", "m", "--prompt", "x"]
GROUPS = (HONOURED, MAPPED, FIXED, REFUSED)


def name_of(spelling):
    """A flag's name in Python, in the environment and in files."""
    return spelling.removeprefix("--").replace("-", "_")


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr("serve.cli.terminal.Engine", ToyEngine)
    return ToyEngine


def test_every_flag_is_met_in_one_way():
    names = [name_of(spelling) for spelling in SPELLINGS]
    assert sorted(names) == sorted(name for group in GROUPS for name in group)
    assert len(set(names)) == len(names)


def test_what_is_taken_is_a_flag_and_what_is_refused_is_none():
    flags = {spelling for command in COMMANDS for f in command.flags for spelling in f.spellings}
    for spelling in SPELLINGS:
        assert (spelling in flags) == (name_of(spelling) not in REFUSED), spelling


# By spelling, for `device` alone is a mark.
@pytest.mark.parametrize("name", REFUSED, ids=lambda name: f"--{name}")
def test_a_refusal_names_the_flag_and_says_why(name, toy, capsys, monkeypatch, tmp_path):
    spelling, why = "--" + name.replace("_", "-"), f"is not supported: {REFUSED[name]}\n"
    for words in ([spelling, "x"], [f"{spelling}=x"], [spelling]):
        assert main([*GENERATE, *words]) == 2
        assert capsys.readouterr().err == f"qwen-hybrid: error: {spelling} {why}"
    file = tmp_path / "options.yaml"
    file.write_text(f"{spelling.removeprefix('--')}: x\n")
    assert main([*GENERATE, "--config", str(file)]) == 2
    assert capsys.readouterr().err == f"qwen-hybrid: error: {file}: {name} {why}"
    monkeypatch.setenv(f"QWEN_HYBRID_{name.upper()}", "x")
    assert main(GENERATE) == 2
    assert capsys.readouterr().err == f"qwen-hybrid: error: the environment: {name} {why}"
    with pytest.raises(ValueError) as raised:
        engine_fields({name: 1})
    assert f"{raised.value}\n" == f"{name} {why}"


def test_a_secret_is_not_repeated(toy, capsys):
    assert main([*GENERATE, "--api-key", "hunter2"]) == 2
    assert "hunter2" not in capsys.readouterr().err


SO = ["--tp-size", "1", "--schedule-policy", "fcfs", "--kv-cache-dtype", "auto"]
SO += ["--grammar-backend", "none", "--disable-radix-cache"]


def test_what_is_so_may_be_said(toy, tmp_path):
    assert main(GENERATE) == 0
    plain = toy.flags
    assert main([*GENERATE, *SO]) == 0
    assert toy.flags == plain
    file = tmp_path / "options.yaml"
    file.write_text("tp-size: 1\ndisable_radix_cache: true\n")
    assert main([*GENERATE, "--config", str(file)]) == 0
    assert toy.flags == plain
    said = {name: fixed.value for name, fixed in FIXED.items()}
    assert engine_fields(said | {"dtype": "float32"}) == {"dtype": "float32"}


@pytest.mark.parametrize(
    ("flag", "value", "supported"),
    [
        ("--tp-size", "2", "1"),
        ("--schedule-policy", "lpm", "fcfs"),
        ("--kv-cache-dtype", "fp8_e4m3", "auto"),
        ("--grammar-backend", "llguidance", "none"),
    ],
)
def test_what_is_not_so_is_refused_with_what_is(toy, capsys, flag, value, supported):
    name = name_of(flag)
    assert main([*GENERATE, flag, value]) == 2
    err = capsys.readouterr().err
    message = f"argument {flag}: invalid value {value!r} (choose from {supported}): "
    assert message + FIXED[name].why in err
    with pytest.raises(ValueError, match=f"{name} can only be .*, got {value!r}: "):
        engine_fields({name: value})


def test_a_cache_that_there_is_not_cannot_be_asked_for(toy, capsys, tmp_path):
    assert main([*GENERATE, "--no-disable-radix-cache"]) == 2
    file = tmp_path / "options.yaml"
    file.write_text("disable_radix_cache: off\n")
    assert main([*GENERATE, "--config", str(file)]) == 2
    assert "disable_radix_cache: can only be true: no request takes" in capsys.readouterr().err
    for value in (False, 1, "true"):
        with pytest.raises(ValueError, match="disable_radix_cache can only be True, got"):
            engine_fields({"disable_radix_cache": value})


def test_names_of_engine_arguments():
    given = {"page_size": 32, "mamba_ssm_dtype": "bfloat16", "context_length": 90}
    fields = {"block_size": 32, "state_dtype": "bfloat16", "context_length": 90}
    assert engine_fields(given) == fields
    assert EngineConfig(**engine_fields(given)) == EngineConfig(**fields)
    for both in ({"page_size": 32, "block_size": 64}, {"block_size": 64, "page_size": 32}):
        with pytest.raises(ValueError, match="block_size is given twice, under two names"):
            engine_fields(both)


def test_preferred_sampling_params_lie_below_flags(toy):
    flags = ["--preferred-sampling-params", '{"top_k": 5, "top_p": 0.5}', "--top-k", "6"]
    assert main([*GENERATE, *flags]) == 0
    assert (toy.calls[0][1].top_k, toy.calls[0][1].top_p) == (6, 0.5)
