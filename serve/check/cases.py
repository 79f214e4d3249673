"""Random requests that ask for everything a result can hold."""

import dataclasses
from typing import Any

import numpy as np

from serve.check.setting import Setting
from serve.check.sizes import SHORT_OUTPUT, Sizes
from serve.engine import Engine
from serve.inputs import Wanted
from serve.request import Request

NUM_CASES = 16
_SEED = 11


@dataclasses.dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
      prompt: token ids.
      params: sampling parameters, with a seed.
      wanted: which log-probabilities.
    """

    prompt: list[int]
    params: dict[str, Any]
    wanted: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def max_len(self) -> int:
        """Rows that it can come to."""
        return len(self.prompt) + self.params["max_new_tokens"]

    def request(self, engine: Engine) -> Request:
        """A fresh request."""
        wanted = Wanted(**self.wanted)
        (request,) = engine.inputs.read(None, self.params, self.prompt, wanted=wanted).requests
        return request


def make_cases(setting: Setting) -> list[Case]:
    """Requests whose prompts and outputs end on, before and after block boundaries.

    The same in every process.
    """
    rng, vocab_size = np.random.default_rng(_SEED), setting.config.vocab_size
    lens, cases = setting.sizes.prompt_lens, []
    for index in range(NUM_CASES):
        size = lens[index % len(lens)]
        new = _output_len(rng, setting.sizes, index % len(lens))
        prompt = rng.integers(0, vocab_size, size).tolist()
        params = _params(rng, vocab_size, new)
        cases.append(Case(prompt, params, _wanted(rng, vocab_size, size, index)))
    return cases


def _output_len(rng: np.random.Generator, sizes: Sizes, place: int) -> int:
    """How many tokens to generate after the prompt at this place."""
    short = int(rng.integers(1, SHORT_OUTPUT))
    return min(sizes.long_outputs.get(place, short), sizes.context_len - sizes.prompt_lens[place])


def _params(rng: np.random.Generator, vocab_size: int, new: int) -> dict[str, Any]:
    """Sampling parameters of every kind but those that need a tokenizer."""
    some = [int(token) for token in rng.integers(0, vocab_size, 40)]
    # Where end tokens count, some may come and are put off for a while.
    ends = bool(rng.integers(0, 3) == 0)
    return {
        "max_new_tokens": new,
        "sampling_seed": int(rng.integers(0, 1 << 62)),
        "ignore_eos": not ends,
        "stop_token_ids": some if ends else None,
        "min_new_tokens": int(rng.integers(0, new + 1)) if ends else 0,
        "temperature": float(rng.choice([0.0, 0.6, 1.0, 1.5])),
        "top_p": float(rng.choice([1.0, 0.9, 0.5])),
        "top_k": int(rng.choice([-1, 1, 20])),
        "min_p": float(rng.choice([0.0, 0.1])),
        "frequency_penalty": float(rng.choice([0.0, 0.0, 0.8, -0.4])),
        "presence_penalty": float(rng.choice([0.0, 0.0, 0.6, -0.2])),
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.3, 0.9])),
        "logit_bias": {some[0]: 2.5, some[1]: -1.5} if rng.integers(0, 2) else None,
    }


def _wanted(rng: np.random.Generator, vocab_size: int, size: int, index: int) -> dict[str, Any]:
    """Log-probabilities of every kind."""
    ids = [int(token) for token in rng.integers(0, vocab_size, 5)]
    return {
        "return_logprob": True,
        "logprob_start_len": (-1, 0, size // 2)[index % 3],
        "top_logprobs_num": int(rng.choice([0, 1, 20])),
        "token_ids_logprob": ids if rng.integers(0, 2) else None,
        "return_state_digest": True,
    }


def poisoned_case(sizes: Sizes) -> Case:
    """The request whose rows are made NaN, to run beside others."""
    return Case(
        [1] * (sizes.block + 6),
        {"max_new_tokens": 25, "ignore_eos": True, "sampling_seed": 0},
        {"return_logprob": True, "return_state_digest": True},
    )
