"""Losses and monitors of a DSpark drafter: agreement with the target's own distributions.

Blocks begin at anchors in texts that the target has read. Each draft is compared with what the
target gives for its position, the true tokens before it being known to both.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.struct import struct
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.model import HybridModel, SequenceOutput
from qwen_hybrid.params import ParamTree
from spec.dspark import block_heads, block_rows

# The rest is the distance's; the confidence counts in full.
CE_WEIGHT = 0.1
# A draft counts exp(-j / LOSS_DECAY): it is of use only if all before it were taken.
LOSS_DECAY = 4.0


@dataclass(frozen=True)
class Pair:
    """A drafter's architecture and its target's.

    Attributes:
      draft: Drafter.
      target: Target.
      end_id: Token that ends a text.
    """

    draft: DSparkConfig
    target: HybridConfig
    end_id: int


@struct
class BlockTerms:
    """What is known of every draft of every block.

    Attributes:
      cross_entropy: To the token that the target finds likeliest, in nats.
      distance: Sum over the vocabulary of |draft's probability - target's|; a draft drawn from the
        drafter is kept by rejection sampling with probability 1 - distance / 2.
      confidence: Raw logit that it is kept.
      agrees: Drafter and target find the same token likeliest.
      counts: No text ended before the draft.
    """

    cross_entropy: Float[Array, "B A R"]
    distance: Float[Array, "B A R"]
    confidence: Float[Array, "B A R"]
    agrees: Bool[Array, "B A R"]
    counts: Bool[Array, "B A R"]

    @property
    def kept(self) -> Float[Array, "B A R"]:
        """Probability that rejection sampling keeps the draft."""
        return 1.0 - 0.5 * self.distance


def draw_anchors(key: Array, *, batch: int, length: int, count: int, block: int) -> Array:
    """Return distinct positions of each row of a batch, in order, that leave room for a block."""
    noise = jax.random.uniform(key, (batch, length - block + 1))
    return jnp.sort(jax.lax.top_k(noise, count)[1], axis=1).astype(jnp.int32)


def block_terms(
    pair: Pair,
    target: ParamTree,
    draft: ParamTree,
    ids: Int[Array, "B T1"],
    anchors: Int[Array, "B A"],
) -> BlockTerms:
    """Compare blocks with the target.

    Args:
      pair: Architectures.
      target: The target's parameters, which get no gradient.
      draft: The drafter's.
      ids: Texts; the last column is a label only.
      anchors: Where blocks begin, at most T - block_size.
    """
    model = HybridModel(pair.target, tap_layers=pair.draft.target_layer_ids)
    bound = model.bind({"params": jax.lax.stop_gradient(target)})
    read = bound.sequence(ids[:, :-1])
    assert isinstance(read, SequenceOutput) and read.taps is not None
    size = pair.draft.block_size

    def of_text(taps: Array, expected: Array, ids: Array, anchors: Array) -> tuple[Array, ...]:
        first = ids[anchors]
        at = anchors[:, None] + jnp.arange(size)[None, :]
        hidden = block_rows(pair.draft, draft, taps, first, anchors, bound.embed)
        following = ids[at + 1]
        out = block_heads(
            pair.draft,
            draft,
            hidden,
            first,
            head=bound.head,
            follow=lambda _, j: following[:, j],
        )
        counts = jnp.cumprod((ids[at] != pair.end_id).astype(jnp.int32), axis=1) > 0
        return (*_compared(out.logits, expected[at]), out.confidence, counts)

    results = jax.vmap(of_text)(read.taps, read.logits, ids, anchors)
    cross_entropy, distance, agrees, confidence, counts = results
    return BlockTerms(cross_entropy, distance, confidence, agrees, counts)


def _compared(drafted: Array, expected: Array) -> tuple[Array, Array, Array]:
    """(cross-entropy, distance, agreement) of two sets of logits."""
    log_p = jax.nn.log_softmax(drafted, axis=-1)
    likeliest = jnp.argmax(expected, axis=-1)
    cross_entropy = -jnp.take_along_axis(log_p, likeliest[..., None], axis=-1)[..., 0]
    distance = jnp.sum(jnp.abs(jnp.exp(log_p) - jax.nn.softmax(expected, axis=-1)), axis=-1)
    return cross_entropy, distance, likeliest == jnp.argmax(drafted, axis=-1)


def draft_loss(
    terms: BlockTerms, ce_weight: float = CE_WEIGHT
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the weighted sum of all losses, and each of them by name.

    Each is a mean over the drafts that count, weighted by exp(-j / 4).

    Args:
      terms: What is known of the drafts.
      ce_weight: Share of the cross-entropy against the distance: more favours greedy decoding.

    Source: DSpark (arXiv 2607.05147), training objective.
    """
    decay = jnp.exp(-jnp.arange(terms.distance.shape[2], dtype=jnp.float32) / LOSS_DECAY)
    weight = jnp.where(terms.counts, decay[None, None, :], 0.0)

    def mean(values: Array) -> Array:
        return jnp.sum(weight * values) / jnp.sum(weight)

    losses = {
        "cross_entropy": mean(terms.cross_entropy),
        "distance": mean(terms.distance),
        "confidence": mean(binary_cross_entropy(terms.confidence, terms.kept)),
    }
    agreement = ce_weight * losses["cross_entropy"] + (1.0 - ce_weight) * losses["distance"]
    return agreement + losses["confidence"], losses


def binary_cross_entropy(logits: Float[Array, "*T"], probability: Float[Array, "*T"]) -> Array:
    """Return the cross-entropy to given probabilities, which get no gradient."""
    p = jax.lax.stop_gradient(probability)
    return -(p * jax.nn.log_sigmoid(logits) + (1.0 - p) * jax.nn.log_sigmoid(-logits))


@dataclass(frozen=True)
class Acceptance:
    """Sums over blocks, by draft.

    Attributes:
      kept: Chance that rejection sampling keeps the draft.
      agreed: Drafts that agree with the target, like all before them.
      confidence: What the confidence head says.
      count: Drafts that count.
    """

    kept: np.ndarray
    agreed: np.ndarray
    confidence: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, terms: BlockTerms) -> "Acceptance":
        """Add up one batch."""
        counts = np.asarray(terms.counts)
        agrees = np.asarray(terms.agrees) & counts
        said = 1.0 / (1.0 + np.exp(-np.asarray(terms.confidence, np.float64)))
        sums = (np.asarray(terms.kept, np.float64), np.cumprod(agrees, axis=2), said, counts)
        return cls(*(np.where(counts, x, 0.0).sum((0, 1)) for x in sums))

    def plus(self, other: "Acceptance") -> "Acceptance":
        """Return the sums with one more batch."""
        return Acceptance(
            self.kept + other.kept,
            self.agreed + other.agreed,
            self.confidence + other.confidence,
            self.count + other.count,
        )

    def record(self) -> dict[str, float]:
        """Return what is reported: tokens a round with rejection sampling and greedily, and more.

        `tau` is 1 + sum over k of the product of the mean chances up to k; `greedy_tau` 1 + the
        mean number of leading drafts that agree, true tokens being known to both.
        """
        chances, agreed = self.kept / self.count, self.agreed / self.count[0]
        record = {
            "tau": 1.0 + float(np.cumprod(chances).sum()),
            "greedy_tau": 1.0 + float(agreed.sum()),
            "confidence_bias": float((self.confidence - self.kept).sum() / self.count.sum()),
        }
        for number, (chance, share) in enumerate(zip(chances, agreed, strict=True), 1):
            record |= {f"kept_{number}": float(chance), f"agreed_{number}": float(share)}
        return record
