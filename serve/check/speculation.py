"""How a schedule drafts: one more of the things that must change no bit."""

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

from serve.request import Request
from serve.speculation import NGRAM, Given
from serve.speculation import Speculation as Engine

# Drafts that the check gives: the known output, spoilt where they are to be rejected.
GIVEN = "given"
OWN, REJECT, RIGHT, MIXED, RANDOM = "own", "reject", "right", "mixed", "random"
GIVEN_PATTERNS = (MIXED, RIGHT, REJECT, RANDOM)
# A drafter on the device drafts what it does; how much of that may be accepted can be limited.
DRAFTER_PATTERNS = (OWN, MIXED, REJECT)

Rule = Callable[[Request, int], Given]


@dataclasses.dataclass(frozen=True)
class Drafting:
    """An engine that drafts.

    Attributes:
      algorithm: who drafts, `GIVEN` or one of the engine's.
      width: rows of a verify step, one more than its drafts.
      draft_model_path: of DSPARK.
    """

    algorithm: str
    width: int
    draft_model_path: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `Engine`. The check is more thorough than the one at the start."""
        return {
            "speculative_algorithm": NGRAM if self.algorithm == GIVEN else self.algorithm,
            "speculative_num_draft_tokens": self.width,
            "speculative_draft_model_path": self.draft_model_path,
            "disable_self_check": True,
        }


@dataclasses.dataclass(frozen=True)
class Speculation:
    """What is drafted, and how much of it comes true.

    Attributes:
      drafting: by whom.
      pattern: which drafts are right, or accepted.
    """

    drafting: Drafting
    pattern: str

    def rule(self, seed: int, engine: Engine) -> Rule:
        """The drafts of a schedule, drawn from its number; a request holds its expected output."""
        own = engine.given
        if self.pattern == OWN:
            return own
        draw, most_drafts = random.Random(seed), self.drafting.width - 1
        if self.drafting.algorithm != GIVEN:
            limit = 0 if self.pattern == REJECT else most_drafts
            return lambda request, most: dataclasses.replace(
                own(request, most), max_accepted=draw.randint(0, limit)
            )
        return lambda request, most: Given(self._tokens(draw, request, most), most_drafts)

    def _tokens(self, draw: random.Random, request: Request, most: int) -> list[int]:
        """Drafts for the next `most` tokens of a request."""
        # A request without an expected output drafts its own prompt.
        known = request.replay_ids or tuple(request.prompt_ids)
        at = len(request.output_ids)
        right = list(known[at : at + most])
        if self.pattern == RIGHT:
            return right
        if self.pattern == RANDOM:
            return [draw.choice(known) for _ in range(most)]
        # Every other window is full, so that wide ones are accepted as well.
        is_cut = self.pattern == MIXED and draw.random() < 0.5
        num_drafts = draw.randint(0, len(right)) if is_cut else len(right)
        num_right = draw.randint(0, num_drafts) if self.pattern == MIXED else 0
        # Token 0 and 1 are in every vocabulary.
        wrong = [int(token == 0) for token in right[num_right:num_drafts]]
        return [*right[:num_right], *wrong]

    def __str__(self) -> str:
        return f"{self.drafting.algorithm} width {self.drafting.width} {self.pattern}"


def speculations(draftings: Iterable[Drafting]) -> tuple[Speculation, ...]:
    """Every way of drafting that schedules are spread over."""
    return tuple(
        Speculation(drafting, pattern)
        for drafting in draftings
        for pattern in (GIVEN_PATTERNS if drafting.algorithm == GIVEN else DRAFTER_PATTERNS)
    )


@dataclasses.dataclass
class Drafted:
    """What came of the drafts.

    Attributes:
      accepted: by engine, how many of a step's drafts were accepted, each number once.
    """

    accepted: dict[Drafting, set[int]] = dataclasses.field(default_factory=dict)

    def saw(self, drafting: Drafting, histogram: list[int]) -> None:
        """Count a request's steps.

        Args:
          histogram: of how many drafts they accepted.
        """
        counts = {count for count, times in enumerate(histogram) if times}
        self.accepted.setdefault(drafting, set()).update(counts)

    def missing(self, draftings: Iterable[Drafting]) -> list[str]:
        """Numbers of accepted drafts that never came; of a drafter of its own, any at all."""
        missing = []
        for drafting in draftings:
            met, width = self.accepted.get(drafting, set()), drafting.width
            if drafting.algorithm == GIVEN:
                missing += [f"{n} of {width - 1}" for n in range(width) if n not in met]
            elif not met - {0}:
                missing.append(f"any of {drafting.algorithm}")
        return missing
