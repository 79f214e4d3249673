"""What rings without rows to spare would hold after a verify step."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.state import GdnState, ModelState, QsaState


def overwritten(
    ring: Shaped[Array, "B N ..."], *, end: Int[Array, " B"], last: Int[Array, " B"], size: int
) -> Shaped[Array, "B N ..."]:
    """The rows before `end` as they would be read from a ring of `size` rows.

    There, position p has the place of p + size, p + 2 size, and so on up to `last`, the newest row
    written.
    """
    position = end[:, None] - 1 - jnp.arange(size, dtype=jnp.int32)[None, :]
    newest = position + (last[:, None] - position) // size * size
    slot = jnp.arange(ring.shape[0])[:, None]
    values = ring[slot, jnp.maximum(newest, 0) % ring.shape[1]]
    lost = (position >= 0) & (newest > position)
    return ring.at[jnp.where(lost, slot, ring.shape[0]), position % ring.shape[1]].set(
        values, mode="drop"
    )


def with_short_rings(state: ModelState, last: Int[Array, " B"], config: HybridConfig) -> ModelState:
    """A state after a commit, had the rows of its rings no more room than their readers need."""
    end = state.sequences.committed_len

    def short(ring: Array, size: int) -> Array:
        return overwritten(ring, end=end, last=last, size=size)

    layers = []
    for layer in state.layers:
        mixer, ple = layer.mixer, layer.ple
        if isinstance(mixer, GdnState):
            mixer = GdnState(short(mixer.conv, config.gdn.conv_width - 1), mixer.log)
        elif isinstance(mixer, QsaState):
            assert config.qsa is not None
            raw = short(mixer.raw, config.qsa.ratio)
            mixer = dataclasses.replace(mixer, raw=raw)
        if ple is not None:
            assert config.ple is not None
            ple = short(ple, config.ple.conv_window)
        layers.append(dataclasses.replace(layer, mixer=mixer, ple=ple))
    ids = state.ids
    if ids is not None:
        assert config.ple is not None
        ids = short(ids, config.ple.ngram_size - 1)
    return dataclasses.replace(state, layers=tuple(layers), ids=ids)
