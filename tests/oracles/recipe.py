"""The weights, tokens and checkpoints that every oracle runs on.

Nothing here is trained: weights come from a seeded generator, scaled so that every mechanism of
the model moves the logits. The sums and logits that this recipe must give, with torch 2.13 and
transformers 5.24, are recorded in `test_transformers_oracle.py`.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

# The models are so small that a second thread only waits, and waits long on a busy machine.
torch.set_num_threads(1)

CONFIG_DIR = Path(__file__).resolve().parents[1] / "vectors" / "configs"
CONFIG_NAMES = (
    "q35_dense",
    "q35_dense_ratio3_tied",
    "q35_moe",
    "q4_full_budget",
    "q4_qsa",
    "q4_ple",
    "q4_all",
    "q4_odd",
    "q4_mtp_layer",
    "q35_dense_mtp",
    "q35_moe_mtp",
)

_CLASSES = {
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen4_exp_text": (transformers.Qwen4ExpTextConfig, transformers.Qwen4ExpForCausalLM),
}


def config_dict(name: str) -> dict:
    """Read the JSON of one small configuration."""
    return json.loads((CONFIG_DIR / f"{name}.json").read_text())


def _scaled(name: str, r: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Scale the normal sample `r` as the parameter `name` needs it."""
    if name.endswith("A_log"):
        return torch.log(7.5 * torch.rand(r.shape, generator=generator) + 0.5)
    if name.endswith("dt_bias"):
        return 0.5 * r - 1
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * r
    if r.ndim == 1:
        return 0.2 * r
    if "conv1d" in name:
        return 0.5 * r
    if "embed_tokens" in name or "ngram_embedding" in name:
        return r
    # Sharper routers and heads, so that ties and flat distributions stay rare.
    sharp = ("mlp.gate.weight", "block_inject", "lm_head")
    gain = 2 if any(part in name for part in sharp) else 1
    return gain * r / math.sqrt(r.shape[-1])


def sample_weights(
    shapes: Iterable[tuple[str, torch.Size]], *, seed: int
) -> dict[str, torch.Tensor]:
    """Draw one tensor for each name, in the order of the sorted names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _scaled(name, torch.randn(shape, generator=generator), generator)
        for name, shape in sorted(shapes)
    }


def build_model(config: dict) -> transformers.PreTrainedModel:
    """Build the float32 transformers model of `config` with the weights of seed 0."""
    config_class, model_class = _CLASSES[config["model_type"]]
    keys = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    model = model_class(config_class(**keys)).float().eval()
    shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    weights = sample_weights(shapes, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def sample_tokens(config: dict, length: int = 150) -> np.ndarray:
    """Draw ids with a repeated span and with end-of-text ids, some of them adjacent."""
    generator = torch.Generator().manual_seed(1000)
    ids = torch.randint(12, config["vocab_size"], (1, 150), generator=generator)[0].numpy()
    ids[20:26] = ids[5:11]
    eos = config["eos_token_id"]
    ids[[3, 30, 31, 33, 60, 64]] = eos[0] if isinstance(eos, list) else eos
    return ids[:length]


def _mtp_shapes(model: transformers.PreTrainedModel) -> list[tuple[str, torch.Size]]:
    """List checkpoint names and shapes of the MTP head that belongs to `model`.

    Its layer repeats the last attention layer of the target (without PLE).
    """
    state = {name: tensor.shape for name, tensor in model.named_parameters()}
    last = max(int(name.split(".")[2]) for name in state if ".self_attn.q_proj" in name)
    source = f"model.layers.{last}."
    shapes = [
        (f"mtp.layers.0.{name.removeprefix(source)}", shape)
        for name, shape in state.items()
        if name.startswith(source) and ".ple." not in name
    ]
    hidden = model.config.hidden_size
    shapes.append(("mtp.pre_fc_norm_embedding.weight", torch.Size([hidden])))
    if model.config.model_type != "qwen4_exp_text":
        shapes += [
            ("mtp.pre_fc_norm_hidden.weight", torch.Size([hidden])),
            ("mtp.fc.weight", torch.Size([hidden, 2 * hidden])),
            ("mtp.norm.weight", torch.Size([hidden])),
        ]
        return shapes
    mixer = "model.hyper_connection_mixer."
    shapes += [
        (f"mtp.hyper_connection_mixer.{name.removeprefix(mixer)}", shape)
        for name, shape in state.items()
        if name.startswith(mixer)
    ]
    shapes += [
        ("mtp.pre_fc_norm_hidden.weight", torch.Size([hidden * model.config.hc_count])),
        ("mtp.fc_embedding.weight", torch.Size([hidden, hidden])),
        ("mtp.fc_hidden.weight", torch.Size([hidden, hidden])),
    ]
    return shapes


def save_checkpoint(config: dict, directory: Path, *, dtype: torch.dtype) -> Path:
    """Write the model of `config` as a Hugging Face directory and return the directory.

    With `num_mtp_layers` in the configuration, the MTP head is added under its official names,
    with the weights of seed 1 (transformers itself never writes it).
    """
    model = build_model(config)
    mtp = {}
    if config.get("num_mtp_layers"):
        mtp = sample_weights(_mtp_shapes(model), seed=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(directory)
    if mtp:
        file = directory / "model.safetensors"
        tensors = load_file(file) | {name: tensor.to(dtype) for name, tensor in mtp.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return directory


class Checkpoints:
    """Checkpoint directories below one temporary root, each written on first use.

    The root belongs to the test session; nothing here deletes it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def directory(self, name: str, dtype: str = "float32", *, mtp: bool = False) -> Path:
        """Return the directory of a configuration with weights stored as `dtype`.

        Args:
            name: one of `CONFIG_NAMES`.
            dtype: "float32" or "bfloat16".
            mtp: add an MTP head, for a configuration that has none.
        """
        config = config_dict(name)
        if mtp and not config.get("num_mtp_layers"):
            config |= {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
        target = self._root / "-".join([name, dtype, *(["mtp"] if mtp else [])])
        if not (target / "config.json").exists():
            save_checkpoint(config, target, dtype=getattr(torch, dtype))
        return target
