"""The feed-forward half of a layer: a gated MLP or a mixture of experts with a shared one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import moe
from pallas_kernels.dense import dense
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.layers import Weights, add, gated_mlp


def router_logits(weights: Weights, x: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """Router outputs in float32."""
    return dense(x, weights["gate"])


def feed_forward(
    weights: Weights,
    x: Float[Array, "T D"],
    live: Bool[Array, " T"],
    config: HybridConfig,
    implementation: str,
) -> Float[Array, "T D"]:
    """Apply the layer's MLP or experts to each row."""
    if config.moe is None:
        return gated_mlp(weights, x)
    top_k, renormalize = config.moe.top_k, config.moe.renormalize
    logits = router_logits(weights, x)
    experts = weights["experts"]["gate_up_proj"], weights["experts"]["down_proj"]
    if implementation == "reference":
        weight, expert = moe.reference.route(logits, top_k, renormalize)
        routed = moe.reference.expert_mix(x, weight, expert, *experts)
    else:
        weight, expert = moe.route(logits, top_k=top_k, renormalize=renormalize)
        routed = moe.expert_mix(x, weight, expert, live, *experts)
    shared = gated_mlp(weights["shared_expert"], x).astype(jnp.float32)
    gate = jax.nn.sigmoid(dense(x, weights["shared_expert_gate"]))
    return add(jnp.zeros_like(x), routed, gate * shared)
