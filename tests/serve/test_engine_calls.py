"""The ways to call the engine: samples, errors in place, chat, parts of streams, counters."""

import asyncio
import io
import json
import logging
import re
import sys
from typing import Any

import jax
import pytest

from serve import Engine, SamplingParams
from serve.call_options import BlockingOptions
from serve.inputs import fold
from tests.serve.engines import SLOTS, TEXTS, greedy, sampled, settle, start

# Samples.


def test_samples_come_prompt_by_prompt_each_with_its_seed(engine):
    params = [sampled(6, n=3, sampling_seed=11), sampled(4, n=1, seed=-5), sampled(5, n=2)]
    outs = engine.generate(TEXTS, params, rid=["a", "b", "c"])
    names = [r["meta_info"]["id"] for r in outs]
    assert names == ["a-0", "a-1", "a-2", "b", "c-0", "c-1"]
    assert [len(r["output_ids"]) for r in outs] == [6, 6, 6, 4, 5, 5]
    seeds = [r["meta_info"]["sampling_seed"] for r in outs]
    assert seeds[:4] == [11, fold(11, 1), fold(11, 2), -5]
    assert seeds[5] == fold(seeds[4], 1)
    assert len({tuple(r["output_ids"]) for r in outs[:3]}) == 3
    # The seed that is returned gives a sample alone.
    for at, text in ((2, TEXTS[0]), (5, TEXTS[2])):
        count = len(outs[at]["output_ids"])
        alone = engine.generate(text, sampled(count, sampling_seed=seeds[at]))
        assert alone["output_ids"] == outs[at]["output_ids"]


def test_one_prompt_with_samples_gives_a_list(engine):
    outs = engine.generate(TEXTS[0], greedy(3, n=2))
    assert isinstance(outs, list)
    assert [r["output_ids"] for r in outs] == [outs[0]["output_ids"]] * 2


def test_folded_seeds():
    # Computed with: printf '%s' '7 1' | sha256sum, first 8 bytes, little-endian.
    assert [fold(7, 0), fold(-(1 << 63), 0)] == [7, -(1 << 63)]
    assert fold(7, 1) == 8153540708738543978
    seeds = {fold(seed, index) for seed in range(-50, 50) for index in range(50)}
    assert len(seeds) == 100 * 50
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)


def test_streams_of_samples(engine):
    whole = engine.generate(TEXTS[0], sampled(7, n=3, seed=1))
    last = {}
    for part in engine.generate(TEXTS[0], sampled(7, n=3, seed=1), stream=True):
        last[part["index"]] = part
    assert [last[i]["output_ids"] for i in range(3)] == [r["output_ids"] for r in whole]


# Errors in place.


def test_bad_prompts_of_a_batch_leave_the_others_as_they_are(engine):
    good = engine.generate(TEXTS, greedy(8), return_logprob=True, return_state_digest=True)
    prompts = [TEXTS[0], "", TEXTS[1], 7, TEXTS[2], "x" * 900]
    outs = engine.generate(
        prompts, greedy(8), return_logprob=True, return_state_digest=True, on_error="return"
    )
    for result, expected in zip(outs[::2], good, strict=True):
        assert result["output_ids"] == expected["output_ids"]
        for key in ("output_token_logprobs", "state_digest"):
            assert result["meta_info"][key] == expected["meta_info"][key]
    assert outs[1] == {
        "error": {"message": "a prompt needs at least one token", "type": "ValueError", "index": 1}
    }
    assert outs[3]["error"]["message"] == "prompt must be a string, got 7"
    assert "longer than the model's context length" in outs[5]["error"]["message"]
    assert [r["error"]["index"] for r in outs[1::2]] == [1, 3, 5]


def test_a_single_bad_prompt_is_returned(engine):
    assert engine.generate("", greedy(1), on_error="return")["error"]["index"] == 0


def test_a_stream_starts_with_the_refusals(engine):
    stream = engine.generate(["", TEXTS[0]], greedy(4), stream=True, on_error="return")
    first, *rest = stream
    assert first["error"]["index"] == 0
    assert {part["index"] for part in rest} == {1}
    assert len(rest[-1]["output_ids"]) == 4


# Chat.

MESSAGES = [{"role": "user", "content": "Say hi."}]


def test_chat_is_generation_from_the_rendered_prompt(engine):
    text = engine.tokenizer.apply_chat_template(MESSAGES)
    expected = engine.generate(text, greedy(6))
    result = engine.chat(MESSAGES, greedy(6))
    assert (result["text"], result["output_ids"]) == (expected["text"], expected["output_ids"])
    *_, last = engine.chat(MESSAGES, greedy(6), stream=True)
    assert last["output_ids"] == expected["output_ids"]
    other = [{"role": "user", "content": "Say no."}]
    both = engine.chat([MESSAGES, other], [greedy(6), greedy(2)], rid=["x", "y"])
    assert both[0]["output_ids"] == expected["output_ids"]
    assert [r["meta_info"]["id"] for r in both] == ["x", "y"]


def test_chat_for_coroutines_is_chat(engine):
    other = [{"role": "user", "content": "Say no."}]
    alone, both = engine.chat(MESSAGES, greedy(6)), engine.chat([MESSAGES, other], greedy(3))

    async def read():
        stream = await engine.async_chat(MESSAGES, greedy(6), stream=True)
        return [part async for part in stream]

    async def run():
        return await asyncio.gather(
            engine.async_chat(MESSAGES, greedy(6)),
            engine.async_chat([MESSAGES, other], greedy(3), rid=["x", "y"]),
            read(),
        )

    one, two, parts = asyncio.run(run())
    assert (one["text"], one["output_ids"]) == (alone["text"], alone["output_ids"])
    assert [r["output_ids"] for r in two] == [r["output_ids"] for r in both]
    assert [r["meta_info"]["id"] for r in two] == ["x", "y"]
    for before, after in zip(parts, parts[1:], strict=False):
        assert before["meta_info"]["finish_reason"] is None
        assert after["text"].startswith(before["text"])
    assert (parts[-1]["text"], parts[-1]["output_ids"]) == (alone["text"], alone["output_ids"])


def test_chat_for_coroutines_passes_tools_names_and_errors(engine):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    names = {"enable_thinking": False}
    text = engine.tokenizer.apply_chat_template(MESSAGES, tools=tools, **names)

    async def run():
        return await engine.async_chat(
            [MESSAGES, []],
            greedy(1),
            tools=tools,
            chat_template_kwargs=names,
            on_error="return",
        )

    result, refused = asyncio.run(run())
    assert result["meta_info"]["prompt_tokens"] == len(engine.tokenizer.encode(text))
    assert refused["error"]["message"] == "a chat needs at least one message"


def test_chat_passes_tools_and_names_to_the_template(engine):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    plain = engine.chat(MESSAGES, greedy(1))["meta_info"]["prompt_tokens"]
    text = engine.tokenizer.apply_chat_template(MESSAGES, tools=tools, enable_thinking=False)
    result = engine.chat(
        MESSAGES, greedy(1), tools=tools, chat_template_kwargs={"enable_thinking": False}
    )
    tokens = result["meta_info"]["prompt_tokens"]
    assert tokens == len(engine.tokenizer.encode(text))
    assert tokens >= plain


def test_a_bad_chat_of_a_batch_leaves_the_others_as_they_are(engine):
    outs = engine.chat([MESSAGES, [], MESSAGES], greedy(4), on_error="return")
    expected = engine.chat(MESSAGES, greedy(4))["output_ids"]
    assert outs[0]["output_ids"] == outs[2]["output_ids"] == expected
    assert outs[1]["error"]["message"] == "a chat needs at least one message"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "a chat needs at least one message"),
        ("hi", {}, "messages must be a list of messages or of such lists, got 'hi'"),
        ([7], {}, "message"),
        ([MESSAGES, []], {}, "request 1: a chat needs at least one message"),
        ([MESSAGES, 5], {}, "request 1: messages must be a list of messages, got 5"),
        (MESSAGES, {"chat_template_kwargs": [1]}, "chat_template_kwargs must be a dict"),
        (MESSAGES, {"chat_template_kwargs": {"tools": []}}, "without messages, tools, got"),
    ],
)
def test_bad_chats(no_steps, messages, options, message):
    with pytest.raises(ValueError, match=message):
        no_steps.chat(messages, greedy(1), **options)
    with pytest.raises(ValueError, match=message):
        asyncio.run(no_steps.async_chat(messages, greedy(1), **options))


# Scores.


def test_scores_for_coroutines_are_scores(engine):
    ids = [[1, 2, 3] * 20, [4], [5, 6]]
    one = engine.score(ids[0], top_logprobs_num=2)
    several = engine.score(ids)

    async def run():
        return await asyncio.gather(
            engine.async_score(ids[0], top_logprobs_num=2), engine.async_score(ids)
        )

    alone, listed = asyncio.run(run())
    for result, expected in zip([alone, *listed], [one, *several], strict=True):
        info, wanted = result["meta_info"], expected["meta_info"]
        assert info["input_token_logprobs"] == wanted["input_token_logprobs"]
        assert info.get("input_top_logprobs") == wanted.get("input_top_logprobs")
        assert result["output_ids"] == []
    assert len(alone["meta_info"]["input_top_logprobs"]) == 60


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "a prompt needs at least one token"),
        ([[1], [9999]], {}, "request 1: input_ids must be integers in"),
        ([1], {"top_logprobs_num": 99}, "top_logprobs_num must be in"),
    ],
)
def test_bad_scores(no_steps, ids, options, message):
    with pytest.raises(ValueError, match=message):
        no_steps.score(ids, **options)
    with pytest.raises(ValueError, match=message):
        asyncio.run(no_steps.async_score(ids, **options))


# Options.


@pytest.mark.parametrize("name", ["generate", "async_generate", "chat", "async_chat"])
@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("top_logprob_num", "; did you mean 'top_logprobs_num'?"),
        ("sampling_parameters", "; did you mean 'sampling_params'?"),
        ("zzz", ""),
        ("temperature", "; it is a sampling parameter, and goes into sampling_params"),
        ("max_tokens", "; it is a sampling parameter, and goes into sampling_params"),
    ],
)
def test_an_option_that_there_is_not(no_steps, name, option, hint):
    call = getattr(no_steps, name)
    argument = MESSAGES if "chat" in name else "a"
    with pytest.raises(TypeError) as raised:
        asyncio.run(call(argument, **{option: 1})) if "async" in name else call(
            argument, **{option: 1}
        )
    message = f"{name}() got an unexpected keyword argument {option!r}{hint}"
    assert str(raised.value) == message


def test_every_option_is_explained():
    arguments = (Engine.generate.__doc__ or "").split("Args:")[1].split("Returns:")[0]
    explained = set(re.findall(r"^ {10}(\w+): ", arguments, re.M))
    own = {"prompt", "sampling_params", "input_ids"}
    assert explained == BlockingOptions.__optional_keys__ | own


def test_only_a_call_that_waits_has_a_bar(no_steps):
    with pytest.raises(TypeError, match="unexpected keyword argument 'progress'"):
        asyncio.run(no_steps.async_generate("a", progress=True))


def test_options_go_by_name_only(no_steps):
    with pytest.raises(TypeError, match="positional"):
        no_steps.generate(None, None, [1], True)


# Defaults.


def params_of(engine, given):
    """The parameters of a request, as the engine fills them up."""
    (request,) = engine.inputs.read("a", given).requests
    return request.params


def test_the_models_own_sampling_defaults_lie_below_what_is_given(engine, directory):
    # The directory's generation_config.json has the temperature, and nothing else of ours.
    found = json.loads((directory / "generation_config.json").read_text())
    assert found == {"eos_token_id": [2, 0], "temperature": 0.7}
    assert params_of(engine, None) == SamplingParams(temperature=0.7)
    assert params_of(engine, {"top_p": 0.5}) == SamplingParams(temperature=0.7, top_p=0.5)
    assert params_of(engine, {"temperature": None}) == SamplingParams(temperature=0.7)
    assert params_of(engine, {"temperature": 0.2}) == SamplingParams(temperature=0.2)
    # Ready ones do not say what of them was given.
    assert params_of(engine, SamplingParams(top_p=0.5)) == SamplingParams(top_p=0.5)
    bare = {"max_new_tokens": 40, "ignore_eos": True, "seed": 3}
    outs = [engine.generate(TEXTS[0], p) for p in (bare, bare | {"temperature": 0.7})]
    assert outs[0]["output_ids"] == outs[1]["output_ids"]


def test_fixed_sampling_defaults(directory):
    with start(directory, sampling_defaults="openai") as engine:
        assert params_of(engine, None) == SamplingParams()
        assert params_of(engine, {"top_p": 0.5}) == SamplingParams(top_p=0.5)


# Parts of streams.


def test_incremental_parts_add_up(engine, monkeypatch):
    whole = engine.generate(TEXTS[2], sampled(30, seed=4), return_logprob=True, top_logprobs_num=2)
    monkeypatch.setattr(engine, "_is_incremental", True)
    parts = list(
        engine.generate(
            TEXTS[2], sampled(30, seed=4), return_logprob=True, top_logprobs_num=2, stream=True
        )
    )
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert sum((part["output_ids"] for part in parts), []) == whole["output_ids"]
    for key in ("output_token_logprobs", "output_top_logprobs"):
        assert sum((part["meta_info"][key] for part in parts), []) == whole["meta_info"][key]
    assert parts[-1]["meta_info"]["completion_tokens"] == 30


@pytest.mark.parametrize("engines_own", [False, True])
def test_a_part_has_as_many_tokens_as_the_interval_says(engine, monkeypatch, engines_own):
    if engines_own:
        monkeypatch.setattr(engine, "_interval", 7)
    params = greedy(23) if engines_own else greedy(23, stream_interval=7)
    counts = [len(part["output_ids"]) for part in engine.generate(TEXTS[0], params, stream=True)]
    assert counts[-1] == 23
    assert all(b - a >= 7 for a, b in zip([0, *counts], counts[:-1], strict=False))


def test_stops_are_held_back_while_streaming(engine):
    free = engine.generate(TEXTS[0], greedy(40))["text"]
    stop = free[10:14]
    whole = engine.generate(TEXTS[0], greedy(40, stop=stop))
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert whole["text"] == free[: free.index(stop)]
    for part in engine.generate(TEXTS[0], greedy(40, stop=stop), stream=True):
        assert whole["text"].startswith(part["text"])
    assert part["text"] == whole["text"]


# Progress.


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "wanted"), [(Terminal, True), (Terminal, False), (io.StringIO, True)]
)
def test_a_progress_bar_only_on_a_terminal_and_if_wanted(engine, monkeypatch, kind, wanted):
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    engine.generate(TEXTS, greedy(3), progress=wanted)
    shown = stream.getvalue()
    assert ("3/3" in shown) == (kind is Terminal and wanted)
    assert bool(shown) == (kind is Terminal and wanted)


# Without a tokenizer.


@pytest.fixture(scope="module")
def ids_only(directory):
    with start(directory, skip_tokenizer_init=True) as engine:
        yield engine


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate("a"), "skip_tokenizer_init is set: give input_ids"),
        (lambda e: e.generate(input_ids=[1], sampling_params={"stop": "x"}), "stop needs a token"),
        (
            lambda e: e.generate(input_ids=[1], sampling_params={"stop_regex": "x"}),
            "stop_regex needs a tokenizer",
        ),
        (lambda e: e.chat(MESSAGES), "chat needs a tokenizer"),
    ],
)
def test_what_needs_a_tokenizer(ids_only, call, message):
    with pytest.raises(ValueError, match=message):
        call(ids_only)
    settle(ids_only)


def test_end_tokens_that_nobody_knows(tmp_path_factory, directory, ids_only):
    params = {"min_new_tokens": 3, "max_new_tokens": 5}
    assert len(ids_only.generate(input_ids=[1], sampling_params=params)["output_ids"]) >= 3
    folder = tmp_path_factory.mktemp("endless")
    config = json.loads((directory / "config.json").read_text())
    text_config = config.get("text_config", config)
    for where in (config, text_config):
        where.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(config))
    with Engine(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        compilation_cache_dir=directory / "compiled",
        max_running_requests=SLOTS,
        chunked_prefill_size=13,
        context_length=200,
    ) as engine:
        with pytest.raises(ValueError, match="min_new_tokens needs the ids that end a text"):
            engine.generate(input_ids=[1], sampling_params=params)
        plain: Any = engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 5})
        assert len(plain["output_ids"]) == 5


# Counters, compilation, administration.


def test_nothing_compiles_after_the_start(engine):
    compiled = []

    def listen(name: str, duration_s: float, **_) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    before = engine.get_server_info()
    everything = sampled(
        30,
        n=2,
        frequency_penalty=0.5,
        presence_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={3: -1.0},
        min_new_tokens=4,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        stop=["zzz"],
    )
    engine.generate(
        TEXTS,
        [everything, greedy(3), sampled(70)],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=5,
        token_ids_logprob=[1, 2],
        return_state_digest=True,
    )
    engine.generate(input_ids=[1] * 64, sampling_params=greedy(1), return_state_digest=True)
    engine.generate(TEXTS[0], {"max_new_tokens": 3})
    engine.score([[1] * 100, [2]], top_logprobs_num=3)
    after = engine.get_server_info()
    assert compiled == []
    assert after["compile_total"] == before["compile_total"] == 2
    assert after["num_late_compiles"] == 0


def test_a_late_compilation_is_counted_and_warned_of(directory, caplog):
    with start(directory) as engine, caplog.at_level(logging.WARNING):
        engine.core.runner._extract.clear_cache()
        engine.generate("a", greedy(2), return_state_digest=True)
        assert engine.get_server_info()["num_late_compiles"] == 1
    (record,) = [r for r in caplog.records if "compiling" in r.message]
    assert record.message.startswith("compiling the extract of a slot's state after the start")


def test_settings_of_the_thread_that_starts_an_engine_cost_no_compilation(directory):
    with jax.numpy_rank_promotion("warn"):
        engine = start(directory)
    with engine:
        engine.generate("a", greedy(2), return_state_digest=True)
        assert engine.get_server_info()["num_late_compiles"] == 0


def test_counters(engine, gate):
    info = engine.get_server_info()
    assert (info["num_running_reqs"], info["num_waiting_reqs"], info["token_usage"]) == (0, 0, 0)
    assert info["num_used_blocks"] == info["num_used_state_slots"] == 0
    stream = engine.generate(input_ids=[[1] * 100] * 5, sampling_params=greedy(100), stream=True)
    # Eight pieces of the first prompt.
    gate.let(8)
    next(stream)
    info = engine.get_server_info()
    assert info["num_running_reqs"] == SLOTS and info["num_waiting_reqs"] == 2
    assert 0 < info["num_used_blocks"] <= info["num_blocks"]
    assert 0 < info["token_usage"] <= 1
    assert engine.flush_cache() is False
    stream.close()
    gate.open()
    settle(engine)
    assert engine.flush_cache() is True


def test_what_the_model_is(engine, directory):
    info = engine.get_model_info()
    assert info["model_path"] == str(directory)
    assert (info["vocab_size"], info["num_layers"], info["model_type"]) == (432, 2, "qwen3_5")
    assert info["max_context_length"] == engine.context_length
    assert info["eos_token_ids"] == list(engine.tokenizer.eos_token_ids)


def test_a_profile_is_written(engine, tmp_path):
    for bad in ("", None, 3):
        with pytest.raises(ValueError, match="a profile needs the name of a directory"):
            engine.start_profile(bad)
    engine.start_profile(tmp_path)
    with pytest.raises(RuntimeError):
        engine.start_profile(tmp_path)
    engine.generate("a", greedy(2))
    engine.stop_profile()
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".pb", ".gz")]
    with pytest.raises(RuntimeError):
        engine.stop_profile()
