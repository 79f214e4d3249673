"""One decoder layer: a token mixer and a feed-forward part, each between norm and residual.

Three stages: what each row computes alone before the mixer, the mixer along the sequence, and what
each row computes alone after it. The paged form runs the outer stages in tiles of fixed shape; the
sequence form, differentiable, runs the same functions on whole sequences.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.norm import rms_norm
from pallas_kernels.rows import Rows, map_row_tiles
from pallas_kernels.struct import struct
from qwen_hybrid import attention, gated_delta_net, hyper_connections, qsa
from qwen_hybrid.config import HybridConfig, LayerKind
from qwen_hybrid.layers import Weights, add
from qwen_hybrid.moe import feed_forward, router_logits
from qwen_hybrid.qsa import QsaTrace


@struct
class BlockTrace:
    """What auxiliary losses need of one layer: router outputs and, where sparse, the indexer's."""

    router: Float[Array, "T E"] | None
    qsa: QsaTrace | None


def _open(weights: Weights, part: str, x: Array, config: HybridConfig) -> tuple[Array, Any]:
    """(what the part reads, how its output enters the streams)."""
    if config.hyper_connection is None:
        name = "input_layernorm" if part == "attn" else "post_attention_layernorm"
        return rms_norm(x, weights[name], config.rms_norm_eps), None
    connection = weights[f"{part}_hyper_connection"]
    row, normed = hyper_connections.read(connection, x, config)
    return row, hyper_connections.inject_weights(connection, normed, config)


def _close(x: Array, inject: Array | None, y: Array) -> Array:
    return add(x, y) if inject is None else hyper_connections.inject(x, inject, y)


def _project(weights: Weights, kind: LayerKind, h: Array, position: Array, config: HybridConfig):
    if kind is LayerKind.GDN:
        return gated_delta_net.project(weights["linear_attn"], h)
    module = attention if kind is LayerKind.ATTENTION else qsa
    return module.project(weights["self_attn"], h, position, config)


def _output(weights: Weights, kind: LayerKind, mixed: Array, projection, config: HybridConfig):
    if kind is LayerKind.GDN:
        return gated_delta_net.output(weights["linear_attn"], mixed, projection, config)
    inner = projection if kind is LayerKind.ATTENTION else projection.attention
    return attention.output(weights["self_attn"], mixed, inner)


def _mix_rows(
    weights: Weights, kind: LayerKind, projection, state, rows: Rows, config: HybridConfig
):
    if kind is LayerKind.GDN:
        return gated_delta_net.mix_rows(weights["linear_attn"], projection, state, rows, config)
    if kind is LayerKind.ATTENTION:
        return attention.mix_rows(projection, state, rows, config)
    return qsa.mix_rows(weights["self_attn"], projection, state, rows, config)


def block_rows(
    weights: Weights,
    kind: LayerKind,
    x: Float[Array, "R _"],
    state: Any,
    rows: Rows,
    config: HybridConfig,
) -> tuple[Float[Array, "R _"], Any]:
    """Apply the layer to the packed rows of a call."""

    def before(x: Array, position: Array):
        h, inject = _open(weights, "attn", x, config)
        return _project(weights, kind, h, position, config), inject

    def after(x: Array, projection, inject, mixed: Array, live: Array) -> Array:
        x = _close(x, inject, _output(weights, kind, mixed, projection, config))
        h, inject = _open(weights, "mlp", x, config)
        return _close(x, inject, feed_forward(weights["mlp"], h, live, config, "tiled"))

    projection, inject = map_row_tiles(before, rows, x, rows.position)
    mixed, state = _mix_rows(weights, kind, projection, state, rows, config)
    return map_row_tiles(after, rows, x, projection, inject, mixed, rows.live), state


def _mix_sequence(
    weights: Weights, kind: LayerKind, projection, config: HybridConfig, *, dense: bool, trace: bool
) -> tuple[Array, QsaTrace | None]:
    if kind is LayerKind.GDN:
        return gated_delta_net.mix_sequence(weights["linear_attn"], projection, config), None
    if kind is LayerKind.ATTENTION:
        mask = attention.causal_mask(projection.query.shape[0])
        return attention.mix_sequence(projection, mask, config), None
    scores = qsa.sequence_scores(weights["self_attn"], projection, config)
    mask = attention.causal_mask(scores.shape[0]) if dense else qsa.sequence_mask(scores, config)
    mixed = attention.mix_sequence(projection.attention, mask, config)
    return mixed, qsa.trace(projection, scores, config) if trace else None


def block_sequence(
    weights: Weights,
    kind: LayerKind,
    x: Float[Array, "T _"],
    position: Int[Array, " T"],
    config: HybridConfig,
    *,
    dense: bool,
    trace: bool,
) -> tuple[Float[Array, "T _"], BlockTrace]:
    """Apply the layer to one whole sequence, differentiable.

    Args:
      dense: sparse layers attend to everything (the first phase of training an indexer).
      trace: return what auxiliary losses need.
    """
    h, inject = _open(weights, "attn", x, config)
    projection = _project(weights, kind, h, position, config)
    mixed, qsa_trace = _mix_sequence(weights, kind, projection, config, dense=dense, trace=trace)
    x = _close(x, inject, _output(weights, kind, mixed, projection, config))
    h, inject = _open(weights, "mlp", x, config)
    live = jnp.ones(x.shape[0], bool)
    y = feed_forward(weights["mlp"], h, live, config, "reference")
    router = router_logits(weights["mlp"], h) if trace and config.moe is not None else None
    return _close(x, inject, y), BlockTrace(router, qsa_trace)
