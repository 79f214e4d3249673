"""How a schedule drafts: one more of the things that must change no bit."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from serve.engine_config import EngineConfig

ARGUMENTS = ("speculative_algorithm", "speculative_num_draft_tokens", "speculative_debug")


def can_speculate() -> bool:
    """Whether the engine can draft."""
    return {field.name for field in dataclasses.fields(EngineConfig)}.issuperset(ARGUMENTS)


@dataclasses.dataclass(frozen=True)
class Speculation:
    """What is drafted, and how much of it comes true.

    Attributes:
      algorithm: who drafts.
      width: rows of a verify step, one more than its drafts.
      pattern: which drafts are right, as `speculative_debug` says it; None leaves that to the
        drafter.
    """

    algorithm: str
    width: int
    pattern: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of `Engine`."""
        values = (self.algorithm, self.width, self.pattern)
        return dict(zip(ARGUMENTS, values, strict=True))

    def __str__(self) -> str:
        pattern = f" {self.pattern}" if self.pattern else ""
        return f"{self.algorithm} width {self.width}{pattern}"


def patterns(width: int) -> tuple[str | None, ...]:
    """Acceptance patterns that together accept every number of drafts from 0 to `width - 1`."""
    counts = range(1, width - 1)
    some = (f"{'accept' if n % 2 else 'adversarial'}:{n}" for n in counts)
    return (None, "reject", *some, "oracle", "random")


def speculations(algorithm: str, widths: Iterable[int]) -> tuple[Speculation, ...]:
    """Every way of drafting that schedules are spread over."""
    return tuple(Speculation(algorithm, w, pattern) for w in widths for pattern in patterns(w))


@dataclasses.dataclass
class Drafted:
    """What came of the drafts.

    Attributes:
      accepted: by width, how many of a step's drafts were accepted, each number once.
    """

    accepted: dict[int, set[int]] = dataclasses.field(default_factory=dict)

    def saw(self, width: int, histogram: list[int]) -> None:
        """Count a request's steps.

        Args:
          histogram: of how many drafts they accepted.
        """
        counts = {count for count, times in enumerate(histogram) if times}
        self.accepted.setdefault(width, set()).update(counts)

    def missing(self, widths: Iterable[int]) -> list[tuple[int, int]]:
        """(width, number of accepted drafts) that never came."""
        met = self.accepted
        return [(w, n) for w in widths for n in range(w) if n not in met.get(w, ())]
