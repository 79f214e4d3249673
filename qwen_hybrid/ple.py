"""Per-layer n-gram embedding: table rows of the last tokens, gated into every stream."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.causal_conv import causal_conv, conv_rows
from pallas_kernels.dense import linear
from pallas_kernels.ngram import check_bounds, ngram_rows
from pallas_kernels.norm import grouped_rms_norm
from pallas_kernels.rows import Rows, map_row_tiles, previous_rows, write_ring
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.layers import Weights, add

GATE_FLOOR = 1e-6


def _hash(tokens: list[Array], position: Array, rank: int, config: HybridConfig) -> Array:
    ple = config.ple
    assert ple is not None
    table = ple.table(rank, config.vocab_size)
    check_bounds(config.vocab_size, table.moduli)
    return ngram_rows(
        tokens,
        position,
        multipliers=table.multipliers,
        moduli=table.moduli,
        offsets=table.offsets,
        heads_per_ngram=ple.heads_per_ngram,
        eos=ple.eos_token_id,
    )


def table_rows(
    ids: Int[Array, " R"], ring: Int[Array, "B N"], rows: Rows, rank: int, config: HybridConfig
) -> Int[Array, "R heads"]:
    """Rows of the table of the PLE layer with this rank, for each new token."""
    assert config.ple is not None
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    back = range(1, config.ple.ngram_size)
    before = [previous_rows(ids, ring, rows, index, n) for n in back]
    return _hash([ids, *before], rows.position, rank, config)


def sequence_table_rows(
    ids: Int[Array, " T"], rank: int, config: HybridConfig
) -> Int[Array, "T heads"]:
    """The same for one whole sequence."""
    assert config.ple is not None
    before = [jnp.pad(ids, (n, 0))[: ids.shape[0]] for n in range(1, config.ple.ngram_size)]
    return _hash([ids, *before], jnp.arange(ids.shape[0], dtype=jnp.int32), rank, config)


def gated_value(
    weights: Weights, streams: Float[Array, "T ND"], at: Int[Array, "T heads"], config: HybridConfig
) -> tuple[Float[Array, "T ND"], Float[Array, "T ND"]]:
    """(gated value of each stream, the same normalised: the convolution's input)."""
    assert config.hyper_connection is not None
    count, eps, dtype = config.hyper_connection.count, config.rms_norm_eps, streams.dtype
    embedded = weights["ngram_embedding"][at].reshape(at.shape[0], -1).astype(dtype)

    def normed(x: Array, name: str) -> Array:
        return grouped_rms_norm(x, weights[name], count, eps)

    key = normed(linear(embedded, weights["key_proj"]), "norm_key").astype(jnp.float32)
    value = linear(embedded, weights["value_proj"]).astype(jnp.float32)
    query = normed(streams, "norm_query").astype(jnp.float32)
    by_stream = (streams.shape[0], count, -1)
    score = jnp.sum((key * query).reshape(by_stream), axis=-1) / value.shape[1] ** 0.5
    score = jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), GATE_FLOOR))
    gate = jax.nn.sigmoid(score)
    gated = (gate[:, :, None] * value[:, None, :]).reshape(streams.shape).astype(dtype)
    return gated, normed(gated, "norm_conv")


def _finish(streams: Array, gated: Array, convolved: Array) -> Array:
    active = jax.nn.silu(convolved.astype(streams.dtype).astype(jnp.float32))
    return add(streams, add(gated, active.astype(streams.dtype)))


def add_rows(
    weights: Weights,
    streams: Float[Array, "R ND"],
    at: Int[Array, "R heads"],
    ring: Shaped[Array, "B N ND"],
    rows: Rows,
    config: HybridConfig,
) -> tuple[Float[Array, "R ND"], Shaped[Array, "B N ND"]]:
    """Add the embedding of each new row to its streams."""
    assert config.ple is not None
    dilation = config.ple.ngram_size

    def embed(x: Array, at: Array) -> tuple[Array, Array]:
        return gated_value(weights, x, at, config)

    gated, normed = map_row_tiles(embed, rows, streams, at)

    def convolve(row: Array, x: Array, gated: Array) -> Array:
        y = conv_rows(normed, ring, weights["conv1d"], rows, row, dilation=dilation)
        return _finish(x, gated, y)

    index = jnp.arange(rows.slot.shape[0], dtype=jnp.int32)
    out = map_row_tiles(convolve, rows, index, streams, gated)
    return out, write_ring(ring, normed, rows)


def add_sequence(
    weights: Weights, streams: Float[Array, "T ND"], at: Int[Array, "T heads"], config: HybridConfig
) -> Float[Array, "T ND"]:
    """The same for one whole sequence, differentiable."""
    ple = config.ple
    assert ple is not None
    gated, normed = gated_value(weights, streams, at, config)
    tail = jnp.zeros((ple.conv_window, streams.shape[1]), jnp.float32)
    convolved = causal_conv(
        normed.astype(jnp.float32), weights["conv1d"], dilation=ple.ngram_size, tail=tail
    )
    return _finish(streams, gated, convolved)
