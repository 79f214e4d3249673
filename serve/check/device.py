"""What a check does to the decode state on the device: spoil it, and look at it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bits import to_bits
from qwen_hybrid import digest
from qwen_hybrid.digest import Canonical
from qwen_hybrid.state import EMPTY_STATE_SLOT, GdnState
from serve.request import Request
from serve.runner import Runner


def nan_of(array: jax.Array) -> jax.Array:
    """What an array of the state holds for a NaN."""
    return to_bits(jnp.asarray(jnp.nan, jnp.float32), array.dtype)


def _all_nan(state: Any) -> Any:
    def fill(path: Any, array: jax.Array) -> jax.Array:
        if array.dtype == jnp.int32:
            return array
        bad = jnp.full_like(array, nan_of(array))
        is_pool = ".sealed" in jax.tree_util.keystr(path)
        return bad.at[EMPTY_STATE_SLOT].set(array[EMPTY_STATE_SLOT]) if is_pool else bad

    return jax.tree_util.tree_map_with_path(fill, state)


def fill_with_nan(runner: Runner) -> None:
    """Make every row that nobody wrote a NaN, but the state that sequences start from.

    Donates: the state, which a device may not hold twice.
    """
    runner._state = jax.jit(_all_nan, donate_argnums=0)(runner._state)
    runner._draft = jax.jit(_all_nan, donate_argnums=0)(runner._draft)


def spoil(runner: Runner, slot: int) -> None:
    """Make NaN of the last rows that a slot's first convolution looks back to.

    Every later row of the sequence becomes NaN with it.
    """
    layers = list(runner._state.layers)
    index = next(i for i, layer in enumerate(layers) if isinstance(layer.mixer, GdnState))
    mixer = layers[index].mixer
    assert isinstance(mixer, GdnState)
    spoilt = dataclasses.replace(mixer, conv=mixer.conv.at[slot].set(nan_of(mixer.conv)))
    layers[index] = dataclasses.replace(layers[index], mixer=spoilt)
    runner._state = dataclasses.replace(runner._state, layers=tuple(layers))


def committed_state(runner: Runner, request: Request, depth: int) -> Canonical:
    """The canonical arrays of a request at `depth` rows, all of which are committed.

    Its seal is stored, or was for a digest that the runner has just made.
    """
    state, size = runner._state, runner.state_config.block_size
    if request.sealed_len == depth // size * size:
        # Each call says where the slots stand that it computes, and no others.
        state = dataclasses.replace(state, sequences=runner._sequences([request]))
    part = jax.device_get(runner._extract(state, np.asarray(request.slot, np.int32)))
    return digest.canonical(part, depth, runner.config, runner.state_config)
