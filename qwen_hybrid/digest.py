"""Committed state of one sequence in canonical form, and its digest.

What a digest covers at depth d: the sealed state at the last block boundary at or below d, log
rows from there to d, the tails of the rings that the next row would read, keys and values, pooled
and pending index keys. Never slot numbers, padding, or rows at or beyond d.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.state import (
    AttentionState,
    GdnState,
    LayerState,
    ModelState,
    QsaState,
    StateConfig,
)

Canonical = dict[str, np.ndarray]


def extract(state: ModelState, slot: Int[Array, ""]) -> ModelState:
    """One slot's part of every array, blocks in logical order; fixed shapes, so one program."""
    table = state.sequences.block_table[slot]
    sealed = state.sequences.sealed_slot[slot]

    def cut(path, array):
        name = jax.tree_util.keystr(path)
        if ".sealed" in name and "sequences" not in name:
            return array[sealed]
        if "_pages" in name:
            row_axis = 3 if ".key_pages" in name else 2
            by_row = jnp.moveaxis(array[table], row_axis, 1)
            return by_row.reshape(-1, *by_row.shape[2:])
        if ".pooled" in name:
            return array[table].reshape(-1, *array.shape[2:])
        return array[slot]

    return jax.tree_util.tree_map_with_path(cut, state)


def _tail(ring: np.ndarray, depth: int, window: int) -> np.ndarray:
    """The last `window` rows before `depth`, oldest first; fewer at the start of a sequence."""
    return ring[np.arange(max(0, depth - window), depth) % ring.shape[0]]


def _gdn(state: GdnState, depth: int, config: HybridConfig, sc: StateConfig) -> Canonical:
    boundary = depth // sc.block_size * sc.block_size
    rows = np.arange(boundary, depth) % state.log.gate.shape[1]
    return {
        "recurrent_state": np.asarray(state.log.sealed),
        "log_key": np.moveaxis(np.asarray(state.log.key), 2, 0)[rows],
        "log_key_scale": np.asarray(state.log.key_scale).T[rows],
        "log_value": np.asarray(state.log.value).swapaxes(0, 1)[rows],
        "log_gate": np.asarray(state.log.gate).T[rows],
        "conv_state": _tail(np.asarray(state.conv), depth, config.gdn.conv_width - 1),
    }


def _attention(state: AttentionState, depth: int) -> Canonical:
    return {
        "key": np.asarray(state.key_pages)[:depth],
        "value": np.asarray(state.value_pages)[:depth],
    }


def _layer(layer: LayerState, depth: int, config: HybridConfig, sc: StateConfig) -> Canonical:
    mixer = layer.mixer
    if isinstance(mixer, GdnState):
        parts = _gdn(mixer, depth, config, sc)
    elif isinstance(mixer, QsaState):
        assert config.qsa is not None
        ratio = config.qsa.ratio
        parts = _attention(mixer.attention, depth)
        parts["pooled_index_keys"] = np.asarray(mixer.pooled)[: depth // ratio]
        parts["pending_index_keys"] = _tail(np.asarray(mixer.raw), depth, depth % ratio)
    else:
        parts = _attention(mixer, depth)
    if layer.ple is not None:
        assert config.ple is not None
        parts["ple_conv_state"] = _tail(np.asarray(layer.ple), depth, config.ple.conv_window)
    return parts


def canonical(part: ModelState, depth: int, config: HybridConfig, sc: StateConfig) -> Canonical:
    """Target state of one sequence by name.

    Args:
      part: what `extract` gave, sealed at the last boundary at or below `depth`.

    Raises:
      ValueError: another boundary is sealed, or fewer rows are committed.
    """
    boundary = depth // sc.block_size * sc.block_size
    committed, sealed = int(part.sequences.committed_len), int(part.sequences.sealed_len)
    if sealed != boundary or committed < depth:
        raise ValueError(
            f"depth {depth} needs the seal at {boundary} and {depth} committed rows, got the seal "
            f"at {sealed} and {committed} rows"
        )
    parts: Canonical = {}
    for index, layer in enumerate(part.layers):
        for name, array in _layer(layer, depth, config, sc).items():
            parts[f"layers.{index}.{name}"] = array
    if part.ids is not None:
        assert config.ple is not None
        parts["ids"] = _tail(np.asarray(part.ids), depth, config.ple.ngram_size - 1)
    return parts


def digests(parts: Canonical) -> dict[str, str]:
    """SHA-256 of every part: name, type, shape and bytes."""
    out = {}
    for name, array in parts.items():
        head = f"{name} {array.dtype} {array.shape}".encode()
        out[name] = hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()
    return out


def combined(by_part: dict[str, str]) -> str:
    """One digest of all parts."""
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(by_part.items()))
    return hashlib.sha256(text.encode()).hexdigest()
