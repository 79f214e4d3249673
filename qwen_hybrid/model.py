"""The hybrid decoder: rows in, rows out, with the state passed through."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dense import dense
from pallas_kernels.norm import rms_norm
from pallas_kernels.rows import Rows, map_row_tiles, write_ring
from pallas_kernels.struct import struct
from qwen_hybrid import hyper_connections, ple
from qwen_hybrid.block import BlockTrace, block_rows, block_sequence
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.layer_config import check
from qwen_hybrid.layers import declare
from qwen_hybrid.mtp import MtpHead
from qwen_hybrid.params import layer_specs, model_specs
from qwen_hybrid.state import Call, LayerState, ModelState, StateConfig, apply_seals, plan


class DecoderLayer(nn.Module):
    """One decoder layer.

    Attributes:
      config: architecture.
      index: which layer.
      dtype: activation dtype.
    """

    config: HybridConfig
    index: int
    dtype: str

    def setup(self) -> None:
        self.weights = declare(self, layer_specs(self.config, self.index), self.dtype)

    @property
    def ple_rank(self) -> int | None:
        """Rank of this layer among those with an n-gram embedding."""
        layers = self.config.ple.layers if self.config.ple else ()
        return layers.index(self.index) if self.index in layers else None

    def __call__(
        self,
        x: Float[Array, "R _"],
        state: LayerState,
        rows: Rows,
        ids: Int[Array, " R"],
        id_ring: Int[Array, "B N"] | None,
    ) -> tuple[Float[Array, "R _"], LayerState]:
        """Apply the layer to the packed rows of a call."""
        ring = state.ple
        if self.ple_rank is not None:
            assert ring is not None and id_ring is not None
            at = ple.table_rows(ids, id_ring, rows, self.ple_rank, self.config)
            x, ring = ple.add_rows(self.weights["ple"], x, at, ring, rows, self.config)
        kind = self.config.layer_kinds[self.index]
        x, mixer = block_rows(self.weights, kind, x, state.mixer, rows, self.config)
        return x, LayerState(mixer, ring)

    def sequence(
        self, x: Float[Array, "T _"], ids: Int[Array, " T"], *, dense: bool, trace: bool
    ) -> tuple[Float[Array, "T _"], BlockTrace]:
        """Apply the layer to one whole sequence."""
        if self.ple_rank is not None:
            at = ple.sequence_table_rows(ids, self.ple_rank, self.config)
            x = ple.add_sequence(self.weights["ple"], x, at, self.config)
        position = jnp.arange(ids.shape[0], dtype=jnp.int32)
        kind = self.config.layer_kinds[self.index]
        return block_sequence(
            self.weights, kind, x, position, self.config, dense=dense, trace=trace
        )


@struct
class SequenceOutput:
    """Whole sequences, differentiable.

    Attributes:
      logits: float32.
      hidden: what the head reads.
      residual: rows before the last norm or mixer (all streams in qwen4_exp).
      traces: per layer, what auxiliary losses need, if asked for.
      taps: the residual rows after each of `HybridModel.tap_layers`, concatenated; None without.
    """

    logits: Float[Array, "*B T V"]
    hidden: Float[Array, "*B T D"]
    residual: Float[Array, "*B T _"]
    traces: tuple[BlockTrace, ...]
    taps: Float[Array, "*B T _"] | None


class HybridModel(nn.Module):
    """Text model of any of the three families.

    `__call__` is the paged form in the canonical order; `sequence` the differentiable reference.

    Attributes:
      config: architecture.
      dtype: activation dtype.
      tap_layers: layers whose residual rows are returned too, ascending; -1 is the embedding. Of
        several streams it is their mean.
    """

    config: HybridConfig
    dtype: str = "float32"
    tap_layers: tuple[int, ...] = ()

    def setup(self) -> None:
        config = self.config
        check(
            list(self.tap_layers) == sorted({*self.tap_layers} & {*range(-1, config.num_layers)}),
            "tap_layers must ascend from -1 (the embedding) to the last layer",
            tap_layers=self.tap_layers,
            num_layers=config.num_layers,
        )
        specs = model_specs(config)
        top = {k: v for k, v in specs.items() if not k.startswith("layers_") and k != "mtp"}
        self.top = declare(self, top, self.dtype)
        self.layers = [DecoderLayer(config, i, self.dtype) for i in range(config.num_layers)]
        if config.num_mtp_layers:
            self.mtp = MtpHead(config, self.dtype)

    def embed(self, ids: Int[Array, "*T"]) -> Float[Array, "*T D"]:
        """Embedding rows in the activation dtype."""
        return self.top["embed_tokens"][ids].astype(self.dtype)

    def __call__(
        self, call: Call, state: ModelState, state_config: StateConfig
    ) -> tuple[Float[Array, "R _"], Rows, ModelState, Float[Array, "R _"] | None]:
        """Compute the rows of a call: prefill, decode and verify alike.

        Rows are written beyond each slot's committed length, which does not change: `commit`
        moves it. Due seals are stored first.

        Returns:
          Rows before the last norm or mixer, how they are laid out, the new state, and the rows
          of `tap_layers` side by side (None without).
        """
        rows, seals = plan(call, state.sequences, state_config)
        x = map_row_tiles(self._start, rows, call.ids)
        layers, outputs = [], [x]
        for layer, entry in zip(self.layers, state.layers, strict=True):
            x, entry = layer(x, entry, rows, call.ids, state.ids)
            layers.append(entry)
            outputs.append(x)
        taps = self._tapped(outputs)
        ids = None if state.ids is None else write_ring(state.ids, call.ids, rows)
        sequences = apply_seals(state.sequences, seals)
        state = dataclasses.replace(state, sequences=sequences, layers=tuple(layers), ids=ids)
        return x, rows, state, map_row_tiles(self._side_by_side, rows, *taps) if taps else None

    def _start(self, ids: Array) -> Array:
        x = self.embed(ids)
        return (
            x if self.config.hyper_connection is None else hyper_connections.spread(x, self.config)
        )

    def _tapped(self, outputs: list[Array]) -> list[Array]:
        """Choose among the embedding and what each layer gave."""
        return [outputs[1 + layer] for layer in self.tap_layers]

    def _side_by_side(self, *taps: Array) -> Array:
        """Residual rows as drafters read them: of several streams the mean."""
        if self.config.hyper_connection is not None:
            taps = tuple(hyper_connections.mean(x, self.config) for x in taps)
        return jnp.concatenate(taps, axis=-1)

    def final(self, x: Float[Array, "T _"]) -> Float[Array, "T D"]:
        """What the head reads, row by row: the last norm, or the output mixer."""
        if self.config.hyper_connection is None:
            return rms_norm(x, self.top["norm"], self.config.rms_norm_eps)
        return hyper_connections.read(self.top["hyper_connection_mixer"], x, self.config)[0]

    def head(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """Logits in float32, row by row."""
        tied = self.config.tie_word_embeddings
        return dense(hidden, self.top["embed_tokens" if tied else "lm_head"])

    def sequence(
        self, ids: Int[Array, "B T"], *, dense_attention: bool = False, trace: bool = False
    ) -> SequenceOutput:
        """Whole sequences from position 0, differentiable.

        Args:
          dense_attention: sparse layers attend to everything.
          trace: return what auxiliary losses need.
        """

        def one(ids: Array) -> SequenceOutput:
            x, traces = self._start(ids), []
            outputs = [x]
            for layer in self.layers:
                x, entry = layer.sequence(x, ids, dense=dense_attention, trace=trace)
                traces.append(entry)
                outputs.append(x)
            hidden = self.final(x)
            taps = self._side_by_side(*self._tapped(outputs)) if self.tap_layers else None
            return SequenceOutput(self.head(hidden), hidden, x, tuple(traces), taps)

        return jax.vmap(one)(ids)

    def mtp_sequence(
        self, next_ids: Int[Array, "B T"], hidden: Float[Array, "B T _"]
    ) -> tuple[Float[Array, "B T V"], Float[Array, "B T _"], BlockTrace]:
        """One step of the MTP head over whole sequences: (logits, recurrent rows, trace)."""
        recurrent, trace = self.mtp.sequence(self.embed(next_ids), hidden)
        return jax.vmap(lambda r: self.head(self.mtp.predict(r)))(recurrent), recurrent, trace

    def init_all(self, ids: Int[Array, "B T"]) -> None:
        """Touch every parameter, for `init`."""
        out = self.sequence(ids)
        if self.config.num_mtp_layers:
            hidden = out.residual if self.config.hyper_connection else out.hidden
            self.mtp_sequence(ids, hidden)
