"""What a drafter is, and the one that verifies what the host gives."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.rows import Rows
from pallas_kernels.struct import struct
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import StateConfig
from qwen_hybrid.step import SlotParameters
from spec.state import Accepted, Proposal, SpecCall, SpecState


@struct
class Observed:
    """What a drafter learns from a step of the target.

    Attributes:
      rows: of the step.
      next_ids: the token after each row; arbitrary beyond the committed ones.
      x: the target's rows before its last norm or mixer.
      taps: its rows after the layers that the drafter asks for, or None.
      accepted: what became of the drafts.
    """

    rows: Rows
    next_ids: Int[Array, " R"]
    x: Float[Array, "R _"]
    taps: Float[Array, "R _"] | None
    accepted: Accepted


@dataclasses.dataclass(frozen=True)
class Target:
    """The model that drafts are for, inside a traced function.

    Attributes:
      bound: with its parameters.
      state_config: capacities of its state.
      draft_params: parameters of the drafter's own, or None.
    """

    bound: HybridModel
    state_config: StateConfig
    draft_params: Any


class AbstractDrafter(abc.ABC):
    """Proposes tokens. Static and hashable: what it carries is in `SpecState.draft`.

    Whatever it proposes, it changes no bit of what the target gives.

    Attributes:
      num_drafts: tokens it proposes at most.
      tap_layers: layers of the target whose rows it reads.
    """

    num_drafts: int
    tap_layers: tuple[int, ...] = ()

    @abc.abstractmethod
    def state_spec(self, state_config: StateConfig) -> Any:
        """Shapes and types of what it carries."""

    @abc.abstractmethod
    def propose(
        self, target: Target, state: SpecState, call: SpecCall, parameters: SlotParameters
    ) -> tuple[Proposal, SpecState]:
        """Drafts for the slots that may have some, before the step."""

    @abc.abstractmethod
    def observe(
        self, target: Target, state: SpecState, observed: Observed, parameters: SlotParameters
    ) -> SpecState:
        """Take in what the step gave; `state` is committed already."""


@dataclasses.dataclass(frozen=True)
class GivenDrafts(AbstractDrafter):
    """Verifies the drafts of the host: prompt lookup, and the drafters for diagnosis."""

    num_drafts: int

    def state_spec(self, state_config: StateConfig) -> Any:
        """Nothing is carried."""
        return ()

    def propose(
        self, target: Target, state: SpecState, call: SpecCall, parameters: SlotParameters
    ) -> tuple[Proposal, SpecState]:
        """The drafts of the call."""
        return Proposal(call.drafts, jnp.minimum(call.num_drafts, call.max_drafts)), state

    def observe(
        self, target: Target, state: SpecState, observed: Observed, parameters: SlotParameters
    ) -> SpecState:
        """Nothing is learned."""
        return state


# Plain decoding: the same program with no drafts.
NO_DRAFTS = GivenDrafts(0)
