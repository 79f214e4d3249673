"""What a request's own tokens and its caller do to the logits, before temperature and filters.

A row of *marks*, one integer for each token of the vocabulary, says all that must be known of a
sequence: whether the token is in the prompt, whether it ends the output, and how often it was
generated.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.index import cut, paste, take
from pallas_kernels.struct import build, struct

IN_PROMPT = 1
ENDS_OUTPUT = 2
# One more generated token; the bits from here on count them.
GENERATED = 4


@struct
class Penalties:
    """How the logits of each row change.

    Attributes:
      repetition: divides positive, multiplies negative logits of tokens in prompt and output.
      frequency: times a token's count in the output, off its logit.
      presence: off the logit of every token in the output.
      min_len: no token that ends the output is taken at a position below this one.
      in_use: the row changes at all.
    """

    repetition: Float[Array, " M"]
    frequency: Float[Array, " M"]
    presence: Float[Array, " M"]
    min_len: Int[Array, " M"]
    in_use: Bool[Array, " M"]


@struct
class SlotHistory:
    """What `penalized` reads of each slot; a slot whose penalties are not in use may hold anything.

    Attributes:
      marks: the slot's tokens, counted.
      bias: added to the logits.
    """

    marks: Int[Array, "B V"]
    bias: Float[Array, "B V"]


def history_spec(num_slots: int, vocab_size: int) -> SlotHistory:
    """Shapes of a history: eight bytes for each slot and token of the vocabulary."""
    shape = (num_slots, vocab_size)
    return build(
        SlotHistory,
        marks=jax.ShapeDtypeStruct(shape, jnp.int32),
        bias=jax.ShapeDtypeStruct(shape, jnp.float32),
    )


def with_slot(
    history: SlotHistory,
    slot: Int[Array, ""],
    marks: Int[Array, " V"],
    bias: Float[Array, " V"],
) -> SlotHistory:
    """The history with one slot's rows replaced."""
    return SlotHistory(
        marks=paste(history.marks, marks[None], (slot,)),
        bias=paste(history.bias, bias[None], (slot,)),
    )


def penalized(
    logits: Float[Array, "M V"],
    marks: Int[Array, "M V"],
    bias: Float[Array, "M V"],
    penalties: Penalties,
    position: Int[Array, " M"],
) -> Float[Array, "M V"]:
    """Logits to sample the tokens at `position` from: repetition, counts, bias, no early end.

    Rows not in use are returned as they are. Each element depends on those of its own place alone.

    Numerics: float32, in this order:
      x = x / repetition if x > 0 else x * repetition       where the token occurred
      x = x - (frequency * count + presence * [count > 0])
      x = x + bias
      x = -inf                                              where it would end the output too early
    """
    count = lax.shift_right_logical(marks, jnp.asarray(2, marks.dtype))
    occurred = (marks & ~jnp.asarray(ENDS_OUTPUT, marks.dtype)) > 0
    repetition = penalties.repetition[:, None]
    x = jnp.where(logits > 0, logits / repetition, logits * repetition)
    x = jnp.where(occurred, x, logits)
    seen = jnp.where(count > 0, penalties.presence[:, None], 0.0)
    x = x - (penalties.frequency[:, None] * count.astype(jnp.float32) + seen)
    x = x + bias
    ends = (marks & jnp.asarray(ENDS_OUTPUT, marks.dtype)) > 0
    x = jnp.where(ends & (position < penalties.min_len)[:, None], -jnp.inf, x)
    return jnp.where(penalties.in_use[:, None], x, logits)


def with_tokens(
    marks: Int[Array, "M V"], tokens: Int[Array, "M G"], count: Int[Array, " M"]
) -> Int[Array, "M V"]:
    """Marks of rows with the first `count` tokens of each counted as generated."""
    num_rows, width = tokens.shape
    if width == 0:
        return marks
    more = jnp.where(jnp.arange(width)[None, :] < count[:, None], GENERATED, 0)
    row = jnp.arange(num_rows, dtype=tokens.dtype)[:, None]
    return marks.at[row, tokens].add(more.astype(marks.dtype), mode="drop")


def count_tokens(
    marks: Int[Array, "B V"],
    slot: Int[Array, " R"],
    token: Int[Array, " R"],
    live: Bool[Array, " R"],
    num_rows: Int[Array, ""],
) -> Int[Array, "B V"]:
    """Marks with the live ones of the first `num_rows` tokens counted as generated."""

    def body(row: Array, marks: Array) -> Array:
        at = (take(slot, row), take(token, row))
        more = jnp.where(take(live, row), GENERATED, 0).astype(marks.dtype)
        return paste(marks, cut(marks, at, (1, 1)) + more, at)

    return lax.fori_loop(0, num_rows, body, marks)
