"""Laws L2, L3, L5 and L6 of docs/design.md: the same bits, no tolerance."""

import json
import subprocess
import sys

import pytest

from serve.model_path import PACKAGED_MODELS
from tests.laws.law_run import DTYPES, LawRun, run_laws, setting_of
from tests.laws.moments import MOMENTS
from tests.laws.schedules import CHUNKS, RANDOM
from tests.laws.solo_digest import NUM_CASES, digests

TINY = ("tiny-dense", "bfloat16")
CASES = [
    pytest.param((*TINY, 21), id="tiny-dense-bfloat16"),
    pytest.param(("tiny-q4", "float32", 21), id="tiny-q4-float32"),
    *(
        pytest.param((model, dtype, 7), id=f"{model}-{dtype}")
        for model in PACKAGED_MODELS
        for dtype in DTYPES
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where models with random weights are made."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=CASES)
def run(request, folder) -> LawRun:
    """Golden outcomes, schedules and scores of one model."""
    model, dtype, num_schedules = request.param
    return run_laws(setting_of(model, dtype, folder), num_schedules=num_schedules)


def test_neighbours_slots_chunks_and_preemption_change_no_bit(run):
    assert run.schedules.first_difference is None


def test_scores_of_generated_tokens_are_what_generation_returned(run):
    assert run.scores.first_difference is None
    assert run.scores.tokens > 120


def test_schedules_did_what_they_are_for(run):
    happened, num_schedules = run.happened, run.schedules.schedules
    assert num_schedules >= 7
    assert happened.pieces.issuperset(CHUNKS)
    assert len(happened.pieces) > 2 * len(CHUNKS)
    assert happened.num_shared > happened.num_steps / 2
    assert happened.num_poisoned > num_schedules
    assert happened.num_seals > 3 * num_schedules
    assert happened.num_forced > 5 * num_schedules
    assert happened.num_starved > num_schedules / 4
    assert happened.slots == {0, 1, 2, 3}
    assert max(len(case.prompt) for case in run.cases) > 256


def test_requests_were_preempted_at_every_moment(run):
    missing = run.cover.missing((*CHUNKS, RANDOM))
    if run.schedules.schedules >= 21:
        assert not missing
    assert {moment for _, moment in run.cover.met} == set(MOMENTS)


def test_requests_ask_for_everything(run):
    """Every parameter has several values; each log-probability is asked for, or not."""
    for name in run.cases[0].params:
        if name not in ("max_new_tokens", "sampling_seed"):
            assert len({repr(case.params[name]) for case in run.cases}) > 1, name
    for name in ("logprob_start_len", "top_logprobs_num", "token_ids_logprob"):
        assert len({repr(case.wanted[name]) for case in run.cases}) > 1, name
    pairs = zip(run.golden, run.cases, strict=True)
    stopped = {len(outcome.tokens) < case.params["max_new_tokens"] for outcome, case in pairs}
    assert stopped == {False, True}, "no request was ended by a stop token, or every one"


@pytest.mark.parametrize("run", CASES[:1], indirect=True)
def test_a_new_process_gives_the_same_bits(run, folder):
    command = [sys.executable, "-m", "tests.laws.solo_digest", *TINY, str(folder / "there")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == digests(run.golden[:NUM_CASES])
