"""Decoder layers that can make faults.

The Gated DeltaNet layer is written out once more, from the same functions where they are whole, so
that each stage may be another engine's. With no fault chosen it gives the bits of the layer it
stands for, which a test holds it to.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.causal_conv import conv_rows
from pallas_kernels.dense import InputMajor, dense
from pallas_kernels.gated_delta_net import LogInputs, log_step
from pallas_kernels.norm import rms_norm
from pallas_kernels.rows import Rows, map_row_tiles, previous_rows, write_ring
from qwen_hybrid import gated_delta_net, hyper_connections, ple
from qwen_hybrid.config import HybridConfig, LayerKind
from qwen_hybrid.gated_delta_net import GdnProjection
from qwen_hybrid.layers import Weights, add
from qwen_hybrid.model import DecoderLayer
from qwen_hybrid.moe import feed_forward
from qwen_hybrid.state import GdnState, LayerState, QsaState
from spec.drift.faults import Fault, Faults
from spec.drift.rings import overwritten
from spec.drift.running_state import running_state, with_sealed

L2_EPS = 1e-6


def faulty_layers(faults: Faults) -> Callable[..., Any]:
    """An interceptor for `flax.linen.intercept_methods`: layers of a model make the faults."""

    def interceptor(
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        layer = context.module
        if not isinstance(layer, DecoderLayer) or context.method_name != "__call__":
            return method(*args, **kwargs)
        kind = layer.config.layer_kinds[layer.index]
        if kind is LayerKind.GDN:
            return _gdn_layer(layer, *args, faults=faults)
        if kind is LayerKind.QSA and Fault.RING_OVERWRITE in faults.known:
            return _qsa_layer(method, *args, faults=faults)
        return method(*args, **kwargs)

    return interceptor


def _qsa_layer(
    method: Callable[..., Any],
    x: Array,
    state: LayerState,
    rows: Rows,
    *rest: Any,
    faults: Faults,
) -> tuple[Array, LayerState]:
    """Sparse attention whose raw keys are stored before the pending ones are pooled.

    The first pass tells the raw keys of the new rows; the second finds those that a ring of as
    many rows as a group has would have kept of the pending ones.
    """
    assert isinstance(state.mixer, QsaState)
    before = state.mixer.raw
    _, after = method(x, state, rows, *rest)
    assert isinstance(after.mixer, QsaState)
    ratio = rows.block_size // state.mixer.pooled.shape[1]
    spoiled = overwritten(
        after.mixer.raw, end=rows.start, last=rows.start + rows.count - 1, size=ratio
    )
    raw = faults.pick(Fault.RING_OVERWRITE, lambda: spoiled, lambda: before)
    mixer = QsaState(state.mixer.attention, state.mixer.pooled, raw)
    return method(x, LayerState(mixer, state.ple), rows, *rest)


def _gdn_layer(
    layer: DecoderLayer,
    x: Float[Array, "R _"],
    state: LayerState,
    rows: Rows,
    ids: Array,
    id_ring: Array | None,
    *,
    faults: Faults,
) -> tuple[Float[Array, "R _"], LayerState]:
    """A Gated DeltaNet layer, n-gram embedding and all."""
    weights, config, ring = layer.weights, layer.config, state.ple
    if layer.ple_rank is not None:
        assert ring is not None and id_ring is not None
        at = ple.table_rows(ids, id_ring, rows, layer.ple_rank, config)
        x, ring = ple.add_rows(weights["ple"], x, at, ring, rows, config)
    assert isinstance(state.mixer, GdnState)
    own = weights["linear_attn"]

    def before(x: Array) -> tuple[GdnProjection, Any]:
        h, inject = _open(weights, "attn", x, config)
        return _project(own, h, rows, faults), inject

    def after(x: Array, projection: GdnProjection, inject: Any, mixed: Array, live: Array) -> Array:
        x = _close(x, inject, gated_delta_net.output(own, mixed, projection, config))
        h, inject = _open(weights, "mlp", x, config)
        return _close(x, inject, feed_forward(weights["mlp"], h, live, config, "tiled"))

    projection, inject = map_row_tiles(before, rows, x)
    mixed, mixer = _mix_rows(own, projection, state.mixer, rows, config, faults=faults)
    x = map_row_tiles(after, rows, x, projection, inject, mixed, rows.live)
    return x, LayerState(mixer, ring)


def _open(weights: Weights, part: str, x: Array, config: HybridConfig) -> tuple[Array, Any]:
    if config.hyper_connection is None:
        name = "input_layernorm" if part == "attn" else "post_attention_layernorm"
        return rms_norm(x, weights[name], config.rms_norm_eps), None
    connection = weights[f"{part}_hyper_connection"]
    row, normed = hyper_connections.read(connection, x, config)
    return row, hyper_connections.inject_weights(connection, normed, config)


def _close(x: Array, inject: Array | None, y: Array) -> Array:
    return add(x, y) if inject is None else hyper_connections.inject(x, inject, y)


def _project(weights: Weights, h: Array, rows: Rows, faults: Faults) -> GdnProjection:
    """The projections; with many rows, that to queries, keys and values may be split."""
    right = gated_delta_net.project(weights, h)

    def split() -> Array:
        array, half = weights["in_proj_qkv"].array, h.shape[1] // 2
        halves = (h[:, :half], array[:half]), (h[:, half:], array[half:])
        low, high = (dense(x, InputMajor(w)) for x, w in halves)
        return jnp.where(rows.num_rows > 1, (low + high).astype(h.dtype), right.qkv)

    qkv = faults.pick(Fault.SPLIT_BY_ROWS, split, lambda: right.qkv)
    return GdnProjection(qkv, right.z, right.b, right.a)


def _mix_rows(
    weights: Weights,
    projection: GdnProjection,
    state: GdnState,
    rows: Rows,
    config: HybridConfig,
    *,
    faults: Faults,
) -> tuple[Float[Array, "R Hv dv"], GdnState]:
    index = jnp.arange(rows.slot.shape[0], dtype=jnp.int32)

    def convolve(row: Array, own: GdnProjection) -> dict[str, Array]:
        taps = (projection.qkv, state.conv, weights["conv1d"], rows, row)
        mixed = faults.pick(Fault.CONV_TAPS, lambda: _newest_first(*taps), lambda: conv_rows(*taps))
        query, key, value = _split(mixed, projection.qkv.dtype, config)
        gate, beta = _gates(weights, own, faults)
        return {"query": query, "key": key, "value": value, "gate": gate, "beta": beta}

    made = map_row_tiles(convolve, rows, index, projection)
    inputs = map_row_tiles(lambda new: _log_inputs(new, faults), rows, made)
    inputs, missing = _with_rounded_state(inputs, state, rows, faults)
    out, log = log_step(inputs, state.log, rows)
    out = faults.pick(Fault.STATE_ROUNDING, lambda: out + missing, lambda: out)
    return out, GdnState(write_ring(state.conv, projection.qkv, rows), log)


def _newest_first(x: Array, ring: Array, weight: Array, rows: Rows, row: Array) -> Array:
    """The convolution, its taps added in the other order."""
    total = jnp.zeros((row.shape[0], x.shape[1]), jnp.float32)
    for offset in range(weight.shape[1]):
        value = previous_rows(x, ring, rows, row, offset).astype(jnp.float32)
        total = total + value * weight[:, -1 - offset].astype(jnp.float32)[None, :]
    return total


def _split(mixed: Array, dtype: Any, config: HybridConfig) -> tuple[Array, Array, Array]:
    gdn = config.gdn
    active = jax.nn.silu(mixed.astype(dtype).astype(jnp.float32)).astype(dtype)
    q, k, v = jnp.split(active, (gdn.key_width, 2 * gdn.key_width), axis=-1)
    keys = (-1, gdn.num_key_heads, gdn.key_dim)
    return q.reshape(keys), k.reshape(keys), v.reshape(-1, gdn.num_value_heads, gdn.value_dim)


def _gates(weights: Weights, projection: GdnProjection, faults: Faults) -> tuple[Array, Array]:
    """(log-gate, beta); the fault rounds beta where the engine does not, and the other way."""
    a = projection.a.astype(jnp.float32) + weights["dt_bias"].astype(jnp.float32)[None, :]
    softplus = jnp.where(a > 20.0, a, jnp.log1p(jnp.exp(jnp.minimum(a, 20.0))))
    gate = -jnp.exp(weights["A_log"].astype(jnp.float32))[None, :] * softplus
    exact = jax.nn.sigmoid(projection.b.astype(jnp.float32))
    rounded = exact.astype(jnp.bfloat16).astype(jnp.float32)
    right, wrong = exact, rounded
    if projection.b.dtype == jnp.bfloat16:
        right, wrong = rounded, exact
    return gate, faults.pick(Fault.BETA_ROUNDING, lambda: wrong, lambda: right)


def _log_inputs(new: dict[str, Array], faults: Faults) -> LogInputs:
    """Rows for the log, all in float32."""
    made = LogInputs.of(**new)
    wide = {name: new[name].astype(jnp.float32) for name in ("query", "key", "value")}
    query, key = (
        faults.pick(Fault.L2NORM_FORM, lambda x=x, r=r: _divided(x, r), lambda x=x: x)
        for x, r in ((wide["query"], made.query_scale), (wide["key"], made.key_scale))
    )
    return LogInputs(
        query, key, made.query_scale, made.key_scale, wide["value"], made.gate, made.beta
    )


def _divided(x: Float[Array, "T H D"], scale: Float[Array, "T H"]) -> Array:
    """Rows whose product with `scale` is x / sqrt(s + eps), to the last bit or nearly."""
    length = jnp.sqrt(jnp.sum(x * x, axis=-1) + L2_EPS)
    # A compiler makes a product of a division by a root that it can see.
    length = jnp.where(length == length, length, jnp.inf)
    return x / length[:, :, None] / scale[:, :, None]


def _with_rounded_state(
    inputs: LogInputs, state: GdnState, rows: Rows, faults: Faults
) -> tuple[LogInputs, Array]:
    """(rows that make of the exact state what they would of a rounded one, what outputs miss).

    With D the error of rounding the state before the call, the state holds exp(g) D^T k more for
    a row at a distance g of log-gates, which its value is made to lack.
    """
    if Fault.STATE_ROUNDING not in faults.known:
        return inputs, jnp.zeros((), jnp.float32)

    def error(slot: Array) -> Array:
        log = jax.tree.map(lambda a: a[slot], state.log)
        log = with_sealed(log, state.log.sealed[rows.sealed_slot[slot]])
        where = rows.sealed_len[slot], rows.start[slot]
        exact = running_state(log, *where, block_size=rows.block_size)
        return exact.astype(jnp.bfloat16).astype(jnp.float32) - exact

    errors = jnp.stack([error(jnp.asarray(slot)) for slot in range(rows.start.shape[0])])
    before = (jnp.cumsum(inputs.gate, axis=0) - inputs.gate)[rows.row_start[rows.slot]]
    decay = jnp.exp(jnp.cumsum(inputs.gate, axis=0) - before)[:, :, None]

    def read(x: Array, scale: Array) -> Array:
        unit = jnp.repeat(x * scale[:, :, None], inputs.value.shape[1] // x.shape[1], axis=1)
        return decay * jnp.einsum("rhk,rhkv->rhv", unit, errors[rows.slot])

    lacking = inputs.value - read(inputs.key, inputs.key_scale)
    value = faults.pick(Fault.STATE_ROUNDING, lambda: lacking, lambda: inputs.value)
    missing = read(inputs.query, inputs.query_scale) * inputs.query.shape[-1] ** -0.5
    changed = LogInputs(
        inputs.query,
        inputs.key,
        inputs.query_scale,
        inputs.key_scale,
        value,
        inputs.gate,
        inputs.beta,
    )
    return changed, missing
