"""What a deliberate bug is."""

import dataclasses
from collections.abc import Callable

import pytest

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A deliberate bug.

    Attributes:
      name: short and unique.
      breaks: what is wrong with it.
      apply: makes the change.
      killers: tests of which at least one must fail.
    """

    name: str
    breaks: str
    apply: Callable[[Patch], None]
    killers: tuple[str, ...]
