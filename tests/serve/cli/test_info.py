"""`info` of real configs against published sizes; nothing of a model but its config is read."""

import json
import re

import pytest

from qwen_hybrid import HybridConfig
from serve.cli import main
from serve.engine_config import EngineConfig, size_pools
from tests.vector_configs import hf_config

MIB = 1 << 20


@pytest.fixture
def model(tmp_path):
    """Write the config of a published model; return the arguments that name it."""

    def write(name):
        (tmp_path / "config.json").write_text(json.dumps(hf_config(name)))
        return ["info", "--model", str(tmp_path)]

    return write


# Source: the shapes of the published configs, and the parameter counts of their index files.
@pytest.mark.parametrize(
    ("name", "kv", "state", "conv", "params"),
    [
        ("Qwen3.5-0.8B", 12_288, 18 * MIB, 663_552, 752_393_024),
        ("Qwen3.8-27B", 65_536, 144 * MIB, 2_949_120, 26_895_998_464),
        ("Qwen3.8-Flash-Next", 24_576, 108 * MIB, 2_211_840, 176_943_899_520),
    ],
)
def test_sizes_of_published_models(model, capsys, name, kv, state, conv, params):
    assert main([*model(name), "--json", "--context-length", "8192"]) == 0
    found = json.loads(capsys.readouterr().out)
    each = {item["kind"]: item["unit_bytes"] for item in found["memory"]["state"]}
    assert (each["kv"], each["recurrent_state"]) == (kv, state)
    assert found["memory"]["conv_window_bytes"] == conv
    assert found["num_parameters"] == params
    assert found["context_length"] == 8192
    assert found["numerics"]["activation_dtype"] == "bfloat16"
    total = sum(item["num_bytes"] for item in found["memory"]["state"])
    assert total == found["memory"]["state_bytes"]


def test_the_table_adds_up_to_the_budget_that_the_engine_takes(model, capsys):
    flags = ["--max-running-requests", "3", "--dtype", "float32", "--page-size", "32"]
    assert main([*model("q4_all"), *flags]) == 0
    text = capsys.readouterr().out
    table = text.split("kind of state")[1].split("windows")[0].splitlines()[1:]
    rows = [re.split(r"\s{2,}", line.strip()) for line in table if line]
    assert [row[0] for row in rows[:3]] == ["keys and values", "pooled index keys", "sealed states"]
    config = HybridConfig.from_hf(hf_config("q4_all"))
    engine = EngineConfig(max_running_requests=3, block_size=32)
    _, num_bytes = size_pools(engine, config, "float32")
    assert sum(int(row[1].replace(",", "")) for row in rows) == num_bytes
    assert '"block_size": 32' in text


def test_a_budget_that_is_too_small_and_a_model_that_is_absent_are_one_line(model, capsys):
    assert main([*model("q4_all"), "--memory-bytes", "1000"]) == 1
    assert "memory_bytes 1000 is too small" in capsys.readouterr().err
    assert main(["info", "--model", "absent"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("qwen-hybrid: error: no model directory 'absent'")
    assert err.count("\n") == 1
    assert main(["info"]) == 2
