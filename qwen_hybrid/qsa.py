"""Qwen Sparse Attention: gated attention over the tokens that an indexer chooses."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import attention_probabilities
from pallas_kernels.bits import to_bits
from pallas_kernels.dense import linear
from pallas_kernels.index import div, rem, take
from pallas_kernels.norm import rms_norm
from pallas_kernels.qsa import (
    pool_raw_keys,
    reference,
    select_tokens,
    sparse_attention,
)
from pallas_kernels.rope import rope
from pallas_kernels.rows import Rows, map_row_tiles, write_ring
from pallas_kernels.struct import struct
from qwen_hybrid import attention
from qwen_hybrid.attention import AttentionProjection
from qwen_hybrid.config import HybridConfig, QsaConfig
from qwen_hybrid.layers import Weights
from qwen_hybrid.state import QsaState


@struct
class QsaProjection:
    """What the mixer computes from each row alone.

    Attributes:
      index_query: normed and rotated.
      index_key: raw: neither normed nor rotated before pooling.
    """

    attention: AttentionProjection
    index_query: Float[Array, "T Ni Di"]
    index_key: Float[Array, "T Di"]


@struct
class QsaTrace:
    """What training the indexer needs, per sequence.

    Attributes:
      scores: index score of each group; only complete groups count.
      mass: dense attention mass of each group, mean over heads.
      complete: groups each query may choose.
    """

    scores: Float[Array, "T G"]
    mass: Float[Array, "T G"]
    complete: Bool[Array, "T G"]


def _qsa(config: HybridConfig) -> QsaConfig:
    assert config.qsa is not None
    return config.qsa


def _rotate(x: Array, position: Array, config: HybridConfig) -> Array:
    a = config.attention
    return rope(x, position, rotary_dim=a.rotary_dim, theta=a.rope_theta)


def project(
    weights: Weights, x: Float[Array, "T D"], position: Int[Array, " T"], config: HybridConfig
) -> QsaProjection:
    """Project for attention and for the indexer; the indexer's input carries no gradient."""
    qsa, indexer = _qsa(config), weights["indexer"]
    both = linear(lax.stop_gradient(x), indexer["index_qk_proj"])
    query, key = jnp.split(both, (qsa.num_heads * qsa.head_dim,), axis=-1)
    query = query.reshape(-1, qsa.num_heads, qsa.head_dim)
    query = rms_norm(query, indexer["q_layernorm"], config.rms_norm_eps)
    return QsaProjection(
        attention.project(weights, x, position, config), _rotate(query, position, config), key
    )


def _finish_pooled(
    weights: Weights,
    mean: Float[Array, "M Di"],
    first: Int[Array, " M"],
    dtype,
    config: HybridConfig,
) -> Float[Array, "M Di"]:
    """Round, norm and rotate pooled keys at the position of their group's first token."""
    normed = rms_norm(mean.astype(dtype), weights["indexer"]["k_layernorm"], config.rms_norm_eps)
    return _rotate(normed[:, None, :], first, config)[:, 0]


def _write_pooled(pages: Array, pooled: Array, rows: Rows, ratio: int) -> Array:
    """Store the index key of each group that a new row completes."""
    completes = rows.live & (rem(rows.position + 1, ratio) == 0)
    block = take(rows.block_table, rows.slot, div(rows.position, rows.block_size))
    block = jnp.where(completes, block, pages.shape[0])
    group = div(rem(rows.position, rows.block_size), ratio)
    return pages.at[block, group].set(to_bits(pooled, pages.dtype), mode="drop")


def mix_rows(
    weights: Weights, projection: QsaProjection, state: QsaState, rows: Rows, config: HybridConfig
) -> tuple[Float[Array, "R N H"], QsaState]:
    """Choose and attend along each sequence, the new rows included."""
    qsa, raw = _qsa(config), projection.index_key
    kv = attention.write_kv(state.attention, projection.attention, rows)
    index = jnp.arange(rows.slot.shape[0], dtype=jnp.int32)

    def pool(row: Array, position: Array) -> Array:
        mean = pool_raw_keys(raw, state.raw, rows, row, ratio=qsa.ratio)
        return _finish_pooled(weights, mean, position - (qsa.ratio - 1), raw.dtype, config)

    pooled = map_row_tiles(pool, rows, index, rows.position)
    pages = _write_pooled(state.pooled, pooled, rows, qsa.ratio)
    chosen = select_tokens(projection.index_query, pages, rows, ratio=qsa.ratio, budget=qsa.budget)
    out = sparse_attention(
        projection.attention.query,
        kv.key_pages,
        kv.value_pages,
        chosen,
        rows,
        scale=config.attention.head_dim**-0.5,
    )
    return out, QsaState(kv, pages, write_ring(state.raw, raw, rows))


def sequence_scores(
    weights: Weights, projection: QsaProjection, config: HybridConfig
) -> Float[Array, "T G"]:
    """Index scores of all groups of one whole sequence."""
    qsa = _qsa(config)
    mean = reference.pooled_raw(projection.index_key, qsa.ratio)
    first = jnp.arange(mean.shape[0], dtype=jnp.int32) * qsa.ratio
    pooled = _finish_pooled(weights, mean, first, projection.index_key.dtype, config)
    return reference.group_scores(projection.index_query, pooled)


def sequence_mask(scores: Float[Array, "T G"], config: HybridConfig) -> Bool[Array, "T T"]:
    """Tokens each query of one whole sequence attends to."""
    qsa, size = _qsa(config), scores.shape[0]
    position = jnp.arange(size, dtype=jnp.int32)
    chosen = reference.selected_groups(
        scores, position, ratio=qsa.ratio, budget_groups=qsa.budget_groups
    )
    return reference.token_mask(chosen, position, size, qsa.ratio)


def trace(projection: QsaProjection, scores: Array, config: HybridConfig) -> QsaTrace:
    """Index scores beside the dense attention mass they are to predict."""
    ratio, size = _qsa(config).ratio, scores.shape[0]
    mask = attention.causal_mask(size)
    probability = attention_probabilities(
        projection.attention.query,
        projection.attention.key,
        mask,
        scale=config.attention.head_dim**-0.5,
    )
    groups = scores.shape[1]
    mean = jnp.mean(lax.stop_gradient(probability), axis=(0, 1))[:, : groups * ratio]
    mass = jnp.sum(mean.reshape(size, groups, ratio), axis=-1)
    complete = jnp.arange(groups)[None, :] < ((jnp.arange(size) + 1) // ratio)[:, None]
    return QsaTrace(scores, mass, complete)
