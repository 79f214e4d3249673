"""The command over real engines of two layers: all the same, and with deliberate faults."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from qwen_hybrid import attention
from serve.check import explain, golden_runs, make_cases, run_laws
from serve.cli import check, main
from serve.runner import Runner
from tests.laws.settings import one_program
from tests.mutants.swap import swap


@pytest.fixture
def argv(setting):
    """The command line for the setting."""
    flags = ["--load-format", "dummy", "--dtype", "float32"]
    cache = ["--compilation-cache-dir", setting.compilation_cache_dir]
    return ["check", "--model", setting.directory, *flags, *cache, "--schedules", "2"]


def test_the_same_bits_are_exit_0(argv, tmp_path, capsys):
    out = tmp_path / "laws.json"
    assert main([*argv, "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 not available, 8 passed"
    data = json.loads(out.read_text())
    assert data["passed"] is True
    assert data["numerics"]["activation_dtype"] == "float32"
    assert data["setting"]["directory"] in argv
    for law, line in zip(data["laws"], lines[1:], strict=False):
        is_absent = law["law"] == "L4"
        assert law["status"] == ("not available" if is_absent else "passed")
        assert line.startswith(f"{law['law']}   {law['what']}")
        assert line.endswith("  not available" if is_absent else "  none")
        assert is_absent or (law["tokens"] > 20 and law["schedules"] >= 1)
        assert law["first_difference"] is None
    assert data["happened"]["num_poisoned"] and data["happened"]["num_forced"]


@pytest.mark.full
def test_a_log_probability_off_by_a_bit_beside_others_is_exit_1(
    argv, tmp_path, capsys, monkeypatch
):
    original = Runner.run
    # Another process would not have the fault, nor does a request alone.
    monkeypatch.setattr(check, "golden_elsewhere", lambda s: golden_runs(s, make_cases(s)[::2]))

    def changed(self, work):
        results = original(self, work)
        if len(work) == 1:
            return results
        for result in results:
            values = np.nextafter(np.float32(result.sampled.tokens), np.float32(0))
            result.sampled.tokens[:] = values.tolist()
        return results

    monkeypatch.setattr(Runner, "run", changed)
    out = tmp_path / "laws.json"
    assert main([*argv, "--json", str(out)]) == 1
    data = json.loads(out.read_text())
    assert data["passed"] is False
    status = {law["what"]: law["status"] for law in data["laws"]}
    assert status["others run beside it"] == "failed"
    # Neither has others beside it.
    assert status["prefill scores its output"] == status["it runs in a new process"] == "passed"
    found = next(law for law in data["laws"] if law["what"] == "others run beside it")
    difference = found["first_difference"]
    assert difference["what"].startswith("log-probability of token ")
    # The states are the same.
    assert [difference[key] for key in ("layer", "tensor", "position")] == [None] * 3
    table = capsys.readouterr().out
    assert f"schedule 0, chunk 1, poisoned, preempted, request {difference['request']}" in table


def differences(reports):
    """The first ones of the laws that failed."""
    return [r.first_difference for r in reports if r.first_difference is not None]


def test_the_row_in_which_a_fault_began_is_named(setting, monkeypatch):
    """Keys of position 40 are wrong wherever that row is not where it is in a run alone."""

    def make(original):
        def changed(weights, x, position, config):
            out = original(weights, x, position, config)
            # Alone it stands in a tile that begins at 32, or first in its own.
            is_wrong = (position == 40) & (position[0] != 32) & (position[0] != 40)
            return dataclasses.replace(out, key=jnp.where(is_wrong[:, None, None], 0, out.key))

        return changed

    swap(monkeypatch, attention, "project", make)
    with one_program():
        golden = golden_runs(setting, make_cases(setting))
        run = run_laws(setting, num_schedules=1, golden=golden)
        before = differences(run.reports)
        explain(run)
    assert run.scored.status == "passed"
    found = differences(run.reports)
    assert found and all(d.state is None for d in before)
    # The second layer is the one with attention.
    assert {str(d.state) for d in found} == {"layer 1 key at position 40"}
    assert [d.parting for d in found] == [d.parting for d in before]


def test_a_sealed_state_that_is_spoilt_is_named(setting, monkeypatch):
    """Every state of 64 rows is doubled once it is stored, where there is room for several."""
    original, done = Runner.run, set()

    def changed(self, work):
        for request in {item.request for item in work if item.request.sealed_len == 64} - done:
            if self.state_config.num_slots > 1:
                done.add(request)
                double(self, request.sealed_slot)
        return original(self, work)

    monkeypatch.setattr(Runner, "run", changed)
    golden = golden_runs(setting, make_cases(setting))
    run = run_laws(setting, num_schedules=1, golden=golden)
    explain(run)
    found = differences(run.met)
    assert found and {str(d.state) for d in found} == {"layer 0 recurrent_state at position 63"}
    # A score is made in pieces of 128 rows: the end of the first is what the second starts from.
    [score] = differences([run.scored])
    assert str(score.state) == "layer 0 recurrent_state at position 127"


def double(runner, slot):
    """Double the sealed state of the first layer in a slot."""
    first, *others = runner._state.layers
    sealed = first.mixer.log.sealed.at[slot].multiply(2)
    log = dataclasses.replace(first.mixer.log, sealed=sealed)
    first = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, log=log))
    runner._state = dataclasses.replace(runner._state, layers=(first, *others))
