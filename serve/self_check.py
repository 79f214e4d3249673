"""Before speculation is trusted: the same request without drafts and with, bit for bit."""

import numpy as np

from serve.core import EngineCore
from serve.inputs import Inputs, Wanted
from serve.request import Request
from serve.sampling_params import SamplingParams

# Past a block boundary, so that a state is sealed and a log opens.
PROMPT_LEN = 70
NUM_TOKENS = 24
SEED = 20


class SelfCheckError(RuntimeError):
    """Drafts change what the target gives on this machine."""


def _run(core: EngineCore, inputs: Inputs, replay: tuple[int, ...]) -> Request:
    """One request alone, drafting what it is expected to give."""
    longest = inputs.context_length - NUM_TOKENS
    rng = np.random.default_rng(SEED)
    ids = rng.integers(0, inputs.vocab_size, max(1, min(PROMPT_LEN, longest))).tolist()
    params = SamplingParams(
        max_new_tokens=max(1, min(NUM_TOKENS, inputs.context_length - len(ids))),
        temperature=1.0,
        sampling_seed=SEED,
        ignore_eos=True,
    )
    wanted = Wanted(return_logprob=True, return_state_digest=True)
    (request,) = inputs.read(None, params, ids, wanted=wanted).requests
    request.replay_ids = replay
    core.add(request)
    while not request.is_finished:
        core.step()
    return request


def self_check(core: EngineCore, inputs: Inputs) -> None:
    """Run a request without drafts, then with, and compare tokens, log-probabilities and state.

    Raises:
      SelfCheckError: they differ, so that speculation would not be lossless here.
    """
    scheduler = core.scheduler
    length = scheduler.draft_len
    scheduler.draft_len = lambda batch_size: 0
    try:
        plain = _run(core, inputs, ())
    finally:
        scheduler.draft_len = length
    drafted = _run(core, inputs, tuple(plain.output_ids))
    for name in ("output_ids", "output_logprobs", "state_digests"):
        if getattr(plain, name) != getattr(drafted, name):
            raise SelfCheckError(
                f"speculative decoding changes {name} of a request on this machine, which it must "
                "not: start without speculative_algorithm, or with disable_self_check=True"
            )
    core.forget_counts()
