"""How some requests run together: drawn from a number, so that a schedule can be had again."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from serve.check.cases import Case
from serve.check.sizes import Sizes
from serve.check.speculation import Drafting, Speculation


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How some cases run together.

    Attributes:
      seed: its number, and that of the random chunks.
      cases: indices, in order of arrival.
      arrivals: step at which each arrives.
      chunk: prefill chunk, 0 for random sizes.
      is_poisoned: a request whose rows are NaN runs beside them.
      is_preempted: requests are preempted at moments that were not met yet.
      is_starved: the blocks hold the largest request and no more.
      speculation: how it drafts, or None.
    """

    seed: int
    cases: tuple[int, ...]
    arrivals: tuple[int, ...]
    chunk: int
    is_poisoned: bool
    is_preempted: bool
    is_starved: bool
    speculation: Speculation | None = None

    @property
    def drafting(self) -> Drafting | None:
        """The engine that it needs, or None for one that does not draft."""
        return self.speculation.drafting if self.speculation else None

    def chunk_len(self) -> Callable[[int], int]:
        """Rows to take when some are left."""
        rng = np.random.default_rng(self.seed)
        if self.chunk:
            return lambda remaining: min(self.chunk, remaining)
        return lambda remaining: int(rng.integers(1, remaining + 1))

    def __str__(self) -> str:
        marks = ("poisoned", "preempted", "starved")
        kind = [mark for mark in marks if getattr(self, f"is_{mark}")]
        kind += [str(self.speculation)] if self.speculation else []
        return ", ".join([f"schedule {self.seed}", f"chunk {self.chunk or 'random'}", *kind])


def make_schedule(
    seed: int, cases: list[Case], *, sizes: Sizes, speculations: Sequence[Speculation | None]
) -> Schedule:
    """A random schedule; chunk sizes and ways of drafting take turns so that all of them occur."""
    rng = np.random.default_rng(seed)
    chunk = sizes.cuts[seed % len(sizes.cuts)]
    longest = sizes.longest_by_row if chunk == 1 else sizes.longest_prompt
    # Where blocks are few, requests that begin with one and come to need another run out of them.
    is_starved = seed % 2 == 1 and chunk <= sizes.block + 1
    longest = sizes.block + 1 if is_starved else longest
    fitting = [i for i, case in enumerate(cases) if len(case.prompt) <= longest]
    size = len(fitting) if is_starved else min(int(rng.integers(3, 8)), len(fitting))
    chosen = tuple(int(i) for i in rng.choice(fitting, size, replace=False))
    arrivals = tuple(sorted(int(i) for i in rng.integers(0, 4 if is_starved else 12, len(chosen))))
    # One further in each round, so that a way of drafting meets every way of cutting.
    turn = seed + seed // len(speculations)
    return Schedule(
        seed,
        chosen,
        arrivals,
        chunk,
        is_poisoned=seed % 3 == 0,
        is_preempted=seed % 4 != 3,
        is_starved=is_starved,
        speculation=speculations[turn % len(speculations)],
    )
