"""What a step gives for the rows that are read: a token, and log-probabilities.

`spec.step` composes it with drafts into the one program that the engine runs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.index import take
from pallas_kernels.rows import Rows, map_tiles
from pallas_kernels.sampling import (
    Penalties,
    Sampling,
    SlotHistory,
    choose,
    likeliest,
    log_probabilities,
    penalized,
    top_tokens,
    with_tokens,
)
from pallas_kernels.struct import struct
from qwen_hybrid.layers import Weights
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import Call, ModelState, StateConfig

COMPILER_OPTIONS = {
    # Casts happen where the code says so: keeping a wider value would make bits depend on fusion.
    "xla_allow_excess_precision": False,
    # The CPU's library computes products only: the order of its sums depends on how many there are.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
}

MAX_TOP_LOGPROBS = 20


@struct
class Reads:
    """Rows whose next token is wanted.

    Attributes:
      row: packed indices, the first `count` valid.
      target: the token to give the log-probability of, or -1 for the one chosen.
      count: how many.
    """

    row: Int[Array, " R"]
    target: Int[Array, " R"]
    count: Int[Array, ""]


@struct
class Wanted:
    """Which log-probabilities the rows of a slot give.

    Attributes:
      any: some at all.
      top: those of the likeliest tokens too.
      token_ids: those of these tokens too, whatever they are.
    """

    any: Bool[Array, " B"]
    top: Bool[Array, " B"]
    token_ids: Int[Array, "B I"]


@struct
class SlotParameters:
    """What each slot's request asks of the sampler.

    Attributes:
      sampling: temperature, filters, seed.
      penalties: changes to the logits before those.
      wanted: log-probabilities, which are those of the raw logits.
    """

    sampling: Sampling
    penalties: Penalties
    wanted: Wanted


@struct
class Chosen:
    """What each read row gives.

    Attributes:
      token: the token the row samples for the position after its own.
      top: the likeliest tokens, descending; arbitrary unless wanted.
      log_probability: under the raw float32 logits, of the target or of `token`, then of `top`,
        then of the slot's `token_ids`; arbitrary unless wanted.
    """

    token: Int[Array, " R"]
    top: Int[Array, "R K"]
    log_probability: Float[Array, "R J"]


@struct
class Window:
    """The drafts among the rows of a call, which follow a row that is certain.

    Attributes:
      drafts: of each slot; those beyond the rows of the call are arbitrary.
      first_row: packed index of the row before them.
    """

    drafts: Int[Array, "B G"]
    first_row: Int[Array, " B"]


def _of_slots(tree: Any, slot: Int[Array, " M"]) -> Any:
    return jax.tree.map(lambda a: take(a, slot), tree)


def sampled(
    logits: Float[Array, "M V"],
    parameters: SlotParameters,
    history: SlotHistory,
    *,
    slot: Int[Array, " M"],
    position: Int[Array, " M"],
    before: tuple[Int[Array, "M G"], Int[Array, " M"]],
    is_scored: Bool[Array, " M"],
) -> Int[Array, " M"]:
    """The token each row samples at `position`; any for rows that are only scored.

    Args:
      before: tokens between those that the history counts and the row's, and how many of them.
    """
    own = _of_slots(parameters.sampling, slot)
    # A row that is only scored needs neither noise nor filters.
    own = dataclasses.replace(own, temperature=jnp.where(is_scored, 0.0, own.temperature))
    changes = take(parameters.penalties.in_use, slot) & ~is_scored

    def change(logits: Array) -> Array:
        penalties = _of_slots(parameters.penalties, slot)
        marks = with_tokens(take(history.marks, slot), *before)
        return penalized(logits, marks, take(history.bias, slot), penalties, position)

    def sample(logits: Array) -> Array:
        scores = lax.cond(jnp.any(changes), change, lambda x: x, logits)
        return choose(scores, own, position)

    # The common case costs one pass over the logits and no copy.
    return lax.cond(jnp.all(~changes & own.is_greedy), likeliest, sample, logits)


def _log_probabilities(
    logits: Float[Array, "M V"], wanted: Wanted, slot: Int[Array, " M"], token: Int[Array, " M"]
) -> tuple[Int[Array, "M K"], Float[Array, "M J"]]:
    """`Chosen.top` and `Chosen.log_probability` of rows that give `token`."""
    num_rows, vocab_size = logits.shape
    count, num_ids = min(MAX_TOP_LOGPROBS, vocab_size), wanted.token_ids.shape[1]

    def no_top(logits: Array) -> Array:
        return jnp.zeros((num_rows, count), jnp.int32)

    def some(logits: Array) -> tuple[Array, Array]:
        has_top = jnp.any(take(wanted.top, slot))
        top = lax.cond(has_top, lambda x: top_tokens(x, count), no_top, logits)
        tokens = jnp.concatenate([token[:, None], top, take(wanted.token_ids, slot)], axis=1)
        return top, log_probabilities(logits, tokens)

    def none(logits: Array) -> tuple[Array, Array]:
        return no_top(logits), jnp.zeros((num_rows, 1 + count + num_ids), jnp.float32)

    return lax.cond(jnp.any(take(wanted.any, slot)), some, none, logits)


def choose_tokens(
    bound: HybridModel,
    x: Float[Array, "R _"],
    rows: Rows,
    reads: Reads,
    parameters: SlotParameters,
    history: SlotHistory,
    window: Window,
) -> Chosen:
    """Choose a token for each row that is read, as the history and the drafts before it have it.

    Args:
      bound: the model with its parameters.
      x: rows before the last norm or mixer.
    """

    def of_tile(row: Array, target: Array) -> Chosen:
        logits = bound.head(bound.final(take(x, row)))
        slot = take(rows.slot, row)
        drafts, num_before = take(window.drafts, slot), row - take(window.first_row, slot)
        token = sampled(
            logits,
            parameters,
            history,
            slot=slot,
            position=take(rows.position, row) + 1,
            before=(drafts, num_before),
            is_scored=target >= 0,
        )
        given = jnp.where(target >= 0, target, token)
        return Chosen(token, *_log_probabilities(logits, parameters.wanted, slot, given))

    return map_tiles(of_tile, reads.count, reads.row, reads.target)


def logits(
    model: HybridModel,
    state_config: StateConfig,
    params: Weights,
    state: ModelState,
    call: Call,
) -> tuple[Float[Array, "R V"], ModelState]:
    """Logits of every row of a call, float32; rows beyond the call's are arbitrary."""
    bound = model.bind({"params": params})
    x, rows, state, _ = bound(call, state, state_config)
    return map_tiles(lambda x: bound.head(bound.final(x)), rows.num_rows, x), state
