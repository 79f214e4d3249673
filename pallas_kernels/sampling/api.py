"""Gumbel-max sampling: the token is a function of (logits, parameters, seed, position)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.struct import struct

GREEDY_BELOW = 1e-6


@struct
class Sampling:
    """Parameters of each row.

    Attributes:
      temperature: below 1e-6 is greedy.
      top_k: 0 keeps all.
      top_p: 1 keeps all.
      min_p: 0 keeps all.
      seed: two words of a 64-bit seed.
    """

    temperature: Float[Array, " M"]
    top_k: Int[Array, " M"]
    top_p: Float[Array, " M"]
    min_p: Float[Array, " M"]
    seed: UInt32[Array, "M 2"]

    @property
    def is_greedy(self) -> Bool[Array, " M"]:
        """Rows that take the likeliest token and draw no noise."""
        return self.temperature < GREEDY_BELOW


def _filter(scaled: Float[Array, "M V"], s: Sampling) -> Float[Array, "M V"]:
    """Apply top-k, then top-p, then min-p by rank in one descending order.

    Equal logits rank by lower id. top-p keeps the shortest prefix whose probability, among what
    top-k kept, reaches p.
    """
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(scaled.shape[1])[None, :]
    top_k = jnp.where(s.top_k <= 0, scaled.shape[1], s.top_k)[:, None]
    keep = rank < top_k
    mass = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    keep = keep & ((before < s.top_p[:, None]) | (s.top_p[:, None] >= 1.0))
    keep = keep & (mass >= s.min_p[:, None] * mass[:, :1])
    keep = keep | (rank == 0)
    allowed = jnp.zeros(scaled.shape, bool)
    row = jnp.arange(scaled.shape[0])[:, None]
    allowed = allowed.at[row, order].set(keep)
    return jnp.where(allowed, scaled, -jnp.inf)


def filtered_logits(logits: Float[Array, "M V"], s: Sampling) -> Float[Array, "M V"]:
    """Logits over temperature, filtered tokens at -inf; rows without filters are not sorted."""
    greedy = s.is_greedy
    scaled = logits / jnp.where(greedy, 1.0, s.temperature)[:, None]
    filters = ~greedy & ((s.top_k > 0) | (s.top_p < 1.0) | (s.min_p > 0.0))
    filtered = lax.cond(jnp.any(filters), lambda x: _filter(x, s), lambda x: x, scaled)
    return jnp.where(filters[:, None], filtered, scaled)


def _noise(seed: UInt32[Array, "M 2"], position: Int[Array, " M"], size: int) -> Array:
    def row(words: Array, at: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), at)
        return jax.random.gumbel(key, (size,), jnp.float32)

    return jax.vmap(row)(seed, position)


def choose(
    logits: Float[Array, "M V"], s: Sampling, position: Int[Array, " M"]
) -> Int[Array, " M"]:
    """The token that row samples at `position`: argmax of filtered logits plus Gumbel noise.

    Greedy rows take the plain argmax. Ties go to the lower id.
    """
    greedy = s.is_greedy

    def sample(scores: Array) -> Array:
        noisy = filtered_logits(scores, s) + _noise(s.seed, position, scores.shape[1])
        return likeliest(jnp.where(greedy[:, None], scores, noisy))

    return lax.cond(jnp.all(greedy), likeliest, sample, logits)


def likeliest(logits: Float[Array, "M V"]) -> Int[Array, " M"]:
    """The token with the highest logit of each row, the lower id of equal ones."""
    # XLA's own argmax compares one entry at a time; integers reduce by whole vectors. They rank as
    # the numbers do, equal zeros alike and NaN above all.
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    top = jnp.iinfo(jnp.int32).max
    rank = jnp.where(jnp.isnan(logits), top, jnp.where(bits < 0, bits ^ top, bits))
    peak = jnp.max(rank, axis=-1, keepdims=True)
    place = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(rank == peak, place, top), axis=-1)


def log_probabilities(
    logits: Float[Array, "M V"], tokens: Int[Array, "M J"]
) -> Float[Array, "M J"]:
    """log softmax of the raw logits at some tokens of each row, float32."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))
    return jnp.take_along_axis(logits, tokens, axis=-1) - peak - total


def top_tokens(logits: Float[Array, "M V"], count: int) -> Int[Array, "M {count}"]:
    """The `count` likeliest tokens of each row, descending, equal ones by lower id."""
    # The two zeros are equal, which `top_k` does not know.
    return lax.top_k(jnp.where(logits == 0, 0.0, logits), count)[1]
