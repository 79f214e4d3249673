"""Watches which tokens the paged model's sparse layers choose, without a hook in the model."""

import jax
import numpy as np
import pytest
from jaxtyping import Bool

from pallas_kernels.qsa import Selection
from pallas_kernels.rows import Rows
from qwen_hybrid import qsa
from qwen_hybrid.config import HybridConfig, LayerKind


class SelectionRecorder:
    """Records the selection of every QSA layer of the models traced while it is installed.

    Only one model at a time: a layer is recognised by the order in which layers are traced.
    """

    def __init__(self, config: HybridConfig) -> None:
        kinds = enumerate(config.layer_kinds)
        self._layers = [layer for layer, kind in kinds if kind is LayerKind.QSA]
        self._num_traced = 0
        self._chosen: dict[tuple[int, int], np.ndarray] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wrap the function through which sparse layers choose."""
        select_tokens = qsa.select_tokens

        def recording(*args, **kwargs) -> Selection:
            selection = select_tokens(*args, **kwargs)
            layer = self._layers[self._num_traced % len(self._layers)]
            self._num_traced += 1
            rows: Rows = args[2]

            def record(selection: Selection, position, live) -> None:
                for row in np.flatnonzero(live):
                    kept = np.asarray(selection.position[row, : selection.count[row]])
                    self._chosen[layer, int(position[row])] = kept

            jax.debug.callback(record, selection, rows.position, rows.live)
            return selection

        monkeypatch.setattr(qsa, "select_tokens", recording)

    def take(self, num_tokens: int) -> dict[int, Bool[np.ndarray, "T T"]]:
        """Return, for each QSA layer index, the tokens each query attended to; start afresh."""
        jax.effects_barrier()
        chosen, self._chosen = self._chosen, {}
        masks = {layer: np.zeros((num_tokens, num_tokens), bool) for layer in self._layers}
        for (layer, position), kept in chosen.items():
            assert len(set(kept.tolist())) == len(kept), "a token was packed twice"
            masks[layer][position, kept] = True
        return masks
