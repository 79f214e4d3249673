"""An independent float64 DSpark drafter, written from its equations.

It reads a draft model's directory. The target is a table of embeddings, a head and tapped rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import transformers
from jaxtyping import Bool, Float, Int
from safetensors.numpy import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.oracles.numpy_layers import Weights, gated_mlp, scoped, sigmoid, softmax


def plain_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / rms(x) weight."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def official_rotary(config: dict) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor on cosine and sine, as transformers computes them."""
    keys = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    rope = dict(config.get("rope_scaling") or {}) | {"rope_theta": config["rope_theta"]}
    rope.setdefault("rope_type", "default")
    if rope["rope_type"] == "default":
        half = config["head_dim"] // 2
        return config["rope_theta"] ** (-np.arange(half) / half), 1.0
    official = transformers.Qwen3Config(**{key: config[key] for key in keys}, rope_parameters=rope)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](official)
    return frequencies.double().numpy(), float(factor)


@dataclass(frozen=True)
class Drafted:
    """What one block gives.

    Attributes:
        logits: of each draft, after the Markov head.
        confidence: raw confidence logits; infinite without a head.
        tokens: what followed each row.
    """

    logits: Float[np.ndarray, "R V"]
    confidence: Float[np.ndarray, " R"]
    tokens: Int[np.ndarray, " R"]


class NumpyDrafter:
    """The draft model of one directory, beside a target's embedding and head."""

    def __init__(self, directory: Path, embedding: np.ndarray, head: np.ndarray) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        self.weights = {name: array.astype(np.float64) for name, array in tensors.items()}
        self.embedding, self.head = embedding.astype(np.float64), head.astype(np.float64)
        self._frequencies, self._factor = official_rotary(self.config)

    def block(
        self, taps: Float[np.ndarray, "S C"], token: int, follow: Int[np.ndarray, " R"] | None
    ) -> Drafted:
        """Draft after a context.

        Args:
            taps: tapped rows of every token before the anchor.
            token: the anchor.
            follow: the tokens that the drafts are followed by; None for the likeliest.
        """
        c, w = self.config, self.weights
        gamma, eps = c["block_size"], c["rms_norm_eps"]
        from_anchor = c.get("sample_from_anchor", True)
        rows = gamma if from_anchor else gamma + 1
        context = plain_norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        x = self.embedding[[token] + [c["mask_token_id"]] * (rows - 1)]
        for index in range(c["num_hidden_layers"]):
            layer = scoped(w, f"layers.{index}.")
            h = plain_norm(x, layer["input_layernorm.weight"], eps)
            x = x + self._attention(h, context, scoped(layer, "self_attn."), index)
            h = plain_norm(x, layer["post_attention_layernorm.weight"], eps)
            x = x + gated_mlp(h, scoped(layer, "mlp."))
        hidden = plain_norm(x, w["norm.weight"], eps)[rows - gamma :]
        return self._heads(hidden, token, follow)

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        angle = positions[:, None, None] * self._frequencies
        cos, sin = np.cos(angle) * self._factor, np.sin(angle) * self._factor
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def _attention(self, h, context, w: Weights, index: int) -> np.ndarray:
        c = self.config
        heads, kv_heads, width = (
            c[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        start = len(context)
        at = np.arange(start + len(h))
        # Context rows enter as they are; block rows through the layer's own norm.
        read = np.concatenate([context, h])
        key = (read @ w["k_proj.weight"].T).reshape(-1, kv_heads, width)
        key = self._rotate(plain_norm(key, w["k_norm.weight"], c["rms_norm_eps"]), at)
        value = (read @ w["v_proj.weight"].T).reshape(-1, kv_heads, width)
        query = (h @ w["q_proj.weight"].T).reshape(-1, heads, width)
        query = self._rotate(plain_norm(query, w["q_norm.weight"], c["rms_norm_eps"]), at[start:])
        key, value = (np.repeat(x, heads // kv_heads, axis=1) for x in (key, value))
        scores = np.einsum("tnh,snh->nts", query, key) * width**-0.5
        mask = self._mask(start, len(h), index)
        weights = softmax(np.where(mask[None], scores, -np.inf))
        out = np.einsum("nts,snh->tnh", weights, value)
        return out.reshape(len(h), -1) @ w["o_proj.weight"].T

    def _mask(self, start: int, rows: int, index: int) -> Bool[np.ndarray, "T S"]:
        """Which positions each block row may read, row by row."""
        c = self.config
        kind = c.get("layer_types", ["full_attention"] * c["num_hidden_layers"])[index]
        is_causal = c.get("is_causal")
        if is_causal is None:
            is_causal = kind == "sliding_attention"
        mask = np.zeros((rows, start + rows), bool)
        for row in range(rows):
            for position in range(start + rows):
                is_seen = position < start or not is_causal or position <= start + row
                if kind == "sliding_attention":
                    is_seen = is_seen and start + row - position < c["sliding_window"]
                mask[row, position] = is_seen
        return mask

    def _heads(self, hidden: np.ndarray, token: int, follow) -> Drafted:
        w, kind = scoped(self.weights, "markov_head."), self.config["markov_head_type"]
        state = np.zeros(self.config["markov_rank"])
        all_logits, all_confidence, tokens = [], [], []
        previous = token
        for row, z in enumerate(hidden):
            u = w["markov_w1.weight"][previous]
            read = u
            if kind == "gated":
                joined = np.concatenate([z, u])
                read = sigmoid(w["gate_proj.weight"] @ joined + w["gate_proj.bias"]) * u
            if kind == "rnn":
                joint = w["joint_proj.weight"] @ np.concatenate([state, u, z])
                gate, candidate, out = np.split(joint + w["joint_proj.bias"], 3)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
                read = np.tanh(out)
            logits = self.head @ z + w["markov_w2.weight"] @ read
            all_logits.append(logits)
            all_confidence.append(self._confidence(z, u))
            previous = int(logits.argmax()) if follow is None else int(follow[row])
            tokens.append(previous)
        return Drafted(np.stack(all_logits), np.array(all_confidence), np.array(tokens))

    def _confidence(self, z: np.ndarray, u: np.ndarray) -> float:
        if not self.config.get("enable_confidence_head"):
            return np.inf
        read = np.concatenate([z, u]) if self.config["confidence_head_with_markov"] else z
        weight = self.weights["confidence_head.proj.weight"][0]
        return float(weight @ read + self.weights["confidence_head.proj.bias"][0])
