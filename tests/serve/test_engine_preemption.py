"""The engine when blocks run out: callers notice nothing but a count and the time."""

import concurrent.futures

import pytest

from tests.serve.engines import SLOTS, greedy, sampled

# Of the twelve: the longest request fits, and little more.
LEFT = 4


@pytest.fixture
def starved(engine):
    """The engine with a third of its blocks."""
    scheduler = engine.core.scheduler
    taken = scheduler.blocks.take(scheduler.blocks.num_free - LEFT)
    yield engine
    with engine.loop.between_steps():
        scheduler.blocks.give(taken)


EVERYTHING = {
    "frequency_penalty": 0.7,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
    "min_new_tokens": 20,
    "logit_bias": {7: 1.5},
    "stop": ["qqq"],
}


@pytest.fixture(scope="module")
def prompts():
    return [[(7 * i + 13 * k) % 400 for i in range(60 + k)] for k in range(6)]


@pytest.fixture(scope="module")
def params():
    plain = [sampled(90, sampling_seed=k, **(EVERYTHING if k % 2 else {})) for k in range(4)]
    return [*plain, greedy(70), greedy(50, min_new_tokens=10)]


WANTED = {
    "return_logprob": True,
    "logprob_start_len": 10,
    "top_logprobs_num": 3,
    "token_ids_logprob": [1, 2],
    "return_state_digest": True,
}
COMPARED = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "input_token_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
    "finish_reason",
    "completion_tokens",
    "state_digest",
)


@pytest.fixture(scope="module")
def alone(shared_engine, prompts, params):
    return [
        shared_engine.generate(input_ids=ids, sampling_params=p, **WANTED)
        for ids, p in zip(prompts, params, strict=True)
    ]


def same(result: dict, expected: dict) -> None:
    """Raise unless a caller got the same."""
    assert (result["output_ids"], result["text"]) == (expected["output_ids"], expected["text"])
    for key in COMPARED:
        assert result["meta_info"][key] == expected["meta_info"][key], key


def test_results_of_preempted_requests_are_those_of_undisturbed_ones(
    starved, alone, prompts, params
):
    before = starved.get_server_info()["num_retractions"]
    outs = starved.generate(input_ids=prompts, sampling_params=params, **WANTED)
    retractions = [r["meta_info"]["num_retractions"] for r in outs]
    assert sum(retractions) == starved.get_server_info()["num_retractions"] - before > 2
    for result, expected in zip(outs, alone, strict=True):
        same(result, expected)


def test_streams_go_on_where_they_were(starved, alone, prompts, params):
    def read(index):
        num_ids, text, part = 0, "", {}
        for part in starved.generate(
            input_ids=prompts[index], sampling_params=params[index], stream=True, **WANTED
        ):
            ids = part["output_ids"]
            assert ids[:num_ids] == alone[index]["output_ids"][:num_ids]
            assert len(ids) > num_ids or part["meta_info"]["finish_reason"]
            assert part["text"].startswith(text)
            num_ids, text = len(ids), part["text"]
        return part

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        lasts = list(pool.map(read, range(len(prompts))))
    for last, expected in zip(lasts, alone, strict=True):
        same(last, expected)
    assert sum(last["meta_info"]["num_retractions"] for last in lasts) > 0


def test_more_requests_than_slots_and_blocks(starved):
    prompts = [[k + 1] * (10 + 11 * (k % 7)) for k in range(40)]
    outs = starved.generate(input_ids=prompts, sampling_params=greedy(60))
    assert all(len(r["output_ids"]) == 60 for r in outs)
    assert starved.core.scheduler.capacities.num_slots == SLOTS


def test_an_abort_of_a_request_that_made_way(starved, prompts, monkeypatch):
    """It waits at the head of the queue when it is ended, with what it had."""
    scheduler = starved.core.scheduler
    preempt, gone = scheduler.preempt, []

    def noticed(request):
        preempt(request)
        gone.append(request.rid)
        starved.abort_request(request.rid)

    monkeypatch.setattr(scheduler, "preempt", noticed)
    outs = starved.generate(input_ids=prompts[:3], sampling_params=greedy(100), rid=["a", "b", "c"])
    ended = {r["meta_info"]["id"]: r["meta_info"]["finish_reason"]["type"] for r in outs}
    assert gone and {name for name, reason in ended.items() if reason == "abort"} == set(gone)
    for result in outs:
        is_aborted = result["meta_info"]["id"] in gone
        assert (len(result["output_ids"]) == 100) != is_aborted
