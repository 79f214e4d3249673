"""Drafts in the engine: whatever is proposed and accepted, every request gets what it gets without.

Named after the edge cases of speculative decoding that a host that plays the drafter can bring
about: drafts are the known outputs, spoilt where a case wants them to be rejected.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from serve import Engine
from serve.request import Request
from serve.speculation import Given
from tests import tiny_models

WIDTH = 17
SLOTS = 3
CONTEXT = 320
# A budget of few groups, so that sparse layers choose early.
CONFIGS = ("q35_dense", "q4_qsa")

Rule = Callable[[Request, list[int]], Given]


def start(directory, **arguments) -> Any:
    """An engine whose every step is one program, which halves the time to compile."""
    return Engine(
        directory,
        load_format="dummy",
        dtype="float32",
        max_running_requests=SLOTS,
        chunked_prefill_size=13,
        context_length=CONTEXT,
        sampling_defaults="openai",
        **arguments,
    )


class Pair:
    """A plain engine, and one whose drafts a rule makes of the output that is expected."""

    def __init__(self, directory):
        self.plain = start(directory)
        self.drafting = start(
            directory, speculative_debug="oracle", speculative_num_draft_tokens=WIDTH
        )
        self.rule: Rule = right
        self.drafting.core.runner.speculation.given = self._given
        self._expected: dict[Any, list[int]] = {}

    def _given(self, request: Request, most: int) -> Given:
        expected = self._expected[tuple(request.prompt_ids), request.seed, repr(request.params)]
        at = len(request.output_ids)
        given = self.rule(request, expected[at : at + most])
        assert len(given.tokens) <= most
        return given

    def close(self) -> None:
        self.plain.shutdown()
        self.drafting.shutdown()

    def outputs(self, prompts, params, rule: Rule, **options) -> tuple[list[dict], list[dict]]:
        """Results without and with drafts."""
        options = {"return_logprob": True, "return_state_digest": True, **options}
        params = [{"sampling_seed": 11 + i, **p} for i, p in enumerate(params)]
        expected = self.plain.generate(input_ids=prompts, sampling_params=params, **options)
        requests = self.drafting.inputs.read(None, params, prompts).requests
        for request, out in zip(requests, expected, strict=True):
            key = (tuple(request.prompt_ids), request.seed, repr(request.params))
            self._expected[key] = out["output_ids"]
        self.rule = rule
        found = self.drafting.generate(input_ids=prompts, sampling_params=params, **options)
        return expected, found

    def check(self, prompts, params, rule: Rule, **options) -> list[dict]:
        """Both give the same; meta_info of the results with drafts."""
        expected, found = self.outputs(prompts, params, rule, **options)
        for a, b in zip(expected, found, strict=True):
            assert b["output_ids"] == a["output_ids"]
            assert b.get("text") == a.get("text")
            for name in ("finish_reason", "output_token_logprobs", "state_digests"):
                assert b["meta_info"].get(name) == a["meta_info"].get(name), name
            check_counters(b["meta_info"])
        core = self.drafting.core
        assert core.is_idle
        core.scheduler.check_integrity()
        return [result["meta_info"] for result in found]


def check_counters(info: dict[str, Any]) -> None:
    """The identities between what is counted (T40)."""
    histogram, rounds = info["spec_correct_drafts_histogram"], info["spec_verify_ct"]
    accepted = info["spec_num_correct_drafts"]
    assert sum(histogram) == rounds
    assert sum(count * number for number, count in enumerate(histogram)) == accepted
    # The first token comes from the prompt; a stop in the text may cut the last round.
    assert 1 + accepted + rounds >= info["completion_tokens"]
    assert sum(info["spec_accepted_by_position"]) == accepted
    assert info["spec_accepted_by_position"] == sorted(
        info["spec_accepted_by_position"], reverse=True
    )
    assert info["spec_num_proposed_drafts"] == rounds * (WIDTH - 1)
    assert info["spec_accept_histogram"] == histogram


def right(request: Request, expected: list[int]) -> Given:
    """All that may be drafted, and right."""
    return Given(expected, WIDTH - 1)


def capped(most: int) -> Rule:
    """Right, but no more than some are accepted."""
    return lambda request, expected: Given(expected, most)


def spoilt(place: int) -> Rule:
    """Right up to a place."""

    def rule(request: Request, expected: list[int]) -> Given:
        wrong = [(token + 1) % 300 for token in expected[place:]]
        return Given([*expected[:place], *wrong], WIDTH - 1)

    return rule


def varied(request: Request, expected: list[int]) -> Given:
    """Another number of drafts and of right ones in every round; none in some."""
    draw = request.committed_len * 7 + request.slot * 3
    return spoilt(draw % 6)(request, expected[: draw % WIDTH])


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    config = tiny_models.two_layers(request.param)
    directory = tiny_models.write_with_tokenizer(tmp_path_factory.mktemp("model"), config)
    pair = Pair(directory)
    yield pair
    pair.close()


def prompts_of(rng, *lengths: int) -> list[list[int]]:
    return [rng.integers(0, 300, length).tolist() for length in lengths]


def greedy(count: int, **more) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True, **more}


def sampled(count: int, **more) -> dict[str, Any]:
    return greedy(count, **more) | {"temperature": 1.0}


def test_t01_every_draft_rejected(pair, rng):
    (info,) = pair.check(prompts_of(rng, 24), [greedy(96)], spoilt(0))
    assert (info["spec_verify_ct"], info["spec_num_correct_drafts"]) == (95, 0)
    assert info["spec_correct_drafts_histogram"] == [95]


def test_t02_every_draft_accepted(pair, rng):
    (info,) = pair.check(prompts_of(rng, 24), [greedy(1 + 4 * WIDTH)], right)
    assert info["spec_correct_drafts_histogram"] == [0] * (WIDTH - 1) + [4]


@pytest.mark.parametrize("accepted", range(0, WIDTH, 3))
def test_t03_every_number_of_accepted_drafts_over_every_boundary(pair, rng, accepted):
    rule = capped(accepted) if accepted % 2 else spoilt(accepted)
    prompts = prompts_of(rng, 60, 61, 126)
    infos = pair.check(prompts, [sampled(75)] * 3, rule)
    for info in infos:
        assert info["spec_correct_drafts_histogram"][accepted] >= 75 // WIDTH - 1


def test_t04_t23_t24_mixed_batch_with_rounds_of_any_width(pair, rng):
    prompts = prompts_of(rng, 3, 64, 100, 17, 65, 1)
    params = [greedy(50), sampled(60), greedy(33), sampled(64), sampled(1), greedy(40)]
    infos = pair.check(prompts, params, varied)
    assert any(info["spec_num_correct_drafts"] for info in infos)


@pytest.mark.parametrize("count", [1, 2, WIDTH, WIDTH + 1, WIDTH + 2])
def test_t05_budgets_shorter_than_a_window(pair, rng, count):
    (info,) = pair.check(prompts_of(rng, 30), [greedy(count)], right)
    assert info["completion_tokens"] == count


@pytest.mark.parametrize("place", [1, 2, 5, WIDTH - 1, WIDTH, WIDTH + 1])
def test_t06_an_end_at_every_place_of_a_window(pair, rng, place):
    prompts = prompts_of(rng, 20)
    whole = pair.plain.generate(input_ids=prompts, sampling_params=[sampled(40, sampling_seed=3)])
    token = whole[0]["output_ids"][place]
    params = sampled(40, sampling_seed=3, stop_token_ids=[token])
    (info,) = pair.check(prompts, [params], right)
    assert info["finish_reason"] == {"type": "stop", "matched": token}
    late = params | {"min_new_tokens": place + 4}
    pair.check(prompts, [late], right)


def test_t07_stops_in_the_text_inside_and_across_windows(pair, rng):
    prompts = prompts_of(rng, 20)
    (whole,) = pair.plain.generate(
        input_ids=prompts, sampling_params=[sampled(40, sampling_seed=4)]
    )
    ids, decode = whole["output_ids"], pair.plain.tokenizer.decode
    num_stopped = 0
    for place in range(2, 36, 3):
        text = decode(ids[place : place + 2])
        if "\ufffd" in text or not text.strip():
            continue
        params = sampled(40, sampling_seed=4, stop=[text])
        (info,) = pair.check(prompts, [params], right)
        num_stopped += info["finish_reason"]["type"] == "stop"
    assert num_stopped >= 3


def test_t09_up_to_the_last_position(pair, rng):
    prompts = prompts_of(rng, CONTEXT - 40, CONTEXT - 1)
    pair.check(prompts, [greedy(40), greedy(1)], right)


def test_t11_preemption_between_rounds(pair, rng):
    scheduler = pair.drafting.core.scheduler

    def rule(request: Request, expected: list[int]) -> Given:
        return spoilt(3)(request, expected)

    plan = scheduler.plan
    moments = iter(range(1, 1000))

    def preempting():
        if next(moments) % 7 == 0 and scheduler.running and not scheduler.running[-1].is_protected:
            scheduler.preempt(scheduler.running[-1])
        return plan()

    scheduler.plan = preempting
    try:
        infos = pair.check(prompts_of(rng, 50, 70, 90), [sampled(60)] * 3, rule)
    finally:
        scheduler.plan = plan
    assert sum(info["num_retractions"] for info in infos) > 2


def test_t12_aborts_leave_nothing_behind(pair, rng):
    pair.rule = right
    stream = pair.drafting.generate(
        input_ids=prompts_of(rng, 30)[0], sampling_params=greedy(1), stream=True
    )
    next(stream)
    stream.close()
    pair.check(prompts_of(rng, 30), [greedy(20)], right)


def test_t28_nothing_right(pair, rng):
    noise = iter(rng.integers(0, 300, 10_000).tolist())

    def rule(request: Request, expected: list[int]) -> Given:
        return Given([next(noise) for _ in expected], WIDTH - 1)

    pair.check(prompts_of(rng, 40, 10), [sampled(50)] * 2, rule)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_t29_every_place_in_a_group_of_index_keys(pair, rng, width):
    """Every length modulo the ratio, with every number of accepted drafts of a width."""

    def rule(request: Request, expected: list[int]) -> Given:
        met.add(request.committed_len % 4)
        return spoilt(next(places))(request, expected[: width - 1])

    met, places = set(), iter(rng.integers(0, width, 10_000).tolist())
    prompts = prompts_of(rng, 40, 41, 42)
    infos = pair.check(prompts, [greedy(90)] * 3, rule)
    histograms = [info["spec_correct_drafts_histogram"] for info in infos]
    by_accepted = [sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)]
    assert met == {0, 1, 2, 3}
    assert len(by_accepted) == width
    assert min(by_accepted) > 0


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_t31_t37_filters_penalties_and_bias(pair, rng, temperature):
    params = [
        {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
        {"min_p": 0.05, "presence_penalty": -0.4, "frequency_penalty": -0.5},
        {"logit_bias": {"5": 4.0, "7": -100.0}, "frequency_penalty": -0.3, "top_k": 3},
    ]
    params = [sampled(60, **p) | {"temperature": temperature} for p in params]
    infos = pair.check(prompts_of(rng, 20, 30, 64), params, spoilt(9))
    assert all(info["spec_num_correct_drafts"] > 20 for info in infos)


def test_t34_samples_of_one_prompt(pair, rng):
    infos = pair.check(prompts_of(rng, 30), [sampled(30, n=3)], right)
    assert len({info["sampling_seed"] for info in infos}) == 3


def test_t36_log_probabilities_of_every_kind(pair, rng):
    options = {"logprob_start_len": 3, "top_logprobs_num": 4, "token_ids_logprob": [1, 5]}
    expected, found = pair.outputs(
        prompts_of(rng, 20, 80), [sampled(40), greedy(50)], spoilt(4), **options
    )
    for a, b in zip(expected, found, strict=True):
        names = [name for name in a["meta_info"] if name.endswith("logprobs")]
        assert len(names) == 6
        for name in names:
            assert b["meta_info"][name] == a["meta_info"][name], name


def test_forced_acceptance_runs_to_its_length(pair, rng):
    def rule(request: Request, expected: list[int]) -> Given:
        count = min(2, len(expected))
        return Given([1] * len(expected), count, count)

    _, found = pair.outputs(prompts_of(rng, 20), [greedy(30)], rule)
    info = found[0]["meta_info"]
    assert info["completion_tokens"] == 30
    assert info["spec_correct_drafts_histogram"][2] >= 9


def test_a_round_needs_no_second_program(pair):
    info = pair.drafting.get_server_info()
    assert info["num_late_compiles"] == 0
    assert dataclasses.asdict(pair.drafting.engine_config)["speculative_debug"] == "oracle"
