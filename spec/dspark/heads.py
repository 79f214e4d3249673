"""Heads of a DSpark draft model: the bias by the token before, and the confidence.

A block's rows are computed at once; what ties one draft to the next is the Markov head, a low-rank
bigram whose bias is added to the logits: W2 u, where u = W1[token before] in the simplest kind.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dense import dense
from pallas_kernels.index import take
from pallas_kernels.struct import struct
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.layers import Weights


@struct
class MarkovStep:
    """One step of the Markov head.

    Attributes:
      bias: what is added to the logits, float32.
      embedded: row of the token before, for the confidence head.
      carried: what the next step takes; without entries unless the head is recurrent.
    """

    bias: Float[Array, "M V"]
    embedded: Float[Array, "M r"]
    carried: Float[Array, "M _"]


def start_carried(config: DSparkConfig, num_rows: int) -> Float[Array, "M _"]:
    """What the first step takes."""
    width = config.markov_rank if config.markov_head_type == "rnn" else 0
    return jnp.zeros((num_rows, width), jnp.float32)


def _affine(weights: Weights, *parts: Array) -> Array:
    """W [parts] + b in float32; the parts have one type."""
    x = jnp.concatenate(parts, axis=-1)
    return dense(x, weights["weight"]) + weights["bias"].astype(jnp.float32)[None, :]


def markov_step(
    config: DSparkConfig,
    weights: Weights,
    previous: Int[Array, " M"],
    hidden: Float[Array, "M D"],
    carried: Float[Array, "M _"],
) -> MarkovStep:
    """Bias of each row's logits by the token before it.

    With u = W1[previous], z the row and s the carried state:

        vanilla: W2 u
        gated:   W2 (sigmoid(G [z; u] + b) * u)
        rnn:     [gate, candidate, out] = J [s; u; z] + b
                 s' = sigmoid(gate) s + (1 - sigmoid(gate)) tanh(candidate);  W2 tanh(out)

    Numerics: float32 gates and state, rounded to the type of `hidden` before each product.
    """
    dtype = hidden.dtype
    embedded = take(weights["markov_w1"], previous).astype(dtype)
    read = embedded
    if config.markov_head_type == "gated":
        gate = jax.nn.sigmoid(_affine(weights["gate_proj"], hidden, embedded))
        read = (gate * embedded.astype(jnp.float32)).astype(dtype)
    if config.markov_head_type == "rnn":
        joint = _affine(weights["joint_proj"], carried.astype(dtype), embedded, hidden)
        gate, candidate, out = jnp.split(joint, 3, axis=-1)
        keep = jax.nn.sigmoid(gate)
        carried = keep * carried + (1.0 - keep) * jnp.tanh(candidate)
        read = jnp.tanh(out).astype(dtype)
    return MarkovStep(dense(read, weights["markov_w2"]), embedded, carried)


def confidence_logits(
    config: DSparkConfig,
    params: Weights,
    hidden: Float[Array, "M D"],
    embedded: Float[Array, "M r"],
) -> Float[Array, " M"]:
    """Raw confidence that the target takes each row's draft; without a head it is certain."""
    if not config.has_confidence_head:
        return jnp.full(hidden.shape[0], jnp.inf, jnp.float32)
    parts = (hidden, embedded) if config.confidence_reads_markov else (hidden,)
    return _affine(params["confidence_head"], *parts)[:, 0]


def calibrated(config: DSparkConfig, logits: Float[Array, "A R"]) -> Float[Array, "A R"]:
    """Confidence of each draft: sigmoid of the logits over the draft's temperature."""
    temperatures = jnp.asarray(config.confidence_temperatures, jnp.float32)
    return jax.nn.sigmoid(logits / temperatures[None, :])
