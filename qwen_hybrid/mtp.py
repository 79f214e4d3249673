"""Multi-token prediction head: one attention layer over (next token, target hidden) pairs.

Row i takes token i + 1 and the target's hidden row i, and predicts token i + 2. Its position is i.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dense import dense, linear
from pallas_kernels.norm import rms_norm
from pallas_kernels.rows import Rows, map_row_tiles
from qwen_hybrid import hyper_connections
from qwen_hybrid.block import BlockTrace, block_rows, block_sequence
from qwen_hybrid.config import HybridConfig, LayerKind
from qwen_hybrid.layers import Weights, add, declare
from qwen_hybrid.params import mtp_specs
from qwen_hybrid.state import LayerState


def _join(
    weights: Weights,
    embedded: Float[Array, "T D"],
    hidden: Float[Array, "T _"],
    config: HybridConfig,
) -> Float[Array, "T _"]:
    """Input of the layer, from the next token's embedding and the target's (or own) hidden row."""
    eps = config.rms_norm_eps
    e = rms_norm(embedded, weights["pre_fc_norm_embedding"], eps)
    # One norm over all streams, unlike the hyper-connections'.
    h = rms_norm(hidden, weights["pre_fc_norm_hidden"], eps)
    if config.hyper_connection is None:
        return linear(jnp.concatenate((e, h), axis=-1), weights["fc"])
    count = config.hyper_connection.count
    per_stream = dense(h.reshape(-1, config.hidden_size), weights["fc_hidden"]).astype(h.dtype)
    spread = hyper_connections.spread(linear(e, weights["fc_embedding"]), config)
    return add(spread, per_stream.reshape(-1, count * config.hidden_size))


class MtpHead(nn.Module):
    """MTP head of either family.

    Attributes:
      config: architecture; it must have an MTP layer.
      dtype: activation dtype.
    """

    config: HybridConfig
    dtype: str

    def setup(self) -> None:
        self.weights = declare(self, mtp_specs(self.config), self.dtype)

    @property
    def kind(self) -> LayerKind:
        """The attention of its layer."""
        return LayerKind.QSA if self.config.hyper_connection else LayerKind.ATTENTION

    def __call__(
        self,
        embedded: Float[Array, "R D"],
        hidden: Float[Array, "R _"],
        state: LayerState,
        rows: Rows,
    ) -> tuple[Float[Array, "R _"], LayerState]:
        """Apply the head to the packed rows of a call.

        Args:
          embedded: embeddings of the tokens after each row.
          hidden: target hidden rows, or this method's own output for self-fed steps: after the
            final norm in qwen3_5, the streams before the output mixer in qwen4_exp.

        Returns:
          Recurrent rows for `predict` and for the next self-fed step, and the state.
        """

        def join(e: Array, h: Array) -> Array:
            return _join(self.weights, e, h, self.config)

        x = map_row_tiles(join, rows, embedded, hidden)
        layer = self.weights["layers_0"]
        x, mixer = block_rows(layer, self.kind, x, state.mixer, rows, self.config)
        if self.config.hyper_connection is None:
            x = map_row_tiles(self._final_norm, rows, x)
        return x, LayerState(mixer, None)

    def sequence(
        self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T _"]
    ) -> tuple[Float[Array, "B T _"], BlockTrace]:
        """The same over whole sequences, differentiable, with the trace of its layer."""
        layer, config = self.weights["layers_0"], self.config
        position = jnp.arange(embedded.shape[1], dtype=jnp.int32)

        def one(e: Array, h: Array) -> tuple[Array, BlockTrace]:
            x = _join(self.weights, e, h, config)
            x, trace = block_sequence(
                layer, self.kind, x, position, config, dense=False, trace=True
            )
            return (self._final_norm(x) if config.hyper_connection is None else x), trace

        return jax.vmap(one)(embedded, hidden)

    def _final_norm(self, x: Array) -> Array:
        return rms_norm(x, self.weights["norm"], self.config.rms_norm_eps)

    def predict(self, recurrent: Float[Array, "T _"]) -> Float[Array, "T D"]:
        """What the target's head reads, row by row."""
        if self.config.hyper_connection is None:
            return recurrent
        mixer = self.weights["hyper_connection_mixer"]
        return hyper_connections.read(mixer, recurrent, self.config)[0]
