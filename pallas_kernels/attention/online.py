"""Softmax over spans of keys, merged in ascending order."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.rounding import product
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

    peak: Float[Array, "*T"]
    mass: Float[Array, "*T"]
    out: Float[Array, "*T H"]


def empty_partial(shape: tuple[int, ...]) -> Partial:
    """No keys seen, for `[*T, H]` outputs."""
    return Partial(
        jnp.full(shape[:-1], -jnp.inf, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def span_partial(scores: Float[Array, "*T S"], mask: Bool[Array, "*M S"], weigh_values) -> Partial:
    """Softmax inside one span.

    Args:
      scores: already scaled.
      mask: keys each row may see, with as many axes as the scores; others are removed by select.
      weigh_values: maps `[*T, S]` weights to `[*T, H]`.
    """
    peak = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weight = jnp.where(mask, jnp.exp(jnp.where(mask, scores - base[..., None], 0.0)), 0.0)
    return Partial(peak, jnp.sum(weight, axis=-1), weigh_values(weight))


def merge(left: Partial, right: Partial) -> Partial:
    """Join the spans so far with the next; a span without keys changes no bit."""
    peak = jnp.maximum(left.peak, right.peak)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    old = jnp.where(left.peak == -jnp.inf, 0.0, jnp.exp(left.peak - base))
    new = jnp.where(right.peak == -jnp.inf, 0.0, jnp.exp(right.peak - base))
    mass = product(left.mass, old) + product(right.mass, new)
    out = product(left.out, old[..., None]) + product(right.out, new[..., None])
    out = jnp.where(jnp.isnan(left.out) | jnp.isnan(right.out), jnp.nan, out)
    empty = right.peak == -jnp.inf
    return Partial(
        peak, jnp.where(empty, left.mass, mass), jnp.where(empty[..., None], left.out, out)
    )


def finish(partial: Partial) -> Float[Array, "*T H"]:
    """Weighted mean of the values; rows without keys give 0."""
    mass = partial.mass[..., None]
    return jnp.where(mass > 0, partial.out / jnp.where(mass > 0, mass, 1.0), 0.0)
