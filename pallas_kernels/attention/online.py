"""Softmax over spans of keys, merged in ascending order."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.struct import struct

HIGHEST = lax.Precision.HIGHEST


@struct
class Partial:
    """Attention over the spans seen so far.

    Attributes:
      peak: largest score, -inf before the first key.
      mass: sum of exp(score - peak).
      out: the same sum weighted by values.
    """

    peak: Float[Array, "T K G"]
    mass: Float[Array, "T K G"]
    out: Float[Array, "T K G H"]


def empty_partial(shape: tuple[int, int, int, int]) -> Partial:
    """No keys seen, for `[T, K, G, H]` outputs."""
    return Partial(
        jnp.full(shape[:3], -jnp.inf, jnp.float32),
        jnp.zeros(shape[:3], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def span_partial(
    scores: Float[Array, "T K G S"], mask: Bool[Array, "T S"], weigh_values
) -> Partial:
    """Softmax inside one span.

    Args:
      scores: already scaled.
      mask: keys each row may see; the others are removed by select.
      weigh_values: maps `[T, K, G, S]` weights to `[T, K, G, H]`.
    """
    seen = mask[:, None, None, :]
    peak = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, scores - base[..., None], 0.0)), 0.0)
    return Partial(peak, jnp.sum(weight, axis=-1), weigh_values(weight))


def merge(left: Partial, right: Partial) -> Partial:
    """Join the spans so far with the next; a span without keys changes no bit."""
    peak = jnp.maximum(left.peak, right.peak)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    old = jnp.where(left.peak == -jnp.inf, 0.0, jnp.exp(left.peak - base))
    new = jnp.where(right.peak == -jnp.inf, 0.0, jnp.exp(right.peak - base))
    mass = left.mass * old + right.mass * new
    out = left.out * old[..., None] + right.out * new[..., None]
    empty = right.peak == -jnp.inf
    return Partial(
        peak, jnp.where(empty, left.mass, mass), jnp.where(empty[..., None], left.out, out)
    )


def finish(partial: Partial) -> Float[Array, "T K G H"]:
    """Weighted mean of the values; rows without keys give 0."""
    mass = partial.mass[..., None]
    return jnp.where(mass > 0, partial.out / jnp.where(mass > 0, mass, 1.0), 0.0)
