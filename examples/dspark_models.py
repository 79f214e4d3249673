"""Architectures of small DSpark drafters, made to fit a target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_hybrid.config import HybridConfig

ROOT = Path(__file__).parents[1]
DEMOS = ROOT / "qwen_hybrid" / "demos"
MAX_LENGTH = 32768


@dataclass(frozen=True)
class Sizes:
    """What is chosen; the rest follows from the target.

    Attributes:
      block_size: Drafts of a block.
      layers: Decoder layers.
      intermediate: Width of the MLPs.
      rank: Rank of the Markov head.
      heads: Query heads; half as many key heads.
    """

    block_size: int = 7
    layers: int = 2
    intermediate: int = 512
    rank: int = 48
    heads: int = 4


def target_directory(name: str) -> Path:
    """Return the directory of a target: a demo's by name, any other as it is."""
    return DEMOS / name if (DEMOS / name).is_dir() else Path(name)


def tapped_layers(num_layers: int) -> list[int]:
    """Return an early, a middle and a late layer, the last one left out."""
    return sorted({min(1, num_layers - 1), num_layers // 2, max(num_layers - 2, 0)})


def draft_config(target: HybridConfig, name: str, mask_token_id: int, sizes: Sizes) -> dict:
    """Return the content of a drafter's config.json.

    Args:
      target: Architecture of the target.
      name: What the target is called; kept in the config.
      mask_token_id: Token that stands for the drafts to come.
      sizes: What is chosen.
    """
    config: dict[str, Any] = {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "target_model": name,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": max(sizes.heads // 2, 1),
        "head_dim": target.hidden_size // sizes.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LENGTH,
        "block_size": sizes.block_size,
        "mask_token_id": mask_token_id,
        "num_target_layers": target.num_layers,
        "target_layer_ids": tapped_layers(target.num_layers),
        "markov_rank": sizes.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
    }
    if target.hyper_connection is not None:
        config["target_stream_reduction"] = "mean"
    return config
