"""What schedules came to do: a schedule counts for a law only if what the law is about happened."""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from serve.request import Request, StepResult
from serve.scheduler import Work


@dataclasses.dataclass
class Met:
    """What a request met.

    Attributes:
      num_pieces: pieces of its prompt that were not all of it.
      num_shared, num_beside_nan: its steps with rows of others, and with rows of NaN.
    """

    num_pieces: int = 0
    num_shared: int = 0
    num_beside_nan: int = 0


@dataclasses.dataclass
class Happened:
    """What a schedule, or several, came to do.

    Attributes:
      pieces: sizes of the pieces of prompts that were computed in several.
      num_steps, num_shared: steps, and those with rows of more than one request.
      num_poisoned: steps with rows of NaN beside others.
      num_seals: states stored.
      num_forced, num_starved: preemptions by the schedule, and for want of blocks.
      slots: batch slots that requests ran in.
    """

    pieces: set[int] = dataclasses.field(default_factory=set)
    num_steps: int = 0
    num_shared: int = 0
    num_poisoned: int = 0
    num_seals: int = 0
    num_forced: int = 0
    num_starved: int = 0
    slots: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def total(cls, parts: Iterable["Happened"]) -> "Happened":
        """What several schedules did together."""
        total = cls()
        for part in parts:
            for name, theirs in vars(part).items():
                mine = getattr(total, name)
                setattr(total, name, mine | theirs if isinstance(mine, set) else mine + theirs)
        return total

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.num_steps} steps, {self.num_shared} of several requests, {self.num_poisoned} "
            f"beside rows of NaN, {len(self.pieces)} sizes of prompt pieces, {self.num_seals} "
            f"seals, {self.num_forced} forced preemptions, {self.num_starved} for want of blocks"
        )


class Observer:
    """Counts the steps of a schedule.

    Attributes:
      happened: in all of them.
      met: by request.
    """

    def __init__(self, poison: Request | None):
        """Nothing has happened yet.

        Args:
          poison: the request whose rows are made NaN.
        """
        self.happened = Happened()
        self.met: dict[Request, Met] = collections.defaultdict(Met)
        self._poison = poison

    def saw(self, work: list[Work], results: list[StepResult]) -> None:
        """Count a step, before its rows are."""
        is_shared, is_poisoned = len(work) > 1, len(work) > 1 and self._has_nan(results)
        self.happened.num_steps += 1
        self.happened.num_shared += is_shared
        self.happened.num_poisoned += is_poisoned
        for item in work:
            request, met = item.request, self.met[item.request]
            self.happened.slots.add(request.slot)
            met.num_shared += is_shared
            met.num_beside_nan += is_poisoned
            if request.remaining_prefill and len(item.ids) < request.prompt_len:
                met.num_pieces += 1
                self.happened.pieces.add(len(item.ids))

    def _has_nan(self, results: list[StepResult]) -> bool:
        return any(
            np.isnan(log_probability)
            for result in results
            if result.request is self._poison
            for log_probability in result.sampled.tokens
        )
