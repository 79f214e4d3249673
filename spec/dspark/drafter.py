"""DSPARK: a block of drafts from one pass of a draft model over the target's tapped rows."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.state import StateConfig
from qwen_hybrid.step import SlotParameters, sampled
from spec.drafter import AbstractDrafter, Observed, Target
from spec.dspark.model import Anchors, draft_len, inject, propose
from spec.dspark.state import dspark_state_spec
from spec.state import Proposal, SpecCall, SpecState


@dataclasses.dataclass(frozen=True)
class DSparkDrafter(AbstractDrafter):
    """Drafts with a DSpark model, whose parameters are `Target.draft_params`.

    Attributes:
      config: the draft model's architecture.
      num_drafts: how many of a block to verify at most.
      threshold: drafts are dropped from the first one on that is taken, together with those before
        it, with less than this probability by the confidence head's word; 0 keeps all.
    """

    config: DSparkConfig
    num_drafts: int
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_drafts <= self.config.block_size:
            raise ValueError(
                f"this draft model drafts 1 to {self.config.block_size} tokens, got "
                f"{self.num_drafts}"
            )
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"the confidence threshold must be in [0, 1], got {self.threshold}")
        if self.threshold > 0.0 and not self.config.has_confidence_head:
            raise ValueError("a confidence threshold needs a draft model with a confidence head")

    @property
    def tap_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """Layers of the target whose rows it reads."""
        return self.config.target_layer_ids

    def require_target(self, target: HybridConfig) -> None:
        """Raise a ValueError unless the draft model was made for such a target."""
        pairs = {
            "vocab_size": (self.config.vocab_size, target.vocab_size),
            "hidden_size": (self.config.hidden_size, target.hidden_size),
            "num_target_layers": (self.config.num_target_layers, target.num_layers),
        }
        for name, (own, of_target) in pairs.items():
            if own != of_target:
                raise ValueError(
                    f"the draft model is for a target with {name} {own}, this one has {of_target}"
                )

    def state_spec(self, state_config: StateConfig) -> Any:
        """Keys and values of the context."""
        return dspark_state_spec(
            self.config,
            num_blocks=state_config.num_blocks,
            block_size=state_config.block_size,
            dtype=state_config.dtype,
        )

    def propose(
        self, target: Target, state: SpecState, call: SpecCall, parameters: SlotParameters
    ) -> tuple[Proposal, SpecState]:
        """Draft a block after the newest token of each slot that may have drafts."""
        sequences = state.model.sequences
        last = jnp.cumsum(call.count) - 1
        anchors = Anchors(
            token=call.ids[jnp.maximum(last, 0)],
            length=sequences.committed_len + call.count - 1,
            active=call.max_drafts > 0,
            block_table=sequences.block_table,
        )
        slot = jnp.arange(call.count.shape[0], dtype=jnp.int32)
        nothing = (jnp.zeros((slot.shape[0], 0), jnp.int32), slot)

        def pick(logits: Float[Array, "B V"], position: Int[Array, " B"]) -> Int[Array, " B"]:
            return sampled(
                logits,
                parameters,
                state.history,
                slot=slot,
                position=position,
                before=nothing,
                is_scored=jnp.zeros(slot.shape, bool),
            )

        tokens, confidence = propose(
            self.config,
            target.draft_params,
            state.draft,
            anchors,
            embed=target.bound.embed,
            head=target.bound.head,
            pick=pick,
        )
        count = jnp.minimum(call.max_drafts, self.num_drafts)
        if self.threshold > 0.0:
            count = jnp.minimum(count, draft_len(confidence, self.threshold))
        return Proposal(tokens[:, : self.num_drafts], count), state

    def observe(
        self, target: Target, state: SpecState, observed: Observed, parameters: SlotParameters
    ) -> SpecState:
        """Write the context of the step's rows."""
        assert observed.taps is not None
        draft = inject(self.config, target.draft_params, state.draft, observed.taps, observed.rows)
        return dataclasses.replace(state, draft=draft)
