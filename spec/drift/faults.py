"""Deliberate faults of a verify path, each the re-creation of a divergence between real engines."""

import enum
from collections.abc import Callable
from typing import TypeVar

from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.struct import static, struct

_T = TypeVar("_T")


class Fault(enum.Enum):
    """What the verify path does otherwise than plain decoding; the value is its name."""

    BETA_ROUNDING = "beta-rounding"
    L2NORM_FORM = "l2norm-form"
    STATE_ROUNDING = "state-rounding"
    CONV_TAPS = "conv-taps"
    SPLIT_BY_ROWS = "split-by-rows"
    RING_OVERWRITE = "ring-overwrite"
    COMMIT_OFF_BY_ONE = "commit-off-by-one"
    COMMIT_ONE_SHORT = "commit-one-short"

    @property
    def what(self) -> str:
        """One line about it."""
        return _WHAT[self]


_WHAT = {
    Fault.BETA_ROUNDING: "beta is rounded to bfloat16 in one path and kept in float32 in the other",
    Fault.L2NORM_FORM: "keys and queries are x / sqrt(s + eps), not x times the inverse of it",
    Fault.STATE_ROUNDING: "the running state is read rounded to bfloat16, as stored every step",
    Fault.CONV_TAPS: "taps of the convolution are added from the newest to the oldest",
    Fault.SPLIT_BY_ROWS: "a projection sums two halves of its inputs where a step has many rows",
    Fault.RING_OVERWRITE: "rings have no rows to spare: those of drafts overwrite what is pending",
    Fault.COMMIT_OFF_BY_ONE: "the commit counts one verified row too many, where there is one",
    Fault.COMMIT_ONE_SHORT: "the commit counts one row too few",
}

# Which are made after the step, of the state it left.
AFTER_STEP = (Fault.RING_OVERWRITE, Fault.COMMIT_OFF_BY_ONE, Fault.COMMIT_ONE_SHORT)


@struct
class Faults:
    """The faults that a program can make, and the one it makes: one compilation serves all.

    Attributes:
      chosen: index into `known`, or -1 for none: the same bits as of a program without faults.
      known: what is compiled in.
    """

    chosen: Int[Array, ""]
    known: tuple[Fault, ...] = static()

    def pick(self, fault: Fault, wrong: Callable[[], _T], right: Callable[[], _T]) -> _T:
        """What `wrong` gives if that fault is chosen, else what `right` does; a tree of arrays.

        A branch, not a select: in one kernel with what is not chosen, the rest may be rounded
        otherwise.
        """
        if fault not in self.known:
            return right()
        return lax.cond(self.chosen == self.known.index(fault), wrong, right)
