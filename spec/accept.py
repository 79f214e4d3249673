"""Which drafts the target samples too: a function of the tokens alone."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.rows import Rows
from pallas_kernels.sampling import ENDS_OUTPUT, SlotHistory
from qwen_hybrid.step import Chosen, Reads, Window
from spec.state import Accepted, Proposal, SpecCall

# A row that sampled nothing.
NONE = -1


def row_tokens(chosen: Chosen, reads: Reads, num_rows: int) -> Int[Array, " R"]:
    """The token that each packed row sampled, or -1."""
    index = jnp.arange(reads.row.shape[0])
    is_sampled = (index < reads.count) & (reads.target < 0)
    row = jnp.where(is_sampled, reads.row, num_rows)
    return jnp.full(num_rows, NONE, jnp.int32).at[row].set(chosen.token, mode="drop")


def accept(
    call: SpecCall,
    proposal: Proposal,
    window: Window,
    tokens: Int[Array, " R"],
    history: SlotHistory,
) -> Accepted:
    """Accept the longest run of drafts each of which is the token that the target samples there.

    A draft is never accepted past a token that ends the output, and the last token of a slot is
    always the one that the target samples after the last accepted draft, so that the outcome is
    that of steps without drafts whatever the caps are.

    Args:
      tokens: what each packed row sampled, or -1.
    """
    num_slots, width = proposal.tokens.shape
    place = window.first_row[:, None] + jnp.arange(width + 1)[None, :]
    own = tokens[jnp.clip(place, 0, tokens.shape[0] - 1)]
    nth = jnp.arange(width)[None, :]
    matches = (proposal.tokens == own[:, :-1]) & (nth < proposal.count[:, None])
    natural = jnp.sum(jnp.cumprod(matches.astype(jnp.int32), axis=1), axis=1)
    least = jnp.minimum(call.min_accepted, proposal.count)
    count = jnp.clip(natural, least, jnp.maximum(call.max_accepted, least))
    padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    # Where acceptance is forced, what is emitted is what the next rows were computed from.
    emitted = jnp.where(jnp.arange(width + 1)[None, :] < count[:, None], padded, own)
    slot = jnp.arange(num_slots)[:, None]
    marks = history.marks[slot, jnp.maximum(emitted, 0)]
    ends = (emitted >= 0) & ((marks & ENDS_OUTPUT) > 0)
    first_end = jnp.min(jnp.where(ends, jnp.arange(width + 1)[None, :], width), axis=1)
    count = jnp.minimum(count, first_end).astype(jnp.int32)
    return Accepted(
        tokens=emitted,
        num_accepted=count,
        num_committed=call.count + count,
        num_natural=natural.astype(jnp.int32),
    )


def next_tokens(call: SpecCall, rows: Rows, ids: Array, tokens: Array) -> Int[Array, " R"]:
    """The token after each packed row: the next row's where that is certain, the one known to the
    host, or else the one that the row sampled; 0 where none is known."""
    offset = jnp.arange(rows.slot.shape[0]) - rows.row_start[rows.slot]
    last = call.count[rows.slot] - 1
    following = jnp.roll(ids, -1)
    at_last = jnp.where(
        call.next_id[rows.slot] >= 0, call.next_id[rows.slot], jnp.maximum(tokens, 0)
    )
    beyond = jnp.maximum(tokens, 0)
    return jnp.where(offset < last, following, jnp.where(offset == last, at_last, beyond))
