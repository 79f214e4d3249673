"""One sequence on its way through the engine."""

import dataclasses
import enum
import time
from typing import Any

from serve.sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass
class Request:
    """A request and its progress.

    Rows are what the model has seen: `committed_len <= num_tokens`, and while generating the last
    token is not a row yet.

    Attributes:
      rid: name given by the caller or drawn.
      prompt_ids: the prompt.
      params: sampling parameters; the seed is fixed.
      seed: 64-bit sampling seed.
      eos_ids: tokens that end the text.
      score_prompt: log-probabilities of the prompt's own tokens are wanted, and nothing else.
      return_logprob: log-probabilities of the output are wanted.
      return_state_digest: a digest of the committed state is wanted at the end.
      output_ids, output_logprobs: what was generated, the stop token included.
      input_logprobs: log-probability of prompt tokens 1, 2, ... where scored.
      committed_len: rows that are final.
      sealed_len: boundary of the sealed state.
      slot: batch slot while running.
      blocks: blocks owned, in logical order.
      sealed_slot: state slot the log continues from; 0 is the empty one, not owned.
      next_slot: state slot owned for the next seal, or -1.
      finish_reason: why it ended, as the result states it.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int]
    score_prompt: bool = False
    return_logprob: bool = False
    return_state_digest: bool = False
    output_ids: list[int] = dataclasses.field(default_factory=list)
    output_logprobs: list[float] = dataclasses.field(default_factory=list)
    input_logprobs: list[float] = dataclasses.field(default_factory=list)
    committed_len: int = 0
    sealed_len: int = 0
    slot: int = -1
    blocks: list[int] = dataclasses.field(default_factory=list)
    sealed_slot: int = 0
    next_slot: int = -1
    status: Status = Status.WAITING
    finish_reason: dict[str, Any] | None = None
    state_digests: dict[str, str] | None = None
    arrived_s: float = dataclasses.field(default_factory=time.monotonic)
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def max_len(self) -> int:
        """Rows it can come to: the last token generated never becomes one."""
        return self.prompt_len + max(self.params.max_new_tokens - 1, 0)

    @property
    def remaining_prompt(self) -> int:
        """Prompt tokens that are not rows yet."""
        return max(self.prompt_len - self.committed_len, 0)

    @property
    def is_finished(self) -> bool:
        """No more tokens will come."""
        return self.status is Status.FINISHED

    def next_ids(self, count: int) -> list[int]:
        """The next `count` tokens to become rows."""
        at = self.committed_len
        if at < self.prompt_len:
            return self.prompt_ids[at : at + count]
        return self.output_ids[at - self.prompt_len : at - self.prompt_len + count]

    def take_token(self, token: int, log_probability: float) -> None:
        """Append a generated token and see whether it ends the request."""
        now = time.monotonic()
        self.first_token_s = self.first_token_s or now
        self.output_ids.append(token)
        self.output_logprobs.append(log_probability)
        stops = set(self.params.stop_token_ids or ())
        if not self.params.ignore_eos:
            stops |= self.eos_ids
        if token in stops:
            self.finish({"type": "stop", "matched": token})
        elif len(self.output_ids) >= self.params.max_new_tokens:
            self.finish({"type": "length", "length": len(self.output_ids)})

    def finish(self, reason: dict[str, Any]) -> None:
        """End the request; the first reason stays."""
        if self.status is not Status.FINISHED:
            self.status, self.finish_reason = Status.FINISHED, reason
            self.finished_s = time.monotonic()
