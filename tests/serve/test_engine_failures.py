"""The engine when something is wrong: refused input, exceptions in a step, interrupts, the end."""

import signal
import threading

import pytest

from serve import Engine, EngineDeadError, StepError
from serve.runner import Runner
from tests import tiny_models
from tests.serve.engines import CONTEXT, TEXTS, Gate, greedy, settle, start

# Refusals: a message with the index, and nothing queued.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of prompt and input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "give exactly one of prompt and input_ids"),
        ({"prompt": ""}, "^a prompt needs at least one token"),
        ({"prompt": 3}, "prompt must be a string or a list of strings, got 3"),
        ({"prompt": ["a", 3]}, "request 1: prompt must be a string, got 3"),
        ({"prompt": ["a", ""]}, "request 1: a prompt needs at least one token"),
        ({"input_ids": []}, "^a prompt needs at least one token"),
        ({"input_ids": 5}, "input_ids must be a list of integers or of such lists, got 5"),
        ({"input_ids": [[1], 2]}, "request 1: input_ids must be a list of integers, got 2"),
        ({"input_ids": [[1], []]}, "request 1: a prompt needs at least one token"),
        ({"input_ids": [[1], [2, 432]]}, r"request 1: input_ids must be .* \[0, 431\], got 432"),
        ({"input_ids": [[1], [-1]]}, r"request 1: input_ids must be .* \[0, 431\], got -1"),
        ({"input_ids": [[1], [True]]}, "request 1: input_ids must be .* got True"),
        ({"input_ids": [[1], [2.0]]}, "request 1: input_ids must be .* got 2.0"),
        ({"prompt": ["a"], "sampling_params": [{}, {}]}, "sampling_params has 2 entries for 1"),
        ({"prompt": ["a"], "rid": ["b", "c"]}, "rid has 2 entries for 1"),
        (
            {"prompt": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]},
            r"request 1: top_p must be in \(0, 1\], got 2",
        ),
        ({"prompt": "a", "sampling_params": {"top_p": 2}}, r"^top_p must be in \(0, 1\], got 2"),
        ({"prompt": "a", "sampling_params": {"top_q": 2}}, "did you mean 'top_k'|'top_p'"),
        ({"prompt": ["a", "b"], "sampling_params": [{}, 7]}, "request 1: sampling_params must be"),
        ({"prompt": "a", "sampling_params": {"stop_token_ids": [432]}}, r"be in \[0, 431\]"),
        ({"prompt": "a", "rid": 5}, "rid must be a string that is not empty, got 5"),
        ({"prompt": ["a", "b"], "rid": ["x", ""]}, "request 1: rid must be a string"),
        ({"prompt": "a", "return_logprob": "yes"}, "return_logprob must be True or False, got 'y"),
        ({"prompt": "a", "return_state_digest": 1}, "return_state_digest must be True or False"),
        ({"prompt": "a", "stream": "no"}, "stream must be True or False, got 'no'"),
        ({"prompt": "a", "progress": 2}, "progress must be True or False, got 2"),
        ({"prompt": "a", "on_error": "skip"}, "on_error must be raise or return, got 'skip'"),
        ({"prompt": b"a"}, "prompt must be a string or a list of strings, got b'a'"),
        ({"prompt": {"a": 1}}, "prompt must be a string or a list of strings"),
    ],
)
def test_bad_input_is_refused_before_any_work(no_steps, arguments, message):
    with pytest.raises(ValueError, match=message):
        no_steps.generate(**arguments)
    assert no_steps.core.scheduler.is_idle


def test_what_is_longer_than_the_context(no_steps):
    longest = no_steps.context_length
    assert longest == CONTEXT
    with pytest.raises(
        ValueError,
        match=rf"request 1: The input \({longest + 1} tokens\) is longer than the model's context "
        rf"length \({longest} tokens\)\.",
    ):
        no_steps.generate(
            input_ids=[[1], [1] * (longest + 1)], sampling_params={"max_new_tokens": 0}
        )
    with pytest.raises(
        ValueError,
        match=f"maximum context length of {longest} tokens. You requested a total of "
        f"{longest + 1} tokens: {longest - 9} tokens from the input messages and 10 tokens for "
        "the completion",
    ):
        no_steps.generate(input_ids=[1] * (longest - 9), sampling_params={"max_new_tokens": 10})


def test_the_whole_context_can_be_used(engine):
    longest = engine.context_length
    result = engine.generate(input_ids=[1] * (longest - 10), sampling_params=greedy(10))
    assert len(result["output_ids"]) == 10
    scored = engine.score([1] * longest)
    assert len(scored["meta_info"]["input_token_logprobs"]) == longest


# What goes wrong.


class Failure(Exception):
    """Something the engine does not expect."""


@pytest.mark.parametrize("step", [0, 1, 5])
def test_an_exception_in_a_step_leaves_the_pools_balanced(engine, monkeypatch, step):
    expected = [r["output_ids"] for r in engine.generate(TEXTS, greedy(8))]
    run, left = engine.core.runner.run, [step]

    def failing(work):
        if left[0] == 0:
            raise Failure
        left[0] -= 1
        return run(work)

    monkeypatch.setattr(engine.core.runner, "run", failing)
    with pytest.raises(StepError, match="a step failed: Failure") as raised:
        engine.generate(TEXTS * 2, greedy(8))
    assert isinstance(raised.value.__cause__, Failure)
    settle(engine)
    monkeypatch.undo()
    assert [r["output_ids"] for r in engine.generate(TEXTS, greedy(8))] == expected


@pytest.fixture
def heeds_interrupts():
    """Python's own handler, which is missing where the run was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals reach the main thread only",
)
@pytest.mark.usefixtures("heeds_interrupts")
def test_ctrl_c_while_the_device_holds_the_state_leaves_the_engine_usable(engine, monkeypatch):
    expected = engine.generate(TEXTS, greedy(8))
    run = engine.core.runner.run

    def interrupted(work):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return run(work)

    for _ in range(5):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine.core.runner, "run", interrupted)
            engine.generate(TEXTS, greedy(8))
        settle(engine)
    again = engine.generate(TEXTS, greedy(8))
    assert [r["output_ids"] for r in again] == [r["output_ids"] for r in expected]


def test_an_exception_in_a_stream_gives_everything_back(engine, gate, monkeypatch):
    stream = engine.generate(TEXTS[0], greedy(190), stream=True)
    gate.let(1)
    next(stream)

    def failing(work):
        raise Failure

    monkeypatch.setattr(engine.core.runner, "run", failing)
    gate.let(1)
    with pytest.raises(StepError, match="a step failed: Failure"):
        for _ in stream:
            pass
    settle(engine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_running_request": 3}, "unknown engine argument 'max_running_request'"),
        ({"sampling_defaults": "mine"}, "sampling_defaults must be model or openai, got 'mine'"),
        ({"tp_size": 2}, "tp_size can only be 1, got 2: a model runs on one device"),
        ({"quantization": "fp8"}, "quantization is not supported: quantised weights are not"),
        ({"load_format": "fast"}, "load_format must be auto or dummy, got 'fast'"),
        ({"max_running_requests": 0}, r"max_running_requests must be an integer in \[1, .* got 0"),
        ({"max_running_requests": "8"}, "max_running_requests must be an integer .* got '8'"),
        ({"max_running_requests": True}, "max_running_requests must be an integer .* got True"),
        ({"max_running_requests": 1 << 40}, "max_running_requests must be an integer in"),
        ({"chunked_prefill_size": -3}, "chunked_prefill_size must be an integer .* got -3"),
        ({"chunked_prefill_size": 2.0}, "chunked_prefill_size must be an integer .* got 2.0"),
        ({"context_length": 0}, "context_length must be an integer of at least 1, got 0"),
        ({"context_length": [64]}, r"context_length must be an integer .* got \[64\]"),
        ({"context_length": 5000}, "at most the model's 4096 positions, got 5000"),
        ({"memory_bytes": 0}, "memory_bytes must be an integer of at least 1, got 0"),
        ({"memory_bytes": "1G"}, "memory_bytes must be an integer of at least 1, got '1G'"),
        ({"memory_bytes": 1000}, "memory_bytes 1000 is too small"),
        ({"block_size": 0}, "block_size must be an integer .* got 0"),
        ({"block_size": True}, "block_size must be an integer .* got True"),
        ({"dtype": None}, "dtype must be auto, float32, bfloat16, got None"),
        ({"state_dtype": 32}, "state_dtype must be one of .* got 32"),
        ({"stream_interval": 0}, "stream_interval must be at least 1, got 0"),
        ({"skip_tokenizer_init": "no"}, "skip_tokenizer_init must be True or False, got 'no'"),
        ({"model_path": ""}, "model_path must be demo, demo-dense or a model directory, got ''"),
        ({"model_path": None}, "model_path must be .* got None"),
        ({"dtype": "float16"}, "dtype must be auto, float32, bfloat16, got 'float16'"),
        ({"state_dtype": "int8"}, "state_dtype must be one of"),
        ({"block_size": 60}, "block_size must be a multiple of 16, got 60"),
    ],
)
def test_bad_engine_arguments(directory, arguments, message):
    with pytest.raises(ValueError, match=message):
        Engine(**({"model_path": directory, "load_format": "dummy"} | arguments))


def test_a_tokenizer_of_another_model(tmp_path):
    config = tiny_models.two_layers("q35_dense")
    directory = tiny_models.write_with_tokenizer(tmp_path, config)
    tiny_models.write(directory, config | {"vocab_size": 400})
    with pytest.raises(ValueError, match="the tokenizer has ids up to 422, .* ends at 399"):
        Engine(directory, load_format="dummy")


def test_a_bad_sampling_default_of_the_model_ends_the_start(tmp_path):
    config = tiny_models.two_layers("q35_dense")
    directory = tiny_models.write_with_tokenizer(tmp_path, config)
    (directory / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(
        ValueError, match=r"generation_config.json: top_p must be in \(0, 1], got 7"
    ):
        Engine(directory, load_format="dummy")


def test_a_failure_while_compiling_ends_the_thread(directory, monkeypatch):
    def failing(self):
        raise Failure("no program")

    monkeypatch.setattr(Runner, "warm_up", failing)
    before = set(threading.enumerate())
    with pytest.raises(Failure, match="no program"):
        start(directory)
    assert not set(threading.enumerate()) - before


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model directory"):
        Engine(tmp_path / "missing")


def test_ids_only_and_the_end(directory, monkeypatch):
    with start(directory, skip_tokenizer_init=True) as engine:
        with pytest.raises(ValueError, match="skip_tokenizer_init is set: give input_ids"):
            engine.generate("a")
        result = engine.generate(input_ids=[1, 2], sampling_params=greedy(2), return_logprob=True)
        assert "text" not in result
        assert [text for _, _, text in result["meta_info"]["output_token_logprobs"]] == [None, None]
        gate = Gate(engine, monkeypatch)
        stream = engine.generate(input_ids=[1, 2], sampling_params=greedy(190), stream=True)
        gate.let(1)
        next(stream)
        threading.Timer(0.1, gate.let, (1,)).start()
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="the engine is shut down"):
            for _ in stream:
                pass
    for call in (
        lambda: engine.generate(input_ids=[1]),
        lambda: engine.score([1, 2]),
        engine.get_server_info,
    ):
        with pytest.raises(EngineDeadError, match="the engine is shut down"):
            call()
