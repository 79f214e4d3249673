"""Draft, verify, commit: one pure function of a state, and the only one that the engine jits."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.rows import Rows
from pallas_kernels.sampling import SlotHistory, count_tokens
from pallas_kernels.struct import struct
from qwen_hybrid.state import ModelState, commit
from qwen_hybrid.step import Chosen, Reads, SlotParameters, choose_tokens
from spec.accept import accept, next_tokens, row_tokens
from spec.drafter import AbstractDrafter, Observed, Target
from spec.layout import Layout, with_drafts
from spec.state import Accepted, SpecCall, SpecState, StepOutput


@struct
class Verified:
    """What the target makes of a layout; nothing is committed.

    Attributes:
      chosen: for every row that is read.
      rows: how they are laid out.
      x: rows before the last norm or mixer.
      taps: rows after the layers that the drafter asks for, or None.
      tokens: what each packed row sampled, or -1.
      model: the state with the rows written beyond the committed ones.
    """

    chosen: Chosen
    rows: Rows
    x: Array
    taps: Array | None
    tokens: Int[Array, " R"]
    model: ModelState


def verify(
    target: Target, state: SpecState, layout: Layout, parameters: SlotParameters
) -> Verified:
    """Compute the rows of a layout, and what the target samples after each one that is read.

    Rows are written beyond the committed lengths only.
    """
    x, rows, model, taps = target.bound(layout.call, state.model, target.state_config)
    chosen = choose_tokens(
        target.bound, x, rows, layout.reads, parameters, state.history, layout.window
    )
    tokens = row_tokens(chosen, layout.reads, rows.slot.shape[0])
    return Verified(chosen, rows, x, taps, tokens, model)


def committed(
    state: SpecState, verified: Verified, accepted: Accepted, parameters: SlotParameters
) -> SpecState:
    """Make final what was accepted: everything follows `accepted.num_committed`."""
    history = _counted(state.history, accepted, verified.rows, parameters)
    model = commit(verified.model, accepted.num_committed)
    return dataclasses.replace(state, model=model, history=history)


def _counted(
    history: SlotHistory, accepted: Accepted, rows: Rows, parameters: SlotParameters
) -> SlotHistory:
    """The history after the emitted tokens; nothing is done unless penalties read it."""
    num_slots, width = accepted.tokens.shape
    is_read = jnp.any(parameters.penalties.in_use & (rows.count > 0))
    live = (jnp.arange(width)[None, :] <= accepted.num_accepted[:, None]) & (accepted.tokens >= 0)
    live = live & (rows.count > 0)[:, None]
    slot = jnp.repeat(jnp.arange(num_slots, dtype=jnp.int32), width)
    marks = count_tokens(
        history.marks,
        slot,
        jnp.maximum(accepted.tokens, 0).reshape(-1),
        live.reshape(-1),
        jnp.where(is_read, num_slots * width, 0),
    )
    return dataclasses.replace(history, marks=marks)


def step(
    target: Target,
    drafter: AbstractDrafter,
    state: SpecState,
    call: SpecCall,
    reads: Reads,
    parameters: SlotParameters,
) -> tuple[StepOutput, SpecState]:
    """One round: draft, verify, commit, and let the drafter learn from it.

    Prefill and plain decoding are the same program without drafts.

    Donates: `state`, where the caller jits it so.
    """
    proposal, state = drafter.propose(target, state, call, parameters)
    layout = with_drafts(call, reads, proposal)
    verified = verify(target, state, layout, parameters)
    accepted = accept(call, proposal, layout.window, verified.tokens, state.history)
    state = committed(state, verified, accepted, parameters)
    seen = observed(call, layout, verified, accepted)
    state = drafter.observe(target, state, seen, parameters)
    sealed_len = state.model.sequences.sealed_len
    return StepOutput(verified.chosen, accepted, proposal, sealed_len), state


def observed(call: SpecCall, layout: Layout, verified: Verified, accepted: Accepted) -> Observed:
    """What a drafter learns from a step."""
    return Observed(
        rows=verified.rows,
        next_ids=next_tokens(call, verified.rows, layout.call.ids, verified.tokens),
        x=verified.x,
        taps=verified.taps,
        accepted=accepted,
    )
