"""One sequence's state at any depth that its arrays hold, by layer and kind.

The arrays hold more than the committed state: the rows of a window stay where verify wrote them, so
that the state after each of them can be read too.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.gated_delta_net import GdnLog
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.digest import extract
from qwen_hybrid.state import AttentionState, GdnState, ModelState, QsaState, StateConfig
from spec.drift.running_state import running_state, with_sealed

# A layer, or `MODEL` for what belongs to none, and what of its state.
Where = tuple[int, str]
MODEL = -1
RUNNING = "running_state"
SEALED = "recurrent_state"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A sequence's part of every array, on the host.

    Attributes:
      part: what `qwen_hybrid.digest.extract` gives.
    """

    part: ModelState

    @property
    def committed_len(self) -> int:
        """Rows that are final."""
        return int(self.part.sequences.committed_len)

    @property
    def sealed_len(self) -> int:
        """The boundary of the sealed state."""
        return int(self.part.sequences.sealed_len)

    @property
    def sealed(self) -> dict[int, np.ndarray]:
        """The sealed state of each recurrent layer."""
        mixers = enumerate(layer.mixer for layer in self.part.layers)
        found = ((i, mixer) for i, mixer in mixers if isinstance(mixer, GdnState))
        return {i: np.asarray(mixer.log.sealed) for i, mixer in found}


class Reader:
    """Takes snapshots and reads them; its two programs are compiled once."""

    def __init__(self, config: HybridConfig, state_config: StateConfig):
        """Read states of that shape."""
        self._config, self._sc = config, state_config
        self._extract = jax.jit(extract)
        self._running = jax.jit(self._traced_running)

    def _traced_running(
        self, logs: dict[int, GdnLog], sealed_len: Int[Array, ""], depth: Int[Array, ""]
    ) -> dict[int, Array]:
        size = self._sc.block_size
        return {
            i: running_state(log, sealed_len, depth, block_size=size) for i, log in logs.items()
        }

    def snapshot(self, state: ModelState) -> Snapshot:
        """The state of the first slot."""
        return Snapshot(jax.device_get(self._extract(state, jnp.asarray(0, jnp.int32))))

    def parts(
        self, snapshot: Snapshot, depth: int, seal: tuple[int, Mapping[int, Any]] | None = None
    ) -> dict[Where, np.ndarray]:
        """Everything that a next row at `depth` would read.

        Args:
          seal: a boundary and the states sealed there, to read the log from; None for the
            snapshot's own. The log must still hold the rows since.
        """
        boundary, sealed = seal or (snapshot.sealed_len, snapshot.sealed)
        out: dict[Where, np.ndarray] = {}
        logs: dict[int, GdnLog] = {}
        for index, layer in enumerate(snapshot.part.layers):
            found = self._mixer(layer.mixer, boundary, depth)
            if isinstance(layer.mixer, GdnState):
                found = {SEALED: np.asarray(sealed[index])} | found
                logs[index] = with_sealed(layer.mixer.log, sealed[index])
            if layer.ple is not None:
                assert self._config.ple is not None
                window = self._config.ple.conv_window
                found["ple_conv_state"] = _tail(layer.ple, depth, window)
            out |= {(index, kind): array for kind, array in found.items()}
        if snapshot.part.ids is not None:
            assert self._config.ple is not None
            out[MODEL, "ids"] = _tail(snapshot.part.ids, depth, self._config.ple.ngram_size - 1)
        if logs:
            where = jnp.asarray(boundary, jnp.int32), jnp.asarray(depth, jnp.int32)
            states = jax.device_get(self._running(logs, *where))
            out |= {(index, RUNNING): state for index, state in states.items()}
        return out

    def _mixer(self, mixer: Any, boundary: int, depth: int) -> dict[str, np.ndarray]:
        if isinstance(mixer, GdnState):
            window = self._config.gdn.conv_width - 1
            log = _log_rows(mixer.log, boundary, depth)
            return log | {"conv_state": _tail(mixer.conv, depth, window)}
        if isinstance(mixer, QsaState):
            assert self._config.qsa is not None
            ratio = self._config.qsa.ratio
            return _kv(mixer.attention, depth) | {
                "pooled_index_keys": np.asarray(mixer.pooled)[: depth // ratio],
                "pending_index_keys": _tail(mixer.raw, depth, depth % ratio),
            }
        return _kv(mixer, depth)


def _kv(state: AttentionState, depth: int) -> dict[str, np.ndarray]:
    pages = {"key": state.key_pages, "value": state.value_pages}
    return {kind: np.asarray(array)[:depth] for kind, array in pages.items()}


def _log_rows(log: GdnLog, first: int, depth: int) -> dict[str, np.ndarray]:
    arrays = {"key": log.key, "key_scale": log.key_scale, "value": log.value, "gate": log.gate}
    rows = np.arange(first, depth) % log.gate.shape[1]
    axes = {"key": 2, "key_scale": 1, "value": 1, "gate": 1}
    return {
        f"log_{name}": np.moveaxis(np.asarray(array), axes[name], 0)[rows]
        for name, array in arrays.items()
    }


def _tail(ring: Any, depth: int, window: int) -> np.ndarray:
    """The last `window` rows before `depth`, oldest first; fewer at the start of a sequence."""
    array = np.asarray(ring)
    return array[np.arange(max(0, depth - window), depth) % array.shape[0]]
