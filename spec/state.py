"""What a step of speculative decoding takes, carries and gives."""

from typing import Any

from jaxtyping import Array, Bool, Int

from pallas_kernels.sampling import SlotHistory
from pallas_kernels.struct import struct
from qwen_hybrid.state import ModelState
from qwen_hybrid.step import Chosen


@struct
class SpecCall:
    """The certain rows of a step, and what may be verified after them.

    Attributes:
      ids: token of each certain row, packed slot after slot; the rest of the program's rows is
        room for drafts.
      count: certain rows of each slot: a piece of a prompt, or the newest token alone.
      seal_only: slots without rows whose due seal is to be stored.
      next_id: the token after a slot's certain rows, or -1 where the last of them samples it.
      max_drafts: drafts to verify after them at most; 0 unless the last one samples. Blocks must
        be there for their rows.
      drafts: those that the host gives; a drafter on the device overrides them.
      num_drafts: how many the host gives.
      max_accepted: drafts to accept at most, to exercise rejection.
      min_accepted: drafts to accept whatever the target samples; above 0 the text is arbitrary,
        which only a measurement of speed can want.
    """

    ids: Int[Array, " R"]
    count: Int[Array, " B"]
    seal_only: Bool[Array, " B"]
    next_id: Int[Array, " B"]
    max_drafts: Int[Array, " B"]
    drafts: Int[Array, "B G"]
    num_drafts: Int[Array, " B"]
    max_accepted: Int[Array, " B"]
    min_accepted: Int[Array, " B"]


@struct
class Proposal:
    """Drafts to verify.

    Attributes:
      tokens: of each slot, in order; those beyond `count` are arbitrary.
      count: how many.
    """

    tokens: Int[Array, "B G"]
    count: Int[Array, " B"]


@struct
class SpecState:
    """Everything that is carried from step to step.

    Attributes:
      model: decode state of the target.
      history: what penalties and the end of an output read, by slot.
      draft: state of the drafter; the target's arithmetic never reads it.
    """

    model: ModelState
    history: SlotHistory
    draft: Any


@struct
class Accepted:
    """What a slot gets from a step.

    Attributes:
      tokens: emitted, in order: the accepted drafts and the target's own next token.
      num_accepted: drafts among them, a statistic.
      num_committed: rows that are final now; everything that a step changes follows this number.
      num_natural: drafts that the target sampled too, before every cap.
    """

    tokens: Int[Array, "B W"]
    num_accepted: Int[Array, " B"]
    num_committed: Int[Array, " B"]
    num_natural: Int[Array, " B"]


@struct
class StepOutput:
    """What the host gets from a step.

    Attributes:
      chosen: for the rows that the host reads, in its order, then for the rows of drafts, slot
        after slot.
      accepted: by slot.
      proposal: the drafts that were verified.
      sealed_len: boundary of each slot's sealed state after the step.
    """

    chosen: Chosen
    accepted: Accepted
    proposal: Proposal
    sealed_len: Int[Array, " B"]
