"""The DSpark drafter as pure functions over explicit state.

    state = inject(config, params, state, taps, rows)         # after every target call
    drafts, confidence = propose(config, params, state, anchors, embed=..., head=..., pick=...)
    num_drafts = draft_len(confidence, threshold)             # or all of them

A block is [anchor, mask, mask, ...]: the sequence's last token, not yet fed to the target, at
position `length`, and masks after it. Its rows see the context and one another in both directions,
and all drafts come out of one pass; the Markov head then ties each draft to the one before. Context
are keys and values of the target's residual rows at chosen layers, for positions below `length`.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.index import take
from pallas_kernels.rows import TILE_ROWS, Rows, map_row_tiles, map_tiles, write_pages
from pallas_kernels.struct import struct
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.layers import Weights
from qwen_hybrid.state import AttentionState
from spec.dspark.attention import Seats, block_attention
from spec.dspark.heads import calibrated, confidence_logits, markov_step, start_carried
from spec.dspark.layers import close, context_rows, keys_and_values, plain_rms_norm, project
from spec.dspark.state import DSparkState


@struct
class Anchors:
    """Where each slot's block begins.

    Attributes:
      token: the sequence's last token, which the target has sampled and not read yet.
      length: tokens before it: the committed length, and its own position.
      active: slots that draft.
      block_table: pages of each slot, the target's.
    """

    token: Int[Array, " B"]
    length: Int[Array, " B"]
    active: Bool[Array, " B"]
    block_table: Int[Array, "B P"]


def inject(
    config: DSparkConfig,
    params: Weights,
    state: DSparkState,
    taps: Float[Array, "R _"],
    rows: Rows,
) -> DSparkState:
    """Write the context keys and values of every row of a target call.

    Rows of tokens that are rejected later do no harm: nothing at or beyond a committed length is
    read, and the next call over those positions writes them again. A row's bits depend on its own
    taps and position alone.

    Args:
      config: the draft model.
      params: its parameters.
      state: context so far.
      taps: the target's `tap_layers` rows of the call.
      rows: how the call is laid out.

    Donates: `state`, where the caller jits it so.
    """

    def of_rows(taps: Array, position: Array) -> list[tuple[Array, Array]]:
        context = context_rows(config, params, taps)
        return [
            keys_and_values(config, params[f"layers_{i}"]["self_attn"], context, position)
            for i in range(config.num_layers)
        ]

    entries = map_row_tiles(of_rows, rows, taps, rows.position)
    layers = [
        AttentionState(
            write_pages(old.key_pages, key, rows, row_axis=3),
            write_pages(old.value_pages, value, rows, row_axis=2),
        )
        for old, (key, value) in zip(state.layers, entries, strict=True)
    ]
    return DSparkState(tuple(layers))


def _padded(count: int) -> int:
    return -(-count // TILE_ROWS) * TILE_ROWS


def _seat(config: DSparkConfig, anchors: Anchors) -> Seats:
    """Give the slots that draft seats, in their order."""
    order = jnp.argsort(~anchors.active, stable=True).astype(jnp.int32)
    return Seats(
        slot=order,
        count=jnp.sum(anchors.active, dtype=jnp.int32),
        length=take(anchors.length, order),
        block_table=take(anchors.block_table, order),
        num_rows=config.num_rows,
    )


def _backbone(
    config: DSparkConfig,
    params: Weights,
    state: DSparkState,
    token: Int[Array, " B"],
    seats: Seats,
    embed: Callable[[Array], Array],
) -> Float[Array, "R D"]:
    """Normed rows of all blocks, seat after seat; those beyond the live ones are arbitrary."""
    num_seats, width = token.shape[0], seats.num_rows
    index = jnp.arange(_padded(num_seats * width), dtype=jnp.int32)
    seat, row = jnp.minimum(index // width, num_seats - 1), index % width
    position = take(seats.length, seat) + row
    ids = jnp.where(row == 0, take(token, take(seats.slot, seat)), config.mask_token_id)
    num_live = seats.count * width
    x = map_tiles(embed, num_live, ids)
    for i in range(config.num_layers):
        layer = params[f"layers_{i}"]
        projection = map_tiles(
            lambda x, p, layer=layer: project(config, layer, x, p), num_live, x, position
        )
        mixed = block_attention(
            projection,
            state.layers[i],
            seats,
            is_causal=config.layer_is_causal[i],
            window=config.layer_windows[i],
        )
        x = map_tiles(lambda x, m, layer=layer: close(config, layer, x, m), num_live, x, mixed)
    return map_tiles(lambda x: plain_rms_norm(x, params["norm"], config.rms_norm_eps), num_live, x)


def propose(
    config: DSparkConfig,
    params: Weights,
    state: DSparkState,
    anchors: Anchors,
    *,
    embed: Callable[[Int[Array, " M"]], Float[Array, "M D"]],
    head: Callable[[Float[Array, "M D"]], Float[Array, "M V"]],
    pick: Callable[[Float[Array, "B V"], Int[Array, " B"]], Int[Array, " B"]],
) -> tuple[Int[Array, "B R"], Float[Array, "B R"]]:
    """Draft the tokens after each anchor.

    Args:
      config: the draft model.
      params: its parameters.
      state: context, injected for all positions below each length.
      anchors: where the blocks begin.
      embed: the target's embedding, in the activation dtype.
      head: the target's head, float32 logits.
      pick: the token that logits give at a position, one row a slot: the target's own choice,
        noise included. The rows of slots that do not draft are arbitrary.

    Returns:
      Draft j (from 0) of each slot, for position length + 1 + j; and the confidence that the target
      takes it, given that it took those before (1 without a confidence head). It depends on the
      drafts before j, never on j's own. Slots that do not draft get zeros.

    Numerics: what a slot gets depends on its own anchor and context alone.
    """
    seats = _seat(config, anchors)
    hidden = _backbone(config, params, state, anchors.token, seats, embed)
    base = map_tiles(head, seats.count * seats.num_rows, hidden)
    tokens, raw = _left_to_right(config, params, anchors, seats, hidden, base, pick)
    active = anchors.active[:, None]
    return jnp.where(active, tokens, 0), jnp.where(active, calibrated(config, raw), 0.0)


def _left_to_right(
    config: DSparkConfig,
    params: Weights,
    anchors: Anchors,
    seats: Seats,
    hidden: Float[Array, "M D"],
    base: Float[Array, "M V"],
    pick: Callable[[Float[Array, "B V"], Int[Array, " B"]], Int[Array, " B"]],
) -> tuple[Int[Array, "B R"], Float[Array, "B R"]]:
    """Drafts, each from its row and the draft before it, and their confidence logits."""
    num_slots = anchors.token.shape[0]
    seat = jnp.minimum(jnp.arange(_padded(num_slots), dtype=jnp.int32), num_slots - 1)
    slot = take(seats.slot, seat)
    # Seat of each slot: the inverse of the order.
    seat_of = jnp.zeros(num_slots, jnp.int32).at[seats.slot].set(seat[:num_slots])
    skipped = config.num_rows - config.block_size

    def correct(previous: Array, hidden: Array, base: Array, carried: Array):
        step = markov_step(config, params["markov_head"], previous, hidden, carried)
        raw = confidence_logits(config, params, hidden, step.embedded)
        return base + step.bias, raw, step.carried

    def draft(carry: tuple[Array, Array], j: Array):
        previous, carried = carry
        row = seat * seats.num_rows + skipped + j
        inputs = (take(previous, slot), take(hidden, row), take(base, row), carried)
        logits, raw, carried = map_tiles(correct, seats.count, *inputs)
        token = pick(take(logits, seat_of), anchors.length + 1 + j).astype(jnp.int32)
        return (token, carried), (token, take(raw, seat_of))

    start = (anchors.token, start_carried(config, seat.shape[0]))
    steps = jnp.arange(config.block_size, dtype=jnp.int32)
    _, (tokens, raw) = lax.scan(draft, start, steps)
    return tokens.T, raw.T


def draft_len(confidence: Float[Array, "B R"], threshold: float) -> Int[Array, " B"]:
    """How many leading drafts are worth verifying.

    The product of the confidences up to a draft estimates the chance that it and all before it are
    taken. Drafts from the first one on whose product falls below `threshold` are dropped. The rule
    is non-anticipating: whether draft j is kept depends on what came before it and never on which
    token j is, so that keeping it tells nothing of whether it will be taken. (With drafts that are
    compared with the target's own tokens any rule is lossless; with rejection sampling only such
    a one is.)

    Args:
      confidence: as `propose` returns it; NaN counts as no confidence.
      threshold: in [0, 1]; 0 keeps every draft.
    """
    survival = jnp.cumprod(confidence, axis=1)
    kept = jnp.cumprod((survival >= threshold).astype(jnp.int32), axis=1)
    return jnp.sum(kept, axis=1)
