"""One sequence on its way through the engine."""

import dataclasses
import enum
import time
from typing import Any

from serve.output_text import OutputText
from serve.sampling_params import SamplingParams

# A log-probability and the token it belongs to.
Pair = tuple[float, int]


class Status(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass
class SpecCounts:
    """What became of the drafts for a request.

    Attributes:
      num_rounds: steps while it was generating.
      num_verified: drafts that were verified.
      num_accepted: of those, accepted.
      histogram: rounds by accepted drafts.
      verified_at, accepted_at: drafts by their place in the round.
    """

    num_rounds: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    histogram: list[int] = dataclasses.field(default_factory=list)
    verified_at: list[int] = dataclasses.field(default_factory=list)
    accepted_at: list[int] = dataclasses.field(default_factory=list)

    def saw(self, result: "StepResult") -> None:
        """Count a round."""
        self.num_rounds += 1
        self.num_verified += result.num_drafts
        self.num_accepted += result.num_accepted
        _count(self.histogram, result.num_accepted)
        for at in range(result.num_drafts):
            _count(self.verified_at, at)
        for at in range(result.num_accepted):
            _count(self.accepted_at, at)


def _count(counts: list[int], at: int) -> None:
    """Add one at an index, which may be beyond the end."""
    counts.extend([0] * (at + 1 - len(counts)))
    counts[at] += 1


@dataclasses.dataclass(eq=False)
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
      return_logprob: log-probabilities of the output are wanted.
      return_state_digest: a digest of the committed state is wanted at the end.
      logprob_start_len: log-probabilities of the prompt's tokens after this position are wanted;
        -1 for none.
      top_logprobs_num: how many of the likeliest tokens are wanted at each of those positions.
      token_ids_logprob: ids whose log-probability is wanted at each of those positions.
      output_ids: what was generated, the stop token included.
      output_logprobs, output_top_logprobs, output_token_ids_logprobs: of the output, each empty
        unless wanted; the last two hold (log-probability, id) pairs by position.
      input_logprobs, input_top_logprobs, input_token_ids_logprobs: the same of the prompt, from
        the token after the first wanted position on.
      committed_len: rows that are final.
      sealed_len: boundary of the sealed state.
      slot: batch slot while running.
      blocks: blocks owned, in logical order.
      sealed_slot: state slot the log continues from; 0 is the empty one, not owned.
      next_slot: state slot owned for the next seal, or -1.
      finish_reason: why it ended, as the result states it.
      sample_index: which of the `n` samples of its prompt.
      output_text: the text of the output; None without a tokenizer.
      call_rid: the name its caller knows, that of all samples of a prompt.
      error: what went wrong with it, if something did.
      arrival: place in the order of arrival.
      num_retractions: preemptions so far.
      preempted_at: output tokens at the last preemption, or -1.
      num_admissions: how often it got a slot.
      spec: what became of the drafts for it.
      replay_ids: what to draft, for diagnosis: the output that is expected.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int]
    return_logprob: bool = False
    return_state_digest: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    output_ids: list[int] = dataclasses.field(default_factory=list)
    output_logprobs: list[float] = dataclasses.field(default_factory=list)
    output_top_logprobs: list[list[Pair]] = dataclasses.field(default_factory=list)
    output_token_ids_logprobs: list[list[Pair]] = dataclasses.field(default_factory=list)
    input_logprobs: list[float] = dataclasses.field(default_factory=list)
    input_top_logprobs: list[list[Pair]] = dataclasses.field(default_factory=list)
    input_token_ids_logprobs: list[list[Pair]] = dataclasses.field(default_factory=list)
    committed_len: int = 0
    sealed_len: int = 0
    slot: int = -1
    blocks: list[int] = dataclasses.field(default_factory=list)
    sealed_slot: int = 0
    next_slot: int = -1
    status: Status = Status.WAITING
    finish_reason: dict[str, Any] | None = None
    state_digests: dict[str, str] | None = None
    sample_index: int = 0
    output_text: OutputText | None = None
    call_rid: str = ""
    error: Exception | None = None
    arrival: int = -1
    num_retractions: int = 0
    preempted_at: int = -1
    num_admissions: int = 0
    spec: SpecCounts = dataclasses.field(default_factory=SpecCounts)
    replay_ids: tuple[int, ...] = ()
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
    def most_rows(self) -> int:
        """Rows that its tokens so far can be: the newest token is none yet."""
        return self.prompt_len + max(len(self.output_ids) - 1, 0)

    @property
    def prefill_len(self) -> int:
        """Rows to compute before a token can be sampled: the prompt's, after a preemption those of
        the output but its last token too."""
        return self.most_rows

    @property
    def remaining_prefill(self) -> int:
        """Rows of the prefill that are not computed yet; 0 while generating."""
        return max(self.prefill_len - self.committed_len, 0)

    @property
    def is_protected(self) -> bool:
        """It was preempted and has not made a token since."""
        return self.preempted_at == len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        """No more tokens will come."""
        return self.status is Status.FINISHED

    def token_at(self, position: int) -> int:
        """The token at a position that it has come to."""
        at = position - self.prompt_len
        return self.output_ids[at] if at >= 0 else self.prompt_ids[position]

    def next_ids(self, count: int) -> list[int]:
        """The next `count` tokens to become rows."""
        at = self.committed_len
        end = at + count - self.prompt_len
        output = self.output_ids[max(at - self.prompt_len, 0) : end] if end > 0 else []
        return self.prompt_ids[at : at + count] + output

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the output."""
        ends = frozenset(self.params.stop_token_ids or ())
        return ends if self.params.ignore_eos else ends | self.eos_ids

    @property
    def wants_logprobs(self) -> bool:
        """Some log-probability is wanted, of whatever."""
        return self.returns_output_logprobs or self.input_start >= 0

    @property
    def returns_output_logprobs(self) -> bool:
        """Log-probabilities of the output are wanted, by one name or the other."""
        return self.return_logprob or self.params.logprobs is not None

    @property
    def input_start(self) -> int:
        """Position of the first prompt row whose logits are wanted, or -1."""
        return self.logprob_start_len if self.params.prompt_logprobs is None else 0

    @property
    def num_output_top(self) -> int:
        """Likeliest tokens wanted at each output position."""
        own = self.params.logprobs
        return self.top_logprobs_num if own is None else own

    @property
    def num_input_top(self) -> int:
        """Likeliest tokens wanted at each prompt position."""
        own = self.params.prompt_logprobs
        return self.top_logprobs_num if own is None else own

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose log-probability is known; a resumed prefill skips them."""
        return len(self.input_logprobs)

    def take(self, result: "StepResult") -> None:
        """Take in what a step gave, its rows counted already, and see whether that ends it.

        Tokens after the one that ends the request are dropped.
        """
        scored = result.scored
        self.input_logprobs.extend(scored.tokens)
        self.input_top_logprobs.extend(scored.top)
        self.input_token_ids_logprobs.extend(scored.token_ids)
        for at, token in enumerate(result.tokens):
            if self.is_finished:
                break
            self.output_logprobs.extend(result.sampled.tokens[at : at + 1])
            self.output_top_logprobs.extend(result.sampled.top[at : at + 1])
            self.output_token_ids_logprobs.extend(result.sampled.token_ids[at : at + 1])
            self._take_token(token)
        if result.is_round:
            self.spec.saw(result)
        if self.is_finished and self.output_ids:
            # A stop in the text may come before the last row that the step made final.
            self.committed_len = min(self.committed_len, self.most_rows)
        if self.params.max_new_tokens == 0 and self.committed_len >= self.prompt_len:
            self.finish({"type": "length", "length": 0})

    def _take_token(self, token: int) -> None:
        self.first_token_s = self.first_token_s or time.monotonic()
        self.output_ids.append(token)
        text = self.output_text
        if token in self.stop_ids:
            if text is not None:
                text.push_stop_id(token)
            self.finish({"type": "stop", "matched": token})
        elif text is not None and (matched := text.push([token])) is not None:
            self.finish({"type": "stop", "matched": matched})
        elif len(self.output_ids) >= self.params.max_new_tokens:
            self.finish({"type": "length", "length": len(self.output_ids)})

    def finish(self, reason: dict[str, Any]) -> None:
        """End the request; the first reason stays."""
        if self.status is not Status.FINISHED:
            if self.output_text is not None:
                self.output_text.finish()
            self.status, self.finish_reason = Status.FINISHED, reason
            self.finished_s = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at consecutive positions, of the raw float32 logits.

    Attributes:
      tokens: of the token at each position.
      top: of the likeliest tokens at each, descending, equal ones by lower id.
      token_ids: of the ids asked for.
    """

    tokens: list[float] = dataclasses.field(default_factory=list)
    top: list[list[Pair]] = dataclasses.field(default_factory=list)
    token_ids: list[list[Pair]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one request got from a step.

    Attributes:
      request: whose.
      tokens: sampled, in order; empty if no row was read for that.
      sampled: of those, where the request wants log-probabilities.
      scored: of prompt tokens after its rows, where it wants them.
      num_committed: its rows that are final.
      sealed_len: boundary of its sealed state.
      is_round: it was generating, with drafts to verify or without.
      num_drafts: drafts that were verified.
      num_accepted: drafts among the tokens.
    """

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampled: Logprobs = Logprobs()
    scored: Logprobs = Logprobs()
    num_committed: int = 0
    sealed_len: int = 0
    is_round: bool = False
    num_drafts: int = 0
    num_accepted: int = 0
