"""NEXTN: a chain of drafts from the target's own MTP head.

The head's row i is a function of token i + 1 and the target's row i, and predicts token i + 2. So
the first draft of a round comes from the rows of the round before (`observe`), and each further one
from a row that the head feeds itself (`propose`), which the next `observe` overwrites.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.bits import from_bits, storage_dtype, to_bits
from pallas_kernels.index import take
from pallas_kernels.rows import TILE_ROWS, Rows, map_row_tiles, map_tiles, plan_rows
from pallas_kernels.struct import build, struct
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.state import Sequences, StateConfig
from qwen_hybrid.step import SlotParameters, sampled
from spec.drafter import AbstractDrafter, Observed, Target
from spec.state import Proposal, SpecCall, SpecState

MAX_DRAFTS = 7


@struct
class MtpDraft:
    """Where the chain of each slot begins.

    Attributes:
      first: the draft after the newest token.
      hidden: the head's row that predicted it, in storage form.
    """

    first: Int[Array, " B"]
    hidden: Any


def _tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS) * TILE_ROWS


@dataclasses.dataclass(frozen=True)
class MtpDrafter(AbstractDrafter):
    """Drafts with the MTP head of the target.

    Attributes:
      config: the target's architecture.
      num_drafts: length of the chain, 1 to 7.
    """

    config: HybridConfig
    num_drafts: int

    def __post_init__(self) -> None:
        if self.config.num_mtp_layers == 0:
            raise ValueError("NEXTN needs a model with an MTP layer; this one has none")
        if not 1 <= self.num_drafts <= MAX_DRAFTS:
            raise ValueError(f"NEXTN drafts 1 to {MAX_DRAFTS} tokens, got {self.num_drafts}")

    def state_spec(self, state_config: StateConfig) -> Any:
        """The beginnings; keys and values of the head are `ModelState.mtp`."""
        connection = self.config.hyper_connection
        width = self.config.hidden_size * (connection.count if connection else 1)
        slots, dtype = state_config.num_slots, storage_dtype(state_config.dtype)
        return build(
            MtpDraft,
            first=jax.ShapeDtypeStruct((slots,), jnp.int32),
            hidden=jax.ShapeDtypeStruct((slots, width), dtype),
        )

    def observe(
        self, target: Target, state: SpecState, observed: Observed, parameters: SlotParameters
    ) -> SpecState:
        """Run the head over the rows of the step; keep each slot's last committed one."""
        bound, rows, layer = target.bound, observed.rows, state.model.mtp
        assert layer is not None
        hidden = observed.x
        if self.config.hyper_connection is None:
            hidden = map_row_tiles(bound.final, rows, hidden)
        embedded = map_row_tiles(bound.embed, rows, observed.next_ids)
        recurrent, layer = bound.mtp(embedded, hidden, layer, rows)
        last = rows.row_start + observed.accepted.num_committed - 1
        last = jnp.clip(last, 0, rows.slot.shape[0] - 1)
        # Tokens of the output are in the history by now.
        position = state.model.sequences.committed_len + 1
        kept = _padded(recurrent[last])
        slots = _padded(jnp.arange(last.shape[0], dtype=jnp.int32))
        no_tokens = jnp.zeros((kept.shape[0], 0), jnp.int32)
        first = _pick(
            target, state, parameters, slots, _padded(position), kept, no_tokens, len(last)
        )[: len(last)]
        is_new = rows.count > 0
        draft = MtpDraft(
            first=jnp.where(is_new, first, state.draft.first),
            hidden=jnp.where(
                is_new[:, None],
                to_bits(recurrent[last], state.draft.hidden.dtype),
                state.draft.hidden,
            ),
        )
        model = dataclasses.replace(state.model, mtp=layer)
        return dataclasses.replace(state, model=model, draft=draft)

    def propose(
        self, target: Target, state: SpecState, call: SpecCall, parameters: SlotParameters
    ) -> tuple[Proposal, SpecState]:
        """Go on from the first draft, one row of each slot at a time."""
        count = jnp.minimum(call.max_drafts, self.num_drafts)
        tokens = jnp.zeros((count.shape[0], self.num_drafts), jnp.int32)
        tokens = tokens.at[:, 0].set(state.draft.first)
        sequences = state.model.sequences

        def body(i: Array, carry: tuple) -> tuple:
            tokens, hidden, layer = carry
            rows = self._rows(target.state_config, sequences, i, count)
            newest = take(tokens, rows.slot, jnp.full(rows.slot.shape, i - 1, jnp.int32))
            embedded = map_row_tiles(target.bound.embed, rows, newest)
            recurrent, layer = target.bound.mtp(
                embedded, from_bits(take(hidden, rows.slot)), layer, rows
            )
            before = take(tokens, rows.slot)
            drawn = _pick(
                target,
                state,
                parameters,
                rows.slot,
                rows.position + 2,
                recurrent,
                before,
                rows.num_rows,
                num_before=i,
            )
            slot = jnp.where(rows.live, rows.slot, count.shape[0])
            tokens = tokens.at[slot, i].set(drawn, mode="drop")
            hidden = hidden.at[slot].set(to_bits(recurrent, hidden.dtype), mode="drop")
            return tokens, hidden, layer

        carry = (tokens, state.draft.hidden, state.model.mtp)
        # No slot takes part in the step of a draft that it may not have.
        tokens, _, layer = lax.fori_loop(1, jnp.max(count), body, carry)
        model = dataclasses.replace(state.model, mtp=layer)
        return Proposal(tokens, count), dataclasses.replace(state, model=model)

    def _rows(
        self, sc: StateConfig, sequences: Sequences, i: Array, count: Int[Array, " B"]
    ) -> Rows:
        """One row of each slot that has a draft after its i-th."""
        active = (count > i).astype(jnp.int32)
        rows, _ = plan_rows(
            start=sequences.committed_len + i - 1,
            count=active,
            certain=active,
            seal_only=jnp.zeros(active.shape, bool),
            sealed_len=sequences.sealed_len,
            sealed_slot=sequences.sealed_slot,
            next_slot=jnp.full(active.shape, -1, jnp.int32),
            block_table=sequences.block_table,
            max_rows=_tiles(sc.num_slots),
            num_state_slots=sc.num_state_slots,
            block_size=sc.block_size,
        )
        return rows


def _padded(x: Array) -> Array:
    """Rows up to a whole number of tiles."""
    return jnp.pad(x, ((0, -x.shape[0] % TILE_ROWS), *((0, 0),) * (x.ndim - 1)))


def _pick(
    target: Target,
    state: SpecState,
    parameters: SlotParameters,
    slot: Int[Array, " R"],
    position: Int[Array, " R"],
    recurrent: Float[Array, "R _"],
    before: Int[Array, "R G"],
    num_rows: Any,
    num_before: Any = 0,
) -> Int[Array, " R"]:
    """The token that each row drafts for `position`, with the target's noise at that place."""

    def of_tile(row: Array, slot: Array, position: Array, before: Array) -> Array:
        logits = target.bound.head(target.bound.mtp.predict(take(recurrent, row)))
        return sampled(
            logits,
            parameters,
            state.history,
            slot=slot,
            position=position,
            before=(before, jnp.full(slot.shape, num_before, jnp.int32)),
            is_scored=jnp.zeros(slot.shape, bool),
        )

    index = jnp.arange(slot.shape[0], dtype=jnp.int32)
    return map_tiles(of_tile, jnp.asarray(num_rows, jnp.int32), index, slot, position, before)
