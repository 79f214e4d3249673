"""Layers shared by the three families in float64 NumPy, one function per equation.

Weights are dictionaries keyed by checkpoint names relative to the layer. A row is one token of a
single sequence. Nothing is rounded, cached or fused.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from tests.oracles.gdn_error import delta_rule, l2_normalized

Weights = dict[str, np.ndarray]


def scoped(weights: Weights, prefix: str) -> Weights:
    """Select the weights below `prefix` and drop the prefix from their names."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0, -x))


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; minus infinity gives zero."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, *, groups: int = 1) -> np.ndarray:
    """x / rms(x) (1 + weight), the rms taken over each of `groups` parts of the last axis."""
    parts = x.reshape(*x.shape[:-1], groups, -1)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
    return parts.reshape(x.shape) * (1 + weight)


def rotary_dim(config: dict) -> int:
    """Count the leading dimensions of a head that rotate."""
    default = 1.0 if config["model_type"] == "qwen4_exp_text" else 0.25
    factor = config["rope_parameters"].get("partial_rotary_factor", default)
    return int(config["head_dim"] * factor)


def rope(
    x: Float[np.ndarray, "T N H"], positions: Int[np.ndarray, " T"], config: dict
) -> Float[np.ndarray, "T N H"]:
    """Rotate pairs (i, i + R/2) of the first R dimensions by position theta^(-2i/R).

    The frequencies and angles are float32 by definition of the model.
    """
    half = rotary_dim(config) // 2
    theta = config["rope_parameters"]["rope_theta"]
    inv_freq = (theta ** (-np.arange(half) / half)).astype(np.float32)
    angle = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)[:, None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def causal_conv(
    x: Float[np.ndarray, "T C"], weight: Float[np.ndarray, "C K"], *, dilation: int = 1
) -> Float[np.ndarray, "T C"]:
    """y[t] = sum_j w[:, j] x[t - (K-1-j) dilation], with zeros before the sequence."""
    taps = weight.shape[1]
    history = np.concatenate([np.zeros(((taps - 1) * dilation, x.shape[1])), x])
    return sum(
        (weight[:, j] * history[j * dilation : j * dilation + len(x)] for j in range(taps)),
        start=np.zeros_like(x),
    )


def gated_delta_net(x: Float[np.ndarray, "T D"], w: Weights, config: dict) -> np.ndarray:
    """Apply a GDN layer: projections, convolution, gated delta rule, gated norm, projection."""
    Nk, Nv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    Hk, Hv = config["linear_key_head_dim"], config["linear_value_head_dim"]
    T = len(x)
    mixed = silu(causal_conv(x @ w["in_proj_qkv.weight"].T, w["conv1d.weight"][:, 0]))
    q, k, v = np.split(mixed, [Nk * Hk, 2 * Nk * Hk], axis=-1)
    # Value head j reads key head j // (Nv / Nk).
    q, k = (np.repeat(l2_normalized(part.reshape(T, Nk, Hk)), Nv // Nk, axis=1) for part in (q, k))
    beta = sigmoid(x @ w["in_proj_b.weight"].T)
    g = -np.exp(w["A_log"]) * np.logaddexp(0, x @ w["in_proj_a.weight"].T + w["dt_bias"])
    out, _ = delta_rule(q * Hk**-0.5, k, v.reshape(T, Nv, Hv), g, beta)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
    gate = (x @ w["in_proj_z.weight"].T).reshape(T, Nv, Hv)
    gate = sigmoid(gate) if config.get("output_gate_type") == "sigmoid" else silu(gate)
    return (out * w["norm.weight"] * gate).reshape(T, -1) @ w["out_proj.weight"].T


def gated_attention(
    x: Float[np.ndarray, "T D"],
    w: Weights,
    config: dict,
    *,
    positions: Int[np.ndarray, " T"],
    mask: Bool[np.ndarray, "T T"],
) -> np.ndarray:
    """Apply softmax attention over the tokens of `mask`, gated per element, and project."""
    N, K, H = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    T, eps = len(x), config["rms_norm_eps"]
    q, gate = np.split((x @ w["q_proj.weight"].T).reshape(T, N, 2 * H), 2, axis=-1)
    k = (x @ w["k_proj.weight"].T).reshape(T, K, H)
    v = (x @ w["v_proj.weight"].T).reshape(T, K, H)
    q = rope(rms_norm(q, w["q_norm.weight"], eps), positions, config)
    k = rope(rms_norm(k, w["k_norm.weight"], eps), positions, config)
    k, v = (np.repeat(part, N // K, axis=1) for part in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) * H**-0.5
    weights = softmax(np.where(mask[None], scores, -np.inf))
    out = np.einsum("nts,snh->tnh", weights, v) * sigmoid(gate)
    return out.reshape(T, -1) @ w["o_proj.weight"].T


def gated_mlp(x: Float[np.ndarray, "T D"], w: Weights) -> np.ndarray:
    """down(silu(gate x) * up x)."""
    gate, up = x @ w["gate_proj.weight"].T, x @ w["up_proj.weight"].T
    return (silu(gate) * up) @ w["down_proj.weight"].T


def mixture_of_experts(x: Float[np.ndarray, "T D"], w: Weights, config: dict) -> np.ndarray:
    """Add the weighted outputs of the top experts and of the gated shared expert."""
    probs = softmax(x @ w["gate.weight"].T)
    chosen = np.argsort(-probs, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    weights = np.take_along_axis(probs, chosen, axis=-1)
    if config["model_type"] == "qwen3_5_moe_text" or config.get("norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdims=True)
    out = sigmoid(x @ w["shared_expert_gate.weight"].T) * gated_mlp(x, scoped(w, "shared_expert."))
    for expert in range(config["num_experts"]):
        rows, ranks = np.nonzero(chosen == expert)
        gate, up = np.split(x[rows] @ w["experts.gate_up_proj"][expert].T, 2, axis=-1)
        y = (silu(gate) * up) @ w["experts.down_proj"][expert].T
        # A row chooses an expert at most once, so no index repeats.
        out[rows] += weights[rows, ranks][:, None] * y
    return out


def feed_forward(x: Float[np.ndarray, "T D"], w: Weights, config: dict) -> np.ndarray:
    """Apply the MLP that the family has."""
    if config["model_type"] == "qwen3_5_text":
        return gated_mlp(x, w)
    return mixture_of_experts(x, w, config)
