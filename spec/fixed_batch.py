"""Speculative decoding of a batch that stays as it is, for experiments under jit.

state = start(config, batch, drafter)                        # batch: `qwen_hybrid.fixed_batch`
call, reads = round_call(batch, ids, count, num_drafts)      # any number of times
output, state = step(target, drafter, ready(state), call, reads, parameters)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.rows import TILE_ROWS
from pallas_kernels.sampling import Penalties, Sampling, history_spec
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.fixed_batch import start_state, with_next_slots
from qwen_hybrid.state import StateConfig
from qwen_hybrid.step import Reads, SlotParameters, Wanted
from spec.drafter import AbstractDrafter
from spec.state import SpecCall, SpecState


def start(config: HybridConfig, state_config: StateConfig, drafter: AbstractDrafter) -> SpecState:
    """The state of a fixed batch of empty sequences and of their drafter."""
    history = history_spec(state_config.num_slots, config.vocab_size)
    specs = (history, drafter.state_spec(state_config))
    history, draft = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), specs)
    return SpecState(start_state(config, state_config), history, draft)


def ready(state: SpecState) -> SpecState:
    """The state with room for each sequence's next seal, as every step needs it."""
    return dataclasses.replace(state, model=with_next_slots(state.model))


def round_call(
    state_config: StateConfig, ids: Int[Array, "B T"], count: Int[Array, " B"], num_drafts: int
) -> tuple[SpecCall, Reads]:
    """The call that takes in each sequence's next tokens and goes on from the last one.

    Args:
      ids: certain tokens, each row padded at its end: a prompt, later the newest token.
      count: how many of each row are tokens, at least 1.
      num_drafts: of the drafter.
    """
    num_slots, width = ids.shape
    num_rows = -(-num_slots * (width + num_drafts) // TILE_ROWS) * TILE_ROWS
    ends = jnp.cumsum(count)
    index = jnp.arange(num_rows, dtype=jnp.int32)
    slot = jnp.minimum(jnp.searchsorted(ends, index, side="right"), num_slots - 1)
    packed = ids[slot, jnp.clip(index - (ends - count)[slot], 0, width - 1)]
    full = jnp.full(num_slots, num_drafts, jnp.int32)
    none = jnp.zeros(num_slots, jnp.int32)
    call = SpecCall(
        ids=packed,
        count=count,
        seal_only=jnp.zeros(num_slots, bool),
        next_id=none - 1,
        max_drafts=full,
        drafts=jnp.zeros((num_slots, num_drafts), jnp.int32),
        num_drafts=none,
        max_accepted=full,
        min_accepted=none,
    )
    last = jnp.zeros(num_rows, jnp.int32).at[:num_slots].set(ends - 1)
    reads = Reads(
        row=last, target=jnp.full(num_rows, -1, jnp.int32), count=jnp.asarray(num_slots, jnp.int32)
    )
    return call, reads


def parameters(num_slots: int, *, temperature: float = 0.0, seed: int = 0) -> SlotParameters:
    """The same sampling for every sequence, without filters, penalties or log-probabilities.

    Args:
      seed: of the noise; sequence i has seed + i.
    """

    def of(value: float, dtype: Any) -> Array:
        return jnp.full(num_slots, value, dtype)

    words = jnp.stack([of(0, jnp.uint32), seed + jnp.arange(num_slots, dtype=jnp.uint32)], axis=1)
    sampling = Sampling(
        temperature=of(temperature, jnp.float32),
        top_k=of(0, jnp.int32),
        top_p=of(1.0, jnp.float32),
        min_p=of(0.0, jnp.float32),
        seed=words,
    )
    penalties = Penalties(
        repetition=of(1.0, jnp.float32),
        frequency=of(0.0, jnp.float32),
        presence=of(0.0, jnp.float32),
        min_len=of(0, jnp.int32),
        in_use=of(False, jnp.bool_),
    )
    wanted = Wanted(
        any=of(False, jnp.bool_),
        top=of(False, jnp.bool_),
        token_ids=jnp.zeros((num_slots, 1), jnp.int32),
    )
    return SlotParameters(sampling, penalties, wanted)
