"""Small DSpark drafters of every kind, each beside the embedding and head of a target."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dense import dense
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.params import ParamTree
from spec.dspark import random_draft, save_draft
from tests.oracles.dspark import NumpyDrafter

COMMON: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 159,
    "markov_rank": 8,
}
# Every kind of head, layer and block, spread over three drafters.
CASES: dict[str, dict[str, Any]] = {
    "vanilla": COMMON
    | {
        "block_size": 7,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "gated": COMMON
    | {
        "block_size": 4,
        "markov_head_type": "gated",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 21,
        "enable_confidence_head": True,
        "confidence_head_with_markov": False,
        "confidence_temperatures": [1.0, 1.5, 2.0, 0.5],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "rnn": COMMON
    | {
        "block_size": 3,
        "markov_head_type": "rnn",
        "sample_from_anchor": False,
        "is_causal": True,
        "layer_types": ["full_attention", "sliding_attention"],
        # Fewer than the rows of a block.
        "sliding_window": 2,
        "target_layer_ids": [-1, 1, 3],
        "target_stream_reduction": "mean",
    },
}


class Case:
    """One drafter, its parameters on disk, and what it borrows of a target."""

    def __init__(self, name: str, directory: Path) -> None:
        self.hf_config = CASES[name]
        self.config = DSparkConfig.from_hf(self.hf_config)
        self.directory = directory / name
        params = random_draft(self.config, jax.random.key(len(name)), dtype="float32")
        self.params = _stirred(params)
        save_draft(self.directory, self.hf_config, self.params, dtype="float32")
        rng = np.random.default_rng(5)
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.embedding = rng.normal(size=shape).astype(np.float32)
        self.target_head = (rng.normal(size=shape) / np.sqrt(shape[1])).astype(np.float32)
        self.oracle = NumpyDrafter(self.directory, self.embedding, self.target_head)

    def draw_taps(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Tapped rows of a sequence."""
        return rng.normal(size=(length, self.config.tap_width)).astype(np.float32)

    def embed(self, dtype: str) -> Callable:
        """The target's embedding in an activation dtype."""
        table = jnp.asarray(self.embedding).astype(dtype)
        return lambda ids: table[ids]

    def head(self) -> Callable:
        """The target's head."""
        return lambda hidden: dense(hidden, jnp.asarray(self.target_head))


def _stirred(params: ParamTree) -> ParamTree:
    """Move norms, biases and the Markov table away from what leaves them unseen."""
    flat, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(flat))
    stirred = [
        p + (0.3 if p.ndim == 1 else 0.2) * jax.random.normal(k, p.shape)
        for p, k in zip(flat, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, stirred)


@functools.cache
def case_of(name: str, directory: Path) -> Case:
    """One drafter for all tests of a session."""
    return Case(name, directory)
