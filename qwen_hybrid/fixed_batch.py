"""A batch that stays as it is: explicit state and one pure function, for experiments under jit.

    state_config = fixed_batch(batch_size=2, max_tokens=256)
    state = start_state(config, state_config)
    logits, state = extend(model, state_config, params, state, ids)      # any number of times

Every sequence owns its blocks and state slots for good, so nothing is scheduled. The bits are the
engine's where the whole is jitted with `COMPILER_OPTIONS`.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta_net import StateDtype
from pallas_kernels.rows import TILE_ROWS, map_tiles
from pallas_kernels.sampling import log_probabilities
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.layers import Weights
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import Call, ModelState, StateConfig, commit, init_state
from qwen_hybrid.step import logits

# A seal never goes where the state that it is computed from lies.
SLOTS_OF_ONE = 2


def fixed_batch(
    *,
    batch_size: int,
    max_tokens: int,
    dtype: str = "float32",
    state_dtype: StateDtype = StateDtype.FLOAT32,
    max_window: int = 1,
    with_mtp: bool = False,
) -> StateConfig:
    """Return the capacities that some sequences of at most `max_tokens` tokens each need.

    Args:
        max_window: rows that a call may compute of a sequence without committing all of them.
        with_mtp: hold the state of the MTP layer too.
    """
    blocks = -(-max_tokens // StateConfig.block_size)
    return StateConfig(
        num_slots=batch_size,
        num_blocks=batch_size * blocks,
        num_state_slots=1 + SLOTS_OF_ONE * batch_size,
        blocks_per_slot=blocks,
        dtype=dtype,
        state_dtype=state_dtype,
        max_window=max_window,
        with_mtp=with_mtp,
    )


def start_state(config: HybridConfig, state_config: StateConfig) -> ModelState:
    """Return the state of a fixed batch of empty sequences.

    Raises:
        ValueError: the capacities are not those of `fixed_batch`.
    """
    sc = state_config
    if (sc.num_blocks, sc.num_state_slots) != (
        sc.num_slots * sc.blocks_per_slot,
        1 + SLOTS_OF_ONE * sc.num_slots,
    ):
        raise ValueError("a fixed batch needs the capacities that fixed_batch gives")
    blocks = jnp.arange(sc.num_blocks, dtype=jnp.int32)
    state = init_state(config, sc)
    sequences = dataclasses.replace(
        state.sequences, block_table=blocks.reshape(sc.num_slots, sc.blocks_per_slot)
    )
    return dataclasses.replace(state, sequences=sequences)


def extend(
    model: HybridModel,
    state_config: StateConfig,
    params: Weights,
    state: ModelState,
    ids: Int[Array, "B T"],
    count: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T V"], ModelState]:
    """Give every sequence its next tokens and commit them: prefill, decode and scoring alike.

    Args:
        model: the architecture.
        state_config: capacities; a sequence must not grow beyond its blocks, which nothing checks.
        params: the parameter tree.
        state: what earlier calls left, or `start_state`.
        ids: the tokens, each row padded at its end.
        count: how many of each row are tokens, 0 for a sequence that waits; None if all are.

    Returns:
        The logits of each token, float32, those of the padding arbitrary; and the new state.
    """
    num_slots, width = ids.shape
    if count is None:
        count = jnp.full(num_slots, width, jnp.int32)
    ends = jnp.cumsum(count)
    num_rows = -(-num_slots * width // TILE_ROWS) * TILE_ROWS
    row = jnp.arange(num_rows, dtype=jnp.int32)
    slot = jnp.minimum(jnp.searchsorted(ends, row, side="right"), num_slots - 1)
    packed = ids[slot, jnp.clip(row - (ends - count)[slot], 0, width - 1)]
    call = Call(packed.astype(jnp.int32), count, count, jnp.zeros(num_slots, bool))
    state = with_next_slots(state)
    out, state = logits(model, state_config, params, state, call)
    place = (ends - count)[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    return out[jnp.minimum(place, num_rows - 1)], commit(state, count)


def with_next_slots(state: ModelState) -> ModelState:
    """Return the state with room for each sequence's next seal: the free one of its state slots."""
    sequences = state.sequences
    first = SLOTS_OF_ONE * jnp.arange(sequences.sealed_slot.shape[0], dtype=jnp.int32) + 1
    free = jnp.where(sequences.sealed_slot == first, first + 1, first)
    return dataclasses.replace(state, sequences=dataclasses.replace(sequences, next_slot=free))


def token_log_probabilities(
    logits: Float[Array, "*T V"], tokens: Int[Array, "*T"]
) -> Float[Array, "*T"]:
    """Return log softmax of float32 logits at one token of each row, with the engine's bits."""
    shape, vocab_size = tokens.shape, logits.shape[-1]
    num_rows = tokens.size
    padding = -num_rows % TILE_ROWS
    rows = jnp.pad(logits.reshape(-1, vocab_size), ((0, padding), (0, 0)))
    wanted = jnp.pad(tokens.reshape(-1), (0, padding)).astype(jnp.int32)

    def of_tile(logits: Array, tokens: Array) -> Array:
        return log_probabilities(logits, tokens[:, None])[:, 0]

    out = map_tiles(of_tile, jnp.asarray(num_rows, jnp.int32), rows, wanted)
    return out[:num_rows].reshape(shape)
