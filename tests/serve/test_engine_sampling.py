"""Sampling parameters and log-probabilities through the engine.

Logits come from the model's reference form; everything about bits is compared with another run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_hybrid import HybridModel
from serve.inputs import Wanted
from serve.request import Request
from tests import tiny_models
from tests.serve.engines import TEXTS, greedy, sampled

VOCAB = tiny_models.VOCAB_SIZE
PROMPT = [7, 300, 7, 12, 45, 45, 45, 200, 9, 13, 61, 7, 88, 120, 5, 31, 300, 2]
# Random weights hardly repeat themselves; among these few tokens, counts decide.
FEW = dict.fromkeys(range(10, 18), 12.0)
MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "logit_bias": FEW, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 0.9, "logit_bias": FEW, "repetition_penalty": 1.6, "frequency_penalty": 1.5},
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.8, "logit_bias": {3: 1.5, 9: -2.0}},
    {"temperature": 0.7, "top_k": 40, "frequency_penalty": 1.2, "presence_penalty": -0.3},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 0.8},
    {"min_new_tokens": 5, "stop_token_ids": list(range(0, VOCAB, 3)), "ignore_eos": False},
    {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 3, "stop": ["e", "\n"]},
]
LOGPROBS = (
    "input_token_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)


def mixed(index: int) -> dict[str, Any]:
    """The i-th of the mixed parameters, as a run of at most 14 tokens."""
    return sampled(14, sampling_seed=100 + index) | MIXED[index]


def reference_logits(engine: Any, length: int) -> Any:
    """A function from ids to the logits of the next token, in the reference form."""
    model = HybridModel(engine.model_config, "float32")
    params = engine.core.runner._params

    @jax.jit
    def logits(ids: jax.Array) -> jax.Array:
        return model.bind({"params": params}).sequence(ids[None]).logits[0]

    def of(ids: list[int]) -> np.ndarray:
        padded = jnp.zeros(length, jnp.int32).at[: len(ids)].set(jnp.asarray(ids, jnp.int32))
        return np.asarray(logits(padded)[len(ids) - 1], np.float64)

    return of


# Penalties.


def test_greedy_with_penalties_follows_the_reference(engine):
    cases = [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.6, "presence_penalty": 2.0},
        {"frequency_penalty": 0.9, "presence_penalty": 0.5},
        {"frequency_penalty": -0.5, "logit_bias": {4: 2.0, 400: 3.0}},
        {"frequency_penalty": 0.7, "presence_penalty": -0.2, "logit_bias": FEW},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": {7: -1.0}},
    ]
    outs = engine.generate(
        input_ids=[PROMPT] * len(cases), sampling_params=[greedy(24, **case) for case in cases]
    )
    plain = engine.generate(input_ids=PROMPT, sampling_params=greedy(24))["output_ids"]
    logits_of = reference_logits(engine, len(PROMPT) + 24)
    for case, out in zip(cases, outs, strict=True):
        output: list[int] = []
        for token in out["output_ids"]:
            scores = logits_of([*PROMPT, *output])
            factor = case.get("repetition_penalty", 1.0)
            for seen in {*PROMPT, *output}:
                scores[seen] *= factor if scores[seen] < 0 else 1 / factor
            for seen in set(output):
                scores[seen] -= output.count(seen) * case.get("frequency_penalty", 0.0)
                scores[seen] -= case.get("presence_penalty", 0.0)
            for biased, value in case.get("logit_bias", {}).items():
                scores[biased] += value
            # The reference adds in another order.
            assert scores[token] >= scores.max() - 1e-4
            output.append(token)
        assert output != plain


def test_a_bias_can_force_and_ban_tokens(engine):
    free = engine.generate(TEXTS[0], greedy(8))["output_ids"]
    forced = engine.generate(TEXTS[0], sampled(8, logit_bias={"77": 1e6}))
    assert forced["output_ids"] == [77] * 8
    banned = engine.generate(TEXTS[0], greedy(8, logit_bias=dict.fromkeys(free, -1e300)))
    assert not set(banned["output_ids"]) & set(free)
    # One row's bias is gone with its request.
    assert engine.generate(TEXTS[0], greedy(8))["output_ids"] == free
    zero = engine.generate(TEXTS[0], greedy(8, logit_bias={5: 0.0}))
    assert zero["output_ids"] == free


@pytest.mark.parametrize("minimum", [1, 5, 12])
def test_the_output_does_not_end_before_its_minimum(engine, minimum):
    ends = list(range(0, VOCAB, 2))
    result = engine.generate(TEXTS[0], sampled(40, min_new_tokens=minimum, stop_token_ids=ends))
    ids = result["output_ids"]
    assert len(ids) > minimum
    assert not set(ids[:-1]) & set(ends)
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[-1]}


def test_neighbours_parameters_change_no_bit(engine):
    together = engine.generate(
        input_ids=[PROMPT] * len(MIXED),
        sampling_params=[mixed(i) for i in range(len(MIXED))],
        return_logprob=True,
    )
    for index, beside in enumerate(together):
        alone = engine.generate(input_ids=PROMPT, sampling_params=mixed(index), return_logprob=True)
        assert beside["output_ids"] == alone["output_ids"]
        key = "output_token_logprobs"
        assert beside["meta_info"][key] == alone["meta_info"][key]


# Log-probabilities.


def test_score_of_prompt_and_output_equals_what_generation_returned(engine):
    outs = engine.generate(
        input_ids=[PROMPT] * len(MIXED),
        sampling_params=[mixed(i) for i in range(len(MIXED))],
        return_logprob=True,
        logprob_start_len=4,
        top_logprobs_num=5,
    )
    scores = engine.score([[*PROMPT, *out["output_ids"]] for out in outs], top_logprobs_num=5)
    for params, out, score in zip(MIXED, outs, scores, strict=True):
        generated, scored = out["meta_info"], score["meta_info"]
        tokens, top = scored["input_token_logprobs"], scored["input_top_logprobs"]
        split = len(PROMPT)
        assert generated["output_token_logprobs"] == tokens[split:]
        num_top, num_input_top = params.get("logprobs", 5), params.get("prompt_logprobs", 5)
        assert generated["output_top_logprobs"] == [row[:num_top] for row in top[split:]]
        start = 0 if "prompt_logprobs" in params else 4
        assert generated["input_token_logprobs"][1:] == tokens[start + 1 : split]
        assert generated["input_token_logprobs"][0] == (None, *tokens[start][1:])
        assert generated["input_top_logprobs"][0] is None
        wanted = [row[:num_input_top] for row in top[start + 1 : split]]
        assert generated["input_top_logprobs"][1:] == wanted


def test_top_and_chosen_ids_agree_with_the_whole_distribution(engine):
    run = functools.partial(
        engine.generate, TEXTS[1], sampled(4, sampling_seed=3), return_logprob=True
    )
    every: list[list] = [[] for _ in range(4)]
    for start in range(0, VOCAB, 128):
        ids = list(range(start, min(start + 128, VOCAB)))
        rows = run(token_ids_logprob=ids)["meta_info"]["output_token_ids_logprobs"]
        for row, more in zip(every, rows, strict=True):
            assert [token for _, token, _ in more] == ids
            row.extend(more)
    info = run(top_logprobs_num=20)["meta_info"]
    for row, top, chosen in zip(
        every, info["output_top_logprobs"], info["output_token_logprobs"], strict=True
    ):
        assert np.exp([value for value, _, _ in row]).sum() == pytest.approx(1, abs=1e-5)
        assert top == sorted(row, key=lambda triple: (-triple[0], triple[1]))[:20]
        assert row[chosen[1]] == chosen
        assert all(text == engine.tokenizer.token_text(token) for _, token, text in top)


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_of_the_prompt_from_any_position(engine, count):
    whole = engine.score(PROMPT)["meta_info"]["input_token_logprobs"]
    for start in (0, 1, 12, 13, 14, len(PROMPT) - 1):
        info = engine.generate(
            input_ids=PROMPT,
            sampling_params=greedy(count),
            return_logprob=True,
            logprob_start_len=start,
            token_ids_logprob=[PROMPT[5], 0],
        )["meta_info"]
        rows = info["input_token_logprobs"]
        assert rows == [(None, *whole[start][1:]), *whole[start + 1 :]]
        by_id = info["input_token_ids_logprobs"]
        assert by_id[0] is None and len(by_id) == len(rows)
        for row, pair in zip(rows[1:], by_id[1:], strict=True):
            assert [token for _, token, _ in pair] == [PROMPT[5], 0]
            assert row[0] == pair[0][0] or row[1] != PROMPT[5]
        assert "input_top_logprobs" not in info
        assert len(info["output_token_logprobs"]) == count


def test_other_engines_names_for_log_probabilities(engine):
    ours = engine.generate(
        TEXTS[0], greedy(3), return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    )["meta_info"]
    theirs = engine.generate(
        TEXTS[0],
        {
            "temperature": 0,
            "max_tokens": 3,
            "ignore_eos": True,
            "logprobs": 2,
            "prompt_logprobs": 0,
        },
    )["meta_info"]
    for key in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
        assert theirs[key] == ours[key]
    assert "input_top_logprobs" not in theirs


def test_only_the_last_tokens_of_the_prompt_may_be_kept(engine):
    short = engine.generate(input_ids=PROMPT[-6:], sampling_params=greedy(5))
    cut = engine.generate(input_ids=PROMPT, sampling_params=greedy(5, truncate_prompt_tokens=6))
    assert cut["output_ids"] == short["output_ids"]
    assert cut["meta_info"]["prompt_tokens"] == 6
    long = engine.generate(
        input_ids=[3] * 5000, sampling_params=greedy(1, truncate_prompt_tokens=100)
    )
    assert long["meta_info"]["prompt_tokens"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_logprobs_num": 21}, r"top_logprobs_num must be in \[0, 20\], got 21"),
        ({"top_logprobs_num": True}, r"top_logprobs_num must be in \[0, 20\], got True"),
        ({"token_ids_logprob": [1] * 129}, "token_ids_logprob must have at most 128 ids, got 129"),
        ({"token_ids_logprob": [VOCAB]}, rf"token_ids_logprob must be integers in .*got {VOCAB}"),
        ({"token_ids_logprob": 3}, "token_ids_logprob must be a list of token ids, got 3"),
        ({"logprob_start_len": -2}, "logprob_start_len must be an integer of at least -1, got -2"),
        (
            {"logprob_start_len": len(PROMPT)},
            rf"logprob_start_len must be below the prompt's length \({len(PROMPT)} tokens\)",
        ),
        (
            {"return_logprob": False, "top_logprobs_num": 1},
            "top_logprobs_num needs return_logprob=True",
        ),
        (
            {"return_logprob": False, "logprob_start_len": 0},
            "logprob_start_len needs return_logprob=True",
        ),
        (
            {"return_logprob": False, "token_ids_logprob": [1]},
            "token_ids_logprob needs return_logprob=True",
        ),
    ],
)
def test_bad_wishes_for_log_probabilities(no_steps, arguments, message):
    with pytest.raises(ValueError, match=message):
        no_steps.generate(input_ids=PROMPT, **{"return_logprob": True} | arguments)


# Preemption.


def run_by_hand(engine: Any, params: dict[str, Any], preempt_at: frozenset[int]) -> Request:
    """One request, made to give up its slot before the steps named."""
    return engine.loop.call(lambda: _run_by_hand(engine, params, preempt_at))


def _run_by_hand(engine: Any, params: dict[str, Any], preempt_at: frozenset[int]) -> Request:
    wanted = Wanted(
        return_logprob=True, logprob_start_len=2, top_logprobs_num=3, token_ids_logprob=[0, 5]
    )
    prompt = [*PROMPT, *PROMPT, 11]
    (request,) = engine.inputs.read(None, params, prompt, wanted=wanted).requests
    scheduler = engine.core.scheduler
    scheduler.add(request)
    step = 0
    while not request.is_finished:
        if step in preempt_at and request in scheduler.running:
            scheduler.preempt(request)
        engine.core.step()
        step += 1
    return request


def outcome(request: Request) -> tuple:
    """All that a request gave."""
    lists = [getattr(request, name) for name in vars(request) if name.endswith("logprobs")]
    assert len(lists) == 6
    assert request.output_text is not None
    return request.output_ids, request.output_text.text, request.finish_reason, *lists


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_a_resumed_request_gives_what_it_would_have_given(engine, index):
    expected = run_by_hand(engine, mixed(index), frozenset())
    num_input = len(expected.prompt_ids) - 1 - max(expected.input_start, 0)
    assert len(expected.input_logprobs) == len(expected.input_top_logprobs) == num_input
    # Within the prompt, which takes three steps, after it, and again and again.
    for moments in ({1}, {2}, {3}, {4, 9}, {1, 6, 11, 16}, {2, 3, 4, 5}):
        resumed = run_by_hand(engine, mixed(index), frozenset(moments))
        assert outcome(resumed) == outcome(expected)
        assert resumed.num_retractions > 0


def test_a_slot_forgets_the_request_before(engine):
    params = greedy(6, repetition_penalty=1.7, presence_penalty=1.0)
    first = engine.generate(input_ids=PROMPT, sampling_params=params, rid="same")
    engine.generate(input_ids=[[1, 2, 3]] * 3, sampling_params=params)
    again = engine.generate(input_ids=PROMPT, sampling_params=params, rid="same")
    assert again["output_ids"] == first["output_ids"]


# Stops.


def test_stop_strings_cut_the_text_and_are_named(engine):
    free = engine.generate(TEXTS[0], greedy(40))
    text = free["text"]
    stop = text[9:12]
    at = text.find(stop)
    result = engine.generate(TEXTS[0], greedy(40, stop=["never", stop]))
    assert result["text"] == text[:at]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    count = len(result["output_ids"])
    assert result["output_ids"] == free["output_ids"][:count] and count < 40
    kept = engine.generate(TEXTS[0], greedy(40, stop=stop, no_stop_trim=True))
    assert kept["text"] == text[: at + len(stop)]
    assert kept["output_ids"] == result["output_ids"]


@pytest.mark.parametrize("more", [{"stop_regex": r"\w\W+\w"}, {"stop": "e"}, {"stop": "never"}])
def test_a_stream_shows_nothing_that_it_takes_back(engine, more):
    params = sampled(40, sampling_seed=2, **more)
    whole = engine.generate(TEXTS[0], params)
    shown = ""
    for part in engine.generate(TEXTS[0], params, stream=True):
        assert part["text"].startswith(shown)
        shown = part["text"]
    assert shown == whole["text"]
    assert part["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert part["output_ids"] == whole["output_ids"]


def test_nothing_compiles_for_any_parameter(engine):
    runner = engine.core.runner
    programs = (runner._step, runner._sampling._with_slot)
    before = [program._cache_size() for program in programs]
    assert before == [1, 1]
    engine.generate(
        input_ids=[PROMPT] * len(MIXED),
        sampling_params=[mixed(i) for i in range(len(MIXED))],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=20,
        token_ids_logprob=[1],
    )
    assert [program._cache_size() for program in programs] == before
