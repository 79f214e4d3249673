"""The command line over a small real engine: the same results as the Python API, kills included."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from serve.cli import bench_offline, bench_one_batch, main, terminal
from tests.serve.engines import CONTEXT, SLOTS, TEXTS, greedy, sampled
from tests.source_tree import ROOT

# The same program as the shared engine's, which is found compiled.
SAME = [
    *("--load-format", "dummy", "--dtype", "float32", "--max-running-requests", str(SLOTS)),
    *("--chunked-prefill-size", "13", "--context-length", str(CONTEXT)),
]
KEYS = [
    "run_name",
    "batch_size",
    "input_len",
    "output_len",
    "prefill_latency",
    "prefill_throughput",
    "median_decode_latency",
    "median_decode_throughput",
    "total_latency",
    "overall_throughput",
    "accept_length",
]


@pytest.fixture
def lent(engine, monkeypatch):
    """The shared engine in the place of every one that a command would start."""
    asked = []

    def lend(**arguments):
        asked.append(arguments)
        return contextlib.nullcontext(engine)

    for module in (terminal, bench_one_batch, bench_offline):
        monkeypatch.setattr(module, "Engine", lend)
    engine.asked = asked
    return engine


def lines_of(path):
    """The JSON lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_results_equal_those_of_the_python_api(lent, tmp_path):
    params = [sampled(9, seed=5), greedy(6), {"max_new_tokens": 4, "seed": 3, "n": 2}]
    lines = [{"prompt": text, "sampling_params": p} for text, p in zip(TEXTS, params, strict=True)]
    chat = [{"role": "user", "content": "<hi> & ü"}]
    lines.append({"messages": chat, "sampling_params": greedy(5)})
    lines.append({"input_ids": [4, 5, 6], "sampling_params": greedy(3), "return_logprob": True})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    argv = ["generate", "--model", "m", "--input", str(tmp_path / "in.jsonl")]
    argv += ["--output", str(out), "--sampling-defaults", "openai"]
    assert main([*argv, "--logprob-start-len", "0", "--top-logprobs-num", "1"]) == 0
    results = lines_of(out)
    samples = results[2].pop("samples")
    expected = [lent.generate(text, p) for text, p in zip(TEXTS, params, strict=True)]
    assert [s["output_ids"] for s in samples] == [s["output_ids"] for s in expected[2]]
    for result, one in zip(results[:2], expected, strict=False):
        assert result["output_ids"] == one["output_ids"]
        assert result["text"] == one["text"]
    assert results[0]["meta_info"]["sampling_seed"] == 5
    assert results[3]["text"] == lent.chat(chat, greedy(5))["text"]
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    ids = lent.generate(input_ids=[4, 5, 6], sampling_params=greedy(3), **wanted)["meta_info"]
    for name in ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs"):
        assert results[4]["meta_info"][name] == json.loads(json.dumps(ids[name]))


def test_streamed_text_and_chat_equal_those_of_the_python_api(lent, capsys):
    flags = ["--temperature", "0", "--max-new-tokens", "12"]
    assert main(["generate", "--model", "m", "--prompt", TEXTS[0], *flags]) == 0
    text = lent.generate(TEXTS[0], {"temperature": 0, "max_new_tokens": 12, "top_p": 1})["text"]
    assert capsys.readouterr().out == text + "\n"
    assert main(["chat", "--model", "m", "--message", "hi", "--no-thinking", *flags]) == 0
    answer = lent.chat(
        [{"role": "user", "content": "hi"}],
        {"temperature": 0, "max_new_tokens": 12},
        chat_template_kwargs={"enable_thinking": False},
    )
    assert capsys.readouterr().out == answer["text"] + "\n"


def test_scores_equal_those_of_the_python_api(lent, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    prompts = [flag for text in TEXTS for flag in ("--prompt", text)]
    flags = ["--output", str(out), "--top-logprobs-num", "2"]
    assert main(["score", "--model", "m", *prompts, *flags]) == 0
    total, count = 0.0, 0
    for result, text in zip(lines_of(out), TEXTS, strict=True):
        info = lent.score(lent.tokenizer.encode(text), top_logprobs_num=2)["meta_info"]
        tokens = [list(triple) for triple in info["input_token_logprobs"]]
        assert result["input_token_logprobs"] == tokens
        assert result["input_top_logprobs"] == json.loads(json.dumps(info["input_top_logprobs"]))
        logprobs = [logprob for logprob, _, _ in tokens[1:]]
        assert result["logprob"] == math.fsum(logprobs)
        assert result["perplexity"] == pytest.approx(
            math.prod(math.exp(-p) for p in logprobs) ** (1 / len(logprobs))
        )
        total, count = total + math.fsum(logprobs), count + len(logprobs)
    summary = f"{count} tokens scored, perplexity {math.exp(-total / count):.4f}"
    assert summary in capsys.readouterr().err


def test_a_prompt_that_is_too_long_harms_no_other(lent, tmp_path):
    out = tmp_path / "out.jsonl"
    prompts = ["--prompt", "x" * 5000, "--prompt", TEXTS[0]]
    flags = ["--output", str(out), "--max-new-tokens", "3", "--seed", "1"]
    assert main(["generate", "--model", "m", *prompts, *flags]) == 1
    failed, done = lines_of(out)
    assert "longer than the model's context length" in failed["error"]["message"]
    assert len(done["output_ids"]) <= 3


def test_one_batch_prints_and_appends_its_figures(lent, tmp_path, capsys):
    out = tmp_path / "result.jsonl"
    sizes = ["--batch-size", "1", "3", "--input-len", "20", "--output-len", "4"]
    argv = ["bench-one-batch", "--model", "m", *sizes, "--run-name", "here"]
    assert main([*argv, "--result-filename", str(out)]) == 0
    assert lent.asked[0]["max_running_requests"] == 3
    text = capsys.readouterr().out
    assert text.startswith("Compile. ")
    for start in ("Prefill. latency: ", "Decode 2. Batch size: 3, latency: ", "Total. latency: "):
        assert f"\n{start}" in text
    assert "\nDecode.  median latency: " in text
    assert "Decode 3." not in text
    results = lines_of(out)
    assert [list(result) for result in results] == [KEYS, KEYS]
    for result, size in zip(results, (1, 3), strict=True):
        assert (result["batch_size"], result["input_len"], result["output_len"]) == (size, 20, 4)
        tokens = result["prefill_throughput"] * result["prefill_latency"]
        assert tokens == pytest.approx(20 * size)
        step = result["median_decode_throughput"] * result["median_decode_latency"]
        assert step == pytest.approx(size)
        assert result["overall_throughput"] * result["total_latency"] == pytest.approx(24 * size)
        assert result["total_latency"] > result["prefill_latency"]


def test_one_batch_of_one_token_has_no_decode(lent, tmp_path, capsys):
    out = tmp_path / "result.jsonl"
    sizes = ["--input-len", "5", "--output-len", "1", "--result-filename", str(out)]
    assert main(["bench-one-batch", "--model", "m", *sizes]) == 0
    assert "Decode" not in capsys.readouterr().out
    assert "median_decode_latency" not in lines_of(out)[0]


def test_one_batch_can_be_traced(lent, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--input-len", "5", "--output-len", "2", "--result-filename", ""]
    assert main(["bench-one-batch", "--model", "m", "--profile", *sizes]) == 0
    folder = "default_batch1_input5_output2.trace"
    assert f"[trace in {folder}]" in capsys.readouterr().err
    assert list((tmp_path / folder).rglob("*.xplane.pb"))


def test_one_batch_has_the_tokens_of_the_engine(lent, capsys, monkeypatch):
    sizes = ["--batch-size", "3", "--input-len", "70", "--output-len", "5"]
    argv = ["bench-one-batch", "--model", "m", *sizes, "--correctness-test"]
    assert main(argv) == 0
    assert "0 of 3 sequences differ" in capsys.readouterr().out
    monkeypatch.setattr(lent, "generate", lambda **_: [{"output_ids": []}] * 3)
    assert main(argv) == 1
    assert "3 of 3 sequences differ" in capsys.readouterr().out


def test_offline_counts_what_it_generates(lent, tmp_path, capsys):
    out = tmp_path / "result.jsonl"
    sizes = ["--num-prompts", "7", "--random-input-len", "30", "--random-output-len", "6"]
    argv = ["bench-offline", "--model", "m", *sizes, "--result-filename", str(out)]
    assert main(argv) == 0
    [figures] = lines_of(out)
    assert figures["successful_requests"] == 7
    assert 7 <= figures["total_output_tokens"] <= 42
    seconds = figures["total_latency"]
    assert figures["output_throughput"] * seconds == pytest.approx(figures["total_output_tokens"])
    total = figures["total_input_tokens"] + figures["total_output_tokens"]
    assert figures["total_throughput"] * seconds == pytest.approx(total)
    text = capsys.readouterr().out
    for label in ("Backend:", "Successful requests:", "Last generation throughput (tok/s):"):
        assert f"\n{label:<40} " in text


def test_killed_at_work_it_goes_on_where_it_stopped(directory, engine, tmp_path):
    prompts = [f"{TEXTS[i % 3]} {i}" for i in range(30)]
    lines = [{"id": f"n{i}", "prompt": prompt} for i, prompt in enumerate(prompts)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    argv = ["generate", "--model", str(directory), "--input", str(tmp_path / "in.jsonl")]
    argv += ["--output", str(out), "--temperature", "0", "--max-new-tokens", "40", "--ignore-eos"]
    argv += [*SAME, "--compilation-cache-dir", str(directory / "compiled")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "serve", *argv]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (out.exists() and b"\n" in out.read_bytes()):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.stderr is not None
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
    done = out.read_bytes()
    whole = done[: done.rindex(b"\n") + 1]
    num_kept = whole.count(b"\n")
    assert 0 < num_kept < len(lines)
    out.write_bytes(whole + b'{"id": "n7", "tex')
    assert main(argv) == 0
    assert out.read_bytes().startswith(whole)
    results = lines_of(out)
    assert [result["id"] for result in results] == [line["id"] for line in lines]
    expected = engine.generate(prompts, greedy(40))
    assert [r["output_ids"] for r in results] == [one["output_ids"] for one in expected]
