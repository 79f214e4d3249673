"""What a request gave, and where two outcomes part."""

import dataclasses
import math
from typing import Any

import numpy as np

from serve.request import Request

_OTHERS = (
    "input_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)


@dataclasses.dataclass(frozen=True)
class Parting:
    """The first thing in which two outcomes differ, in the order in which a caller sees them.

    Attributes:
      text: says it.
      tensor: of the state, where all else is equal.
      rows: rows of the sequence that both had computed from the same tokens when they parted;
        infinity where that is all of them.
    """

    text: str
    tensor: str | None = None
    rows: float = math.inf


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a request gave; equality is equality of bits.

    Attributes:
      num_prompt: tokens of the prompt.
      tokens: the output.
      log_probabilities: of the output, float32.
      others: every other log-probability that was asked for; `repr` writes all digits.
      digests: of the state, by part.
    """

    num_prompt: int
    tokens: tuple[int, ...]
    log_probabilities: bytes
    others: tuple[tuple[str, str], ...]
    digests: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, request: Request) -> "Outcome":
        """The outcome of a finished request."""
        assert request.state_digests is not None
        return cls(
            request.prompt_len,
            tuple(request.output_ids),
            np.asarray(request.output_logprobs, np.float32).tobytes(),
            tuple((name, repr(getattr(request, name))) for name in _OTHERS),
            tuple(request.state_digests.items()),
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Outcome":
        """What `to_json` was made of."""
        return cls(
            data["num_prompt"],
            tuple(data["tokens"]),
            bytes.fromhex(data["log_probabilities"]),
            *(tuple((name, text) for name, text in data[key]) for key in ("others", "digests")),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"log_probabilities": self.log_probabilities.hex()}

    def parting(self, other: "Outcome") -> Parting | None:
        """Where another outcome of the same request parts from this one, or None."""
        for at, (a, b) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if a != b:
                return Parting(f"token {at}: {b}, not {a}", rows=self.num_prompt + at)
        if len(self.tokens) != len(other.tokens):
            return Parting(f"{len(other.tokens)} tokens, not {len(self.tokens)}")
        mine, theirs = (np.frombuffer(o.log_probabilities, np.uint32) for o in (self, other))
        if (mine != theirs).any():
            at = int(np.argmax(mine != theirs))
            return Parting(f"log-probability of token {at}", rows=self.num_prompt + at)
        for (name, a), (_, b) in zip(self.others, other.others, strict=True):
            if a != b:
                return Parting(name)
        theirs = dict(other.digests)
        for name, digest in self.digests:
            if theirs.get(name) != digest:
                return Parting(f"state {name}", tensor=name)
        return None
