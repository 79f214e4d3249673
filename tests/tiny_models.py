"""Model directories small enough to compile in seconds, weights left out."""

import json
from pathlib import Path
from typing import Any

from tests.serve import tokenizer_files
from tests.vector_configs import hf_config

VOCAB_SIZE = 432


def two_layers(name: str) -> dict[str, Any]:
    """A vector config cut down to a linear and an attention layer, n-gram rows in the first."""
    config = hf_config(name) | {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    if "ple_layer_ids" in config:
        config["ple_layer_ids"] = [1]
    return config


def write(directory: Path, config: dict[str, Any]) -> Path:
    """Write a directory that dummy weights can be drawn for."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def write_with_tokenizer(directory: Path, config: dict[str, Any]) -> Path:
    """The same with a tokenizer whose every id the model has."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_files.write(directory)
    return write(directory, config | {"vocab_size": VOCAB_SIZE})
