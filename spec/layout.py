"""Where drafts go among the rows of a call: after the certain rows of their slot."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.struct import struct
from qwen_hybrid.state import Call
from qwen_hybrid.step import Reads, Window
from spec.state import Proposal, SpecCall


@struct
class Layout:
    """A call with its drafts.

    Attributes:
      call: all rows, those of drafts not certain.
      reads: the host's, then the rows of drafts.
      window: the drafts, and the rows before them.
    """

    call: Call
    reads: Reads
    window: Window


def _slot_of(ends: Int[Array, " B"], index: Int[Array, " R"]) -> Int[Array, " R"]:
    """The slot whose packed entries hold an index; the last one's beyond all."""
    slot = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    return jnp.minimum(slot, ends.shape[0] - 1)


def with_drafts(call: SpecCall, reads: Reads, proposal: Proposal) -> Layout:
    """Lay out the rows of a step; the host's rows move, their order stays.

    Args:
      reads: rows of the host's packing.
    """
    num_rows, num_drafts = call.ids.shape[0], proposal.tokens.shape[1]
    ends, total = jnp.cumsum(call.count), call.count + proposal.count
    first, new_first = ends - call.count, jnp.cumsum(total) - total
    index = jnp.arange(num_rows, dtype=jnp.int32)
    slot = _slot_of(jnp.cumsum(total), index)
    offset = index - new_first[slot]
    ids = call.ids[jnp.clip(first[slot] + offset, 0, num_rows - 1)]
    if num_drafts:
        nth = jnp.clip(offset - call.count[slot], 0, num_drafts - 1)
        ids = jnp.where(offset < call.count[slot], ids, proposal.tokens[slot, nth])
    whole = Call(ids=ids, count=total, certain=call.count, seal_only=call.seal_only)
    window = Window(drafts=proposal.tokens, first_row=new_first + call.count - 1)
    return Layout(whole, _reads(reads, ends, new_first - first, proposal.count, window), window)


def _reads(
    reads: Reads,
    ends: Int[Array, " B"],
    shift: Int[Array, " B"],
    num_drafts: Int[Array, " B"],
    window: Window,
) -> Reads:
    """The host's reads at their new places, and after them one of every draft's row."""
    index = jnp.arange(reads.row.shape[0], dtype=jnp.int32)
    given = index < reads.count
    draft_ends = jnp.cumsum(num_drafts)
    nth = index - reads.count
    slot = _slot_of(draft_ends, nth)
    row = window.first_row[slot] + 1 + nth - (draft_ends - num_drafts)[slot]
    moved = reads.row + shift[_slot_of(ends, reads.row)]
    # Entries beyond all reads repeat a row that is there.
    row = jnp.where(given, moved, jnp.clip(row, 0, index.shape[0] - 1))
    target = jnp.where(given, reads.target, -1)
    return Reads(row=row, target=target, count=reads.count + draft_ends[-1])
