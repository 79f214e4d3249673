"""The drafter over whole sequences: the plain, differentiable twin of `spec.dspark.model`.

Blocks may begin at any positions of a sequence whose tokens and taps are known; their rows read the
context before the anchor and their own block. For training, and to check the paged form.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.struct import struct
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.layers import Weights
from spec.dspark.attention import block_mask
from spec.dspark.heads import confidence_logits, markov_step, start_carried
from spec.dspark.layers import close, context_rows, keys_and_values, plain_rms_norm, project

HIGHEST = jax.lax.Precision.HIGHEST


@struct
class BlockOutput:
    """What the heads give for blocks.

    Attributes:
      logits: of each draft, after the Markov head, float32.
      confidence: raw confidence logits.
      token: the token each draft was followed by: given, or picked.
    """

    logits: Float[Array, "A R V"]
    confidence: Float[Array, "A R"]
    token: Int[Array, "A R"]


def _attend(
    query: Float[Array, "A T N H"],
    context: tuple[Float[Array, "S K H"], Float[Array, "S K H"]],
    block: tuple[Float[Array, "A T K H"], Float[Array, "A T K H"]],
    mask: Bool[Array, "A T U"],
) -> Float[Array, "A T N H"]:
    """One softmax over context and block."""
    num_blocks, num_rows, heads, width = query.shape
    grouped = query.astype(jnp.float32).reshape(num_blocks, num_rows, block[0].shape[2], -1, width)
    old_key, old_value, key, value = (x.astype(jnp.float32) for x in (*context, *block))
    before = jnp.einsum("atkgh,skh->akgts", grouped, old_key, precision=HIGHEST)
    inside = jnp.einsum("atkgh,aukh->akgtu", grouped, key, precision=HIGHEST)
    scores = jnp.concatenate((before, inside), axis=-1) * width**-0.5
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    num_tokens = old_key.shape[0]
    out = jnp.einsum("akgts,skh->atkgh", weights[..., :num_tokens], old_value, precision=HIGHEST)
    out = out + jnp.einsum("akgtu,aukh->atkgh", weights[..., num_tokens:], value, precision=HIGHEST)
    return out.reshape(num_blocks, num_rows, heads, width)


def _mask(
    config: DSparkConfig, index: int, anchors: Int[Array, " A"], num_tokens: int
) -> Bool[Array, "A T U"]:
    """What each row of each block reads in one layer: context tokens, then rows."""
    rows, window = config.num_rows, config.layer_windows[index]
    at = jnp.arange(num_tokens)[None, None, :]
    position = anchors[:, None, None] + jnp.arange(rows)[None, :, None]
    before = jnp.broadcast_to(at < anchors[:, None, None], (anchors.shape[0], rows, num_tokens))
    if window is not None:
        before = before & (position - at < window)
    inside = block_mask(rows, is_causal=config.layer_is_causal[index], window=window)
    inside = jnp.broadcast_to(inside[None], (anchors.shape[0], rows, rows))
    return jnp.concatenate((before, inside), axis=-1)


def block_rows(
    config: DSparkConfig,
    params: Weights,
    taps: Float[Array, "S _"],
    token: Int[Array, " A"],
    anchors: Int[Array, " A"],
    embed: Callable[[Array], Array],
) -> Float[Array, "A R D"]:
    """Normed rows that the drafts of each block are read from.

    Args:
      config: the draft model.
      params: its parameters.
      taps: the target's tapped rows of one sequence from position 0.
      token: the token at each anchor.
      anchors: position of each block's first row.
      embed: the target's embedding.
    """
    count, rows = anchors.shape[0], config.num_rows
    position = (anchors[:, None] + jnp.arange(rows)[None, :]).reshape(-1)
    masks = jnp.full((count, rows - 1), config.mask_token_id, jnp.int32)
    x = embed(jnp.concatenate((token[:, None], masks), axis=1).reshape(-1))
    context = context_rows(config, params, taps)
    at = jnp.arange(taps.shape[0], dtype=jnp.int32)
    for index in range(config.num_layers):
        layer = params[f"layers_{index}"]
        p = project(config, layer, x, position)
        query, key, value = (
            a.reshape(count, rows, *a.shape[1:]) for a in (p.query, p.key, p.value)
        )
        old = keys_and_values(config, layer["self_attn"], context, at)
        mask = _mask(config, index, anchors, taps.shape[0])
        mixed = _attend(query, old, (key, value), mask)
        x = close(config, layer, x, mixed.reshape(count * rows, *mixed.shape[2:]))
    x = plain_rms_norm(x, params["norm"], config.rms_norm_eps).reshape(count, rows, -1)
    return x[:, rows - config.block_size :]


def block_heads(
    config: DSparkConfig,
    params: Weights,
    hidden: Float[Array, "A R D"],
    first: Int[Array, " A"],
    *,
    head: Callable[[Array], Array],
    follow: Callable[[Array, int], Array],
) -> BlockOutput:
    """Logits and confidence of each draft, left to right.

    Args:
      config: the draft model.
      params: its parameters.
      hidden: as `block_rows` returns it.
      first: the anchors' tokens.
      head: the target's head.
      follow: the token that draft j (from 0) is followed by, of its logits and j: the true one in
        training, else the one picked.
    """
    count = hidden.shape[0]
    base = head(hidden.reshape(-1, hidden.shape[2])).reshape(count, config.block_size, -1)
    previous, carried, outputs = first, start_carried(config, count), []
    for j in range(config.block_size):
        step = markov_step(config, params["markov_head"], previous, hidden[:, j], carried)
        logits, carried = base[:, j] + step.bias, step.carried
        raw = confidence_logits(config, params, hidden[:, j], step.embedded)
        previous = follow(logits, j)
        outputs.append((logits, raw, previous))
    return BlockOutput(*(jnp.stack(parts, axis=1) for parts in zip(*outputs, strict=True)))
