"""The model configs under tests/vectors, by name."""

import json
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parent / "vectors"
TINY = sorted(path.stem for path in (VECTORS / "configs").glob("*.json"))
REAL = sorted(path.stem for path in (VECTORS / "real_configs").glob("*.json"))
# Draft models, which are not text models.
DRAFTS = ("RadixArk-Qwen3.8-27B-DSpark", "z-lab-Qwen3.8-27B-DFlash2")
REAL_TEXT = [name for name in REAL if name not in DRAFTS]


def hf_config(name: str) -> dict[str, Any]:
    """Return a fresh copy of a config, tiny or real."""
    folder = "configs" if name in TINY else "real_configs"
    return json.loads((VECTORS / folder / f"{name}.json").read_text(encoding="utf-8"))
