"""The engine over a model of two layers and random weights: what callers see.

Whether the bits are right is for the laws and the parity tests; here a result is compared with
another of the same engine, or with what was asked for.
"""

import dataclasses
import math

import numpy as np
import pytest

from serve import SamplingParams
from tests import tiny_models
from tests.serve.engines import SLOTS, TEXTS, greedy, sampled, settle

INFO_KEYS = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "num_retractions",
    "sampling_seed",
    "e2e_latency",
    "queue_time",
    "first_token_latency",
    "decode_throughput",
}


# Results.


def test_result_of_one_text(engine):
    ids = engine.tokenizer.encode(TEXTS[0])
    result = engine.generate(TEXTS[0], greedy(5))
    assert set(result) == {"text", "output_ids", "meta_info"}
    info = result["meta_info"]
    assert set(info) == INFO_KEYS
    assert info["finish_reason"] == {"type": "length", "length": 5}
    counts = (info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"])
    assert counts == (len(ids), 5, 0)
    assert len(result["output_ids"]) == 5 and all(type(i) is int for i in result["output_ids"])
    assert result["text"] == engine.tokenizer.decode(result["output_ids"])
    assert 0 < info["first_token_latency"] <= info["e2e_latency"]
    assert info["decode_throughput"] > 0


def test_time_in_the_queue_is_counted(engine):
    outs = engine.generate(TEXTS[:1] * (SLOTS + 1), greedy(8))
    first, last = outs[0]["meta_info"], outs[-1]["meta_info"]
    assert 0 <= first["queue_time"] < last["queue_time"] <= last["first_token_latency"]


def test_texts_and_ids_of_mixed_lengths_give_what_they_give_alone(engine, rng):
    texts = [engine.generate(text, greedy(9)) for text in TEXTS]
    together = engine.generate(TEXTS, greedy(9))
    by_ids = engine.generate(
        input_ids=[engine.tokenizer.encode(text) for text in TEXTS], sampling_params=greedy(9)
    )
    assert [r["output_ids"] for r in together] == [r["output_ids"] for r in texts]
    assert (
        [r["text"] for r in together] == [r["text"] for r in by_ids] == [r["text"] for r in texts]
    )
    sizes = (1, 2, 15, 16, 17, 63, 64, 65, 130)
    prompts = [rng.integers(0, tiny_models.VOCAB_SIZE, size).tolist() for size in sizes]
    counts = [int(n) for n in rng.integers(1, 40, len(sizes))]
    outs = engine.generate(input_ids=prompts, sampling_params=[greedy(n) for n in counts])
    assert [r["meta_info"]["prompt_tokens"] for r in outs] == list(sizes)
    assert [len(r["output_ids"]) for r in outs] == counts
    alone = engine.generate(input_ids=prompts[5], sampling_params=greedy(counts[5]))
    assert alone["output_ids"] == outs[5]["output_ids"]


def test_forms_of_a_prompt(engine):
    one = engine.generate(input_ids=[5, 6, 7], sampling_params=greedy(3))
    assert isinstance(one, dict)
    (listed,) = engine.generate(input_ids=[[5, 6, 7]], sampling_params=greedy(3))
    array = engine.generate(input_ids=np.asarray([5, 6, 7]), sampling_params=greedy(3))
    assert listed["output_ids"] == array["output_ids"] == one["output_ids"]
    assert engine.generate([], greedy(3)) == []
    params = SamplingParams(**greedy(3))
    assert (
        engine.generate(input_ids=[5, 6, 7], sampling_params=params)["output_ids"]
        == (one["output_ids"])
    )


def test_request_ids(engine):
    outs = engine.generate(TEXTS, greedy(1), rid=["a", "b", "c"])
    assert [r["meta_info"]["id"] for r in outs] == ["a", "b", "c"]
    assert engine.generate(TEXTS[0], greedy(1), rid="mine")["meta_info"]["id"] == "mine"
    drawn = [r["meta_info"]["id"] for r in engine.generate(TEXTS, greedy(1))]
    assert len(set(drawn)) == 3
    with pytest.raises(ValueError, match="request ids must differ"):
        engine.generate(TEXTS[:2], greedy(1), rid=["a", "a"])


@pytest.mark.parametrize("count", [0, 1])
def test_no_token_and_one_token(engine, count):
    result = engine.generate(TEXTS[0], greedy(count), return_logprob=True)
    assert len(result["output_ids"]) == count
    info = result["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": count}
    assert len(info["output_token_logprobs"]) == count
    assert ("first_token_latency" in info) == (count > 0)
    if count == 0:
        assert result["text"] == ""


def test_log_probabilities_of_the_output(engine):
    result = engine.generate(TEXTS[0], greedy(6), return_logprob=True)
    triples = result["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == result["output_ids"]
    assert [text for _, _, text in triples] == [
        engine.tokenizer.token_text(i) for i in result["output_ids"]
    ]
    assert all(math.isfinite(p) and p < 0 for p, _, _ in triples)
    # A greedy token is at least as likely as any other.
    assert all(p >= -math.log(tiny_models.VOCAB_SIZE) for p, _, _ in triples)


# Stopping.


def test_stop_token_ids_end_the_output(engine):
    free = engine.generate(TEXTS[0], greedy(12))
    stop = free["output_ids"][4]
    at = free["output_ids"].index(stop)
    result = engine.generate(TEXTS[0], greedy(12, stop_token_ids=[stop]))
    assert result["output_ids"] == free["output_ids"][: at + 1]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    # The stop token is in the ids and not in the text.
    assert result["text"] == engine.tokenizer.decode(free["output_ids"][:at])


def test_the_models_end_tokens_stop_unless_ignored(engine, monkeypatch):
    free = engine.generate(TEXTS[1], greedy(6))["output_ids"]
    end = free[2]
    monkeypatch.setattr(engine, "inputs", dataclasses.replace(engine.inputs, eos_token_ids=(end,)))
    stopped = engine.generate(TEXTS[1], greedy(6, ignore_eos=False))
    assert stopped["output_ids"] == free[: free.index(end) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert engine.generate(TEXTS[1], greedy(6))["output_ids"] == free
    both = engine.generate(TEXTS[1], greedy(6, stop_token_ids=[end]))
    assert both["output_ids"] == stopped["output_ids"]


# Streams.


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_adds_up_to_the_result(engine, text, count):
    whole = engine.generate(text, greedy(count), return_logprob=True, return_state_digest=True)
    parts = list(
        engine.generate(
            text, greedy(count), return_logprob=True, return_state_digest=True, stream=True
        )
    )
    # A reader that is slower than the steps gets several tokens in a part.
    assert 1 <= len(parts) <= max(count, 1)
    for before, after in zip(parts, parts[1:], strict=False):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    last = parts[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    for key in ("finish_reason", "state_digest", "output_token_logprobs", "completion_tokens"):
        assert last["meta_info"][key] == whole["meta_info"][key]


def test_a_stream_that_a_stop_token_ends(engine):
    free = engine.generate(TEXTS[0], greedy(8))
    params = greedy(8, stop_token_ids=[free["output_ids"][5]])
    whole = engine.generate(TEXTS[0], params)
    *_, last = engine.generate(TEXTS[0], params, stream=True)
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])


def test_an_abandoned_stream_gives_everything_back(engine, gate):
    stream = engine.generate(TEXTS[0], greedy(190), stream=True)
    gate.let(1)
    next(stream)
    assert not engine.core.is_idle
    stream.close()
    gate.let(1)
    settle(engine)


def test_a_stream_that_was_never_started_holds_nothing(engine):
    stream = engine.generate(TEXTS[0], greedy(50), stream=True)
    assert engine.core.is_idle
    del stream


def test_streams_may_run_side_by_side(engine):
    counts = (20, 3, 1)
    alone = [engine.generate(t, greedy(n)) for t, n in zip(TEXTS, counts, strict=True)]
    streams = [
        engine.generate(t, greedy(n), stream=True) for t, n in zip(TEXTS, counts, strict=True)
    ]
    lasts = [next(stream) for stream in streams]
    for at, stream in enumerate(streams):
        for part in stream:
            lasts[at] = part
    for part, whole in zip(lasts, alone, strict=True):
        assert (part["text"], part["output_ids"]) == (whole["text"], whole["output_ids"])
        assert part["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_a_list_streams_by_index(engine):
    whole = engine.generate(TEXTS, [greedy(n) for n in (4, 9, 1)])
    last = {}
    for part in engine.generate(TEXTS, [greedy(n) for n in (4, 9, 1)], stream=True):
        before = last.get(part["index"], [])
        assert part["output_ids"][: len(before)] == before and len(part["output_ids"]) > len(before)
        last[part["index"]] = part["output_ids"]
    assert [last[i] for i in range(3)] == [r["output_ids"] for r in whole]


# Seeds.


def test_a_seed_fixes_the_output(engine):
    one = engine.generate(TEXTS[0], sampled(12, sampling_seed=5))
    again = engine.generate(TEXTS[0], sampled(12, seed=5))
    other = engine.generate(TEXTS[0], sampled(12, sampling_seed=6))
    assert one["output_ids"] == again["output_ids"] != other["output_ids"]
    assert one["meta_info"]["sampling_seed"] == 5


def test_a_drawn_seed_is_returned_and_works(engine):
    outs = engine.generate(TEXTS[:1] * 4, sampled(12))
    seeds = [r["meta_info"]["sampling_seed"] for r in outs]
    assert len(set(seeds)) == 4
    assert len({tuple(r["output_ids"]) for r in outs}) == 4
    again = engine.generate(TEXTS[0], sampled(12, sampling_seed=seeds[2]))
    assert again["output_ids"] == outs[2]["output_ids"]


def test_every_bit_of_a_seed_counts(engine):
    seeds = [0, 1, -1, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63)]
    outs = engine.generate(
        TEXTS[:1] * len(seeds), [sampled(12, sampling_seed=seed) for seed in seeds]
    )
    assert len({tuple(r["output_ids"]) for r in outs}) == len(seeds)
    assert [r["meta_info"]["sampling_seed"] for r in outs] == seeds


def test_filters_that_leave_one_token_are_greedy(engine):
    best = engine.generate(TEXTS[0], greedy(10))["output_ids"]
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert engine.generate(TEXTS[0], sampled(10, **filters))["output_ids"] == best


# State digests and scores.


def test_state_digests_by_layer_and_kind(engine):
    info = engine.generate(TEXTS[0], greedy(4), return_state_digest=True)["meta_info"]
    recurrent = ("recurrent_state", "log_key", "log_key_scale", "log_value", "log_gate")
    assert set(info["state_digests"]) == {
        *(f"layers.0.{kind}" for kind in (*recurrent, "conv_state")),
        *(f"layers.1.{kind}" for kind in ("key", "value")),
    }
    digests = [*info["state_digests"].values(), info["state_digest"]]
    assert all(len(d) == 64 and set(d) <= set("0123456789abcdef") for d in digests)
    assert "state_digest" not in engine.generate(TEXTS[0], greedy(4))["meta_info"]


def test_a_digest_tells_what_was_committed(engine):
    def digests(ids: list[int], count: int) -> dict[str, str]:
        result = engine.generate(
            input_ids=ids, sampling_params=greedy(count), return_state_digest=True
        )
        return result["meta_info"]["state_digests"]

    ids = [3, 1, 4, 1, 5]
    out = engine.generate(input_ids=ids, sampling_params=greedy(70))["output_ids"]
    for count in (1, 2, 59, 60, 61, 70):
        # The last token is not a row yet: the state is that of the prompt and all before it.
        assert digests(ids, count) == digests([*ids, *out[: count - 1]], 0)
    assert digests(ids, 1) != digests([*ids[:-1], 6], 1)


def test_a_digest_finds_a_slot_for_its_seal_beside_others_that_seal(engine):
    # All slots hold a seal, the one spare goes to the second request's next, and in the same step
    # the first one ends on a boundary, where its digest needs a seal too.
    for length in range(84, 93):
        outs = engine.generate(
            input_ids=[[1] * 80, [2] * length, [3] * 80],
            sampling_params=[greedy(49), greedy(60), greedy(90)],
            return_state_digest=True,
        )
        assert all("state_digest" in r["meta_info"] for r in outs)


def test_host_and_device_agree_on_every_sequence(engine, rng):
    prompts = [rng.integers(0, 400, size).tolist() for size in (1, 40, 63, 64, 65, 120)]
    requests = engine.inputs.read(None, greedy(75), prompts).requests
    assert engine.loop.call(lambda: _num_seals_of(engine, requests)) >= 6


def _num_seals_of(engine, requests) -> int:
    """Run some requests, looking at the device's lengths after every step; count the seals."""
    for request in requests:
        engine.core.scheduler.add(request)
    num_seals = 0
    while not engine.core.scheduler.is_idle:
        before = {id(r): r.sealed_len for r in requests}
        moved = [r for r in engine.core.scheduler.running if not r.is_finished]
        engine.core.step()
        device = engine.core.runner._state.sequences
        for r in (r for r in moved if not r.is_finished):
            ours = (r.committed_len, r.sealed_len, r.sealed_slot)
            theirs = (device.committed_len, device.sealed_len, device.sealed_slot)
            if r.sealed_len != before[id(r)] or r.remaining_prefill == 0:
                assert ours == tuple(int(a[r.slot]) for a in theirs)
            num_seals += r.sealed_len != before[id(r)]
    return num_seals


def test_score_agrees_with_generation(engine):
    ids = engine.tokenizer.encode(TEXTS[0])
    result = engine.generate(input_ids=ids, sampling_params=sampled(9), return_logprob=True)
    generated = result["meta_info"]["output_token_logprobs"]
    scored = engine.score([*ids, *result["output_ids"]])
    triples = scored["meta_info"]["input_token_logprobs"]
    assert scored["output_ids"] == []
    assert triples[0] == (None, ids[0], engine.tokenizer.token_text(ids[0]))
    assert [token for _, token, _ in triples] == [*ids, *result["output_ids"]]
    assert triples[len(ids) :] == generated
    many = engine.score([[1], [1, 2, 3]])
    assert [len(r["meta_info"]["input_token_logprobs"]) for r in many] == [1, 3]


def test_top_k_beyond_the_vocabulary_keeps_all(engine):
    params = {"max_new_tokens": 8, "sampling_seed": 3}
    plain = engine.generate(TEXTS[0], params)
    assert (
        engine.generate(TEXTS[0], params | {"top_k": 1 << 40})["output_ids"] == plain["output_ids"]
    )


def test_rows_of_an_array_are_a_batch(engine):
    ids = np.asarray([[1, 2, 3], [4, 5, 6]])
    as_lists = engine.generate(input_ids=ids.tolist(), sampling_params=greedy(4))
    as_array = engine.generate(input_ids=ids, sampling_params=greedy(4))
    assert [r["output_ids"] for r in as_array] == [r["output_ids"] for r in as_lists]
