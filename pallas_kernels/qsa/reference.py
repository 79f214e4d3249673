"""Which tokens a sparse-attention query reads: the plain twin of the indexer's arithmetic.

A group is `ratio` consecutive tokens at positions [ratio * g, ratio * (g + 1)). A query at
position t may choose among the groups that end at or before t; the tokens after the last such
group are its tail and are always read.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def pooled_raw(raw: Float[Array, "T D"], ratio: int) -> Float[Array, "G D"]:
    """Return the mean raw index key of each complete group, from position 0; float32.

    Args:
      raw: Index keys before norm and rotary embedding, of all tokens from position 0.
      ratio: Tokens per group; tokens of an unfinished last group are left out.
    """
    num_groups = raw.shape[0] // ratio
    rows = raw[: num_groups * ratio].astype(jnp.float32)
    return jnp.mean(rows.reshape(num_groups, ratio, raw.shape[1]), axis=1)


def group_scores(q: Float[Array, "T N D"], pooled: Float[Array, "G D"]) -> Float[Array, "T G"]:
    """Score each group for each query: sum over heads of relu(q . k), over sqrt(D).

    Args:
      q: Index queries, after norm and rotary embedding.
      pooled: Group keys, after norm and rotary embedding at the group's first position.

    Returns:
      Scores of all groups, those that the query may not choose included. A zero is +0.0, so
      that comparing bits and comparing values give one order.

    Numerics: float32; products at the ambient `jax_default_matmul_precision`.
    """
    products = jnp.einsum("tnd,gd->tng", q.astype(jnp.float32), pooled.astype(jnp.float32))
    scores = jnp.sum(jnp.where(products > 0.0, products, 0.0), axis=1) * q.shape[-1] ** -0.5
    return jnp.where(scores == 0.0, 0.0, scores)


def selected_groups(
    scores: Float[Array, "T G"],
    positions: Int[Array, " T"],
    *,
    ratio: int,
    budget_groups: int,
) -> Bool[Array, "T G"]:
    """Choose the best `budget_groups` complete groups of each query.

    Order: higher score first, then the lower group. The query's own group competes like any
    other once complete, and may lose.

    Args:
      scores: As `group_scores` returns them.
      positions: Absolute position of each query.
      ratio: Tokens per group.
      budget_groups: Groups kept at most.
    """
    groups = jnp.arange(scores.shape[1])
    complete = groups[None, :] < ((positions + 1) // ratio)[:, None]
    # A stable sort keeps equal scores in group order; incomplete groups go last.
    order = jnp.argsort(jnp.where(complete, -scores, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    return (rank < budget_groups) & complete


def token_mask(
    selected: Bool[Array, "T G"],
    positions: Int[Array, " T"],
    num_tokens: int,
    ratio: int,
) -> Bool[Array, "T {num_tokens}"]:
    """Return the tokens each query reads: those of its selected groups, and its tail.

    Args:
      selected: As `selected_groups` returns them.
      positions: Absolute position of each query.
      num_tokens: Tokens from position 0 that the mask covers.
      ratio: Tokens per group.
    """
    num_groups = -(-num_tokens // ratio)
    missing = max(0, num_groups - selected.shape[1])
    selected = jnp.pad(selected, ((0, 0), (0, missing)))[:, :num_groups]
    chosen = jnp.repeat(selected, ratio, axis=1)[:, :num_tokens]
    tokens = jnp.arange(num_tokens)[None, :]
    tail_start = ((positions + 1) // ratio * ratio)[:, None]
    return chosen | ((tokens >= tail_start) & (tokens <= positions[:, None]))
