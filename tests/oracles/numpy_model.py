"""An independent float64 model of all three families and of both MTP heads.

Written from the equations, over whole sequences, with the recurrent form of the delta rule. It
reads Hugging Face directories and is the only oracle of the `qwen4_exp` MTP head.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from transformers import AutoConfig

from tests.oracles import numpy_qwen4 as qwen4
from tests.oracles.numpy_layers import (
    Weights,
    feed_forward,
    gated_attention,
    gated_delta_net,
    rms_norm,
    scoped,
)


def load_weights(directory: Path) -> Weights:
    """Read a checkpoint as float64, experts and n-gram shards joined, prefixes dropped."""
    weights: Weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, the handle is not a mapping
                tensor = tensors.get_tensor(name)
                array = tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
                for prefix in ("model.language_model.", "model."):
                    name = name.removeprefix(prefix)
                weights[name] = array
    return _joined_shards(_joined_experts(weights))


def _joined_experts(weights: Weights) -> Weights:
    """Stack per-expert matrices as the fused names hold them: gate rows above up rows."""
    for first in [name for name in weights if name.endswith("experts.0.gate_proj.weight")]:
        prefix = first.removesuffix("0.gate_proj.weight")
        parts = {kind: [] for kind in ("gate", "up", "down")}
        while f"{prefix}{len(parts['gate'])}.gate_proj.weight" in weights:
            expert = len(parts["gate"])
            for kind, found in parts.items():
                found.append(weights.pop(f"{prefix}{expert}.{kind}_proj.weight"))
        gate_up = np.concatenate([np.stack(parts["gate"]), np.stack(parts["up"])], axis=1)
        weights[f"{prefix}gate_up_proj"] = gate_up
        weights[f"{prefix}down_proj"] = np.stack(parts["down"])
    return weights


def _joined_shards(weights: Weights) -> Weights:
    """Concatenate the shards of each n-gram table in numeric order."""
    for first in [name for name in weights if name.endswith("ngram_embedding.shard_0.weight")]:
        prefix = first.removesuffix("shard_0.weight")
        shards = []
        while f"{prefix}shard_{len(shards)}.weight" in weights:
            shards.append(weights.pop(f"{prefix}shard_{len(shards)}.weight"))
        weights[f"{prefix}weight"] = np.concatenate(shards)
    return weights


@dataclass(frozen=True)
class Outputs:
    """Results for every row of one sequence.

    Attributes:
        logits: scores of the next token.
        hidden: what the head read.
        carried: what an MTP head takes as the target's hidden row, and what it feeds itself:
            `hidden`, or in `qwen4_exp` the streams before the output mixer.
        selections: for each QSA layer index, the tokens that each query may attend to.
        score_gaps: for each QSA layer index, the smallest difference at any query between the
            last group kept and the first one dropped; infinite if none is dropped.
    """

    logits: Float[np.ndarray, "T V"]
    hidden: Float[np.ndarray, "T D"]
    carried: Float[np.ndarray, "T C"]
    selections: dict[int, Bool[np.ndarray, "T T"]]
    score_gaps: dict[int, float]


class NumpyModel:
    """The model of one checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        # Read through transformers, which fills in the defaults that a checkpoint may leave out.
        self.config = AutoConfig.from_pretrained(directory).to_dict()
        self.weights = load_weights(directory)
        self._is_qwen4 = self.config["model_type"] == "qwen4_exp_text"

    def run(self, ids: Int[np.ndarray, " T"]) -> Outputs:
        """Compute every row of one sequence."""
        x = self.weights["embed_tokens.weight"][ids]
        if self._is_qwen4:
            x = np.tile(x, (1, self.config["hc_count"]))
        recorder = _Selections(self.config)
        positions = np.arange(len(ids))
        for layer, kind in enumerate(self.config["layer_types"]):
            w = scoped(self.weights, f"layers.{layer}.")
            if layer + 1 in (ple := sorted(set(self.config.get("ple_layer_ids") or []))):
                rank = ple.index(layer + 1)
                x = x + qwen4.per_layer_embedding(x, ids, scoped(w, "ple."), self.config, rank)
            is_gdn = kind == "linear_attention"
            x = self._layer(x, w, recorder, layer, positions=None if is_gdn else positions)
        return self._outputs(x, self.weights, recorder)

    def mtp(
        self,
        next_ids: Int[np.ndarray, " T"],
        carried: Float[np.ndarray, "T C"],
        *,
        first_position: int = 1,
    ) -> Outputs:
        """Compute every row of the MTP head.

        Args:
            next_ids: the token after each row.
            carried: the target's `Outputs.carried`; for a row that the head feeds itself, the
                carried row that it returned for the row before.
            first_position: rotary position of the first row. Only differences matter.
        """
        w = scoped(self.weights, "mtp.")
        embedded = rms_norm(
            self.weights["embed_tokens.weight"][next_ids],
            w["pre_fc_norm_embedding.weight"],
            self.config["rms_norm_eps"],
        )
        # One norm over the whole row, also when it holds several streams.
        rows = rms_norm(carried, w["pre_fc_norm_hidden.weight"], self.config["rms_norm_eps"])
        if self._is_qwen4:
            streams = rows.reshape(len(rows), self.config["hc_count"], -1)
            x = (embedded @ w["fc_embedding.weight"].T)[:, None] + streams @ w["fc_hidden.weight"].T
            x = x.reshape(rows.shape)
        else:
            x = np.concatenate([embedded, rows], axis=-1) @ w["fc.weight"].T
        recorder = _Selections(self.config)
        positions = np.arange(len(next_ids)) + first_position
        x = self._layer(x, scoped(w, "layers.0."), recorder, 0, positions=positions)
        return self._outputs(x, w, recorder)

    def mtp_drafts(
        self, next_ids: Int[np.ndarray, " T"], carried: Float[np.ndarray, "T C"], *, count: int
    ) -> list[Outputs]:
        """Draft greedily after the last row, the head feeding itself from the second draft on.

        Returns:
            For each draft all rows so far; the draft is the argmax of the last one.
        """
        drafts = []
        for _ in range(count):
            out = self.mtp(next_ids, carried)
            drafts.append(out)
            next_ids = np.append(next_ids, out.logits[-1].argmax())
            carried = np.concatenate([carried, out.carried[-1:]])
        return drafts

    def _layer(
        self,
        x: np.ndarray,
        w: Weights,
        recorder: "_Selections",
        layer: int,
        *,
        positions: Int[np.ndarray, " T"] | None,
    ) -> np.ndarray:
        """Apply one decoder layer; no positions: a GDN layer."""
        for norm, hyper, sublayer in (
            ("input_layernorm.weight", "attn_hyper_connection.", self._mixer),
            ("post_attention_layernorm.weight", "mlp_hyper_connection.", self._mlp),
        ):
            if self._is_qwen4:
                hyper_w = scoped(w, hyper)
                read, normed = qwen4.hyper_read(x, hyper_w, self.config)
                y = sublayer(read, w, recorder, layer, positions)
                x = qwen4.hyper_add(x, normed, y, hyper_w, self.config)
            else:
                read = rms_norm(x, w[norm], self.config["rms_norm_eps"])
                x = x + sublayer(read, w, recorder, layer, positions)
        return x

    def _mixer(self, read, w: Weights, recorder: "_Selections", layer: int, positions):
        if positions is None:
            return gated_delta_net(read, scoped(w, "linear_attn."), self.config)
        attention = scoped(w, "self_attn.")
        mask = np.tri(len(read), dtype=bool)
        if self._is_qwen4:
            mask = recorder.select(read, scoped(attention, "indexer."), layer, positions)
        return gated_attention(read, attention, self.config, positions=positions, mask=mask)

    def _mlp(self, read, w: Weights, recorder: "_Selections", layer: int, positions):
        del recorder, layer, positions
        return feed_forward(read, scoped(w, "mlp."), self.config)

    def _outputs(self, x: np.ndarray, w: Weights, recorder: "_Selections") -> Outputs:
        """Read the rows out with the final norm or mixer of `w` and the shared head."""
        if self._is_qwen4:
            mixer = scoped(w, "hyper_connection_mixer.")
            hidden, _ = qwen4.hyper_read(x, mixer, self.config)
        else:
            hidden = rms_norm(x, w["norm.weight"], self.config["rms_norm_eps"])
        tied = self.weights["embed_tokens.weight"]
        return Outputs(
            logits=hidden @ self.weights.get("lm_head.weight", tied).T,
            hidden=hidden,
            carried=x if self._is_qwen4 else hidden,
            selections=recorder.masks,
            score_gaps=recorder.gaps,
        )


class _Selections:
    """Computes the selection of each QSA layer and keeps it."""

    def __init__(self, config: dict) -> None:
        self._config = config
        self.masks: dict[int, np.ndarray] = {}
        self.gaps: dict[int, float] = {}

    def select(self, read, w: Weights, layer: int, positions) -> Bool[np.ndarray, "T T"]:
        """Return the token mask of one layer and record it."""
        scores = qwen4.qsa_group_scores(read, w, self._config, positions=positions)
        self.masks[layer] = qwen4.qsa_token_mask(scores, self._config)
        self.gaps[layer] = qwen4.smallest_gap(scores, self._config)
        return self.masks[layer]
