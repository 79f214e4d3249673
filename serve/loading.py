"""What an engine starts from: the arguments' configuration, the weights, kept programs."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.weights import dummy_params, load_checkpoint
from serve.engine_config import EngineConfig
from serve.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

AUTO = "auto"
DEFAULT_CACHE = Path.home() / ".cache" / "qwen-hybrid" / "compiled"
LOAD_FORMATS = ("auto", "dummy")


def engine_config(capacities: dict[str, Any]) -> EngineConfig:
    """The configuration of some fields of `EngineConfig`.

    Raises:
      ValueError: an unknown name or a bad value.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(capacities) - known)
    if unknown:
        raise ValueError(f"unknown engine argument {unknown[0]!r}; known are {sorted(known)}")
    return EngineConfig(**capacities)


def load_model(
    directory: Path, tokenizer: Tokenizer | None, *, load_format: str, dtype: str
) -> tuple[HybridConfig, Any, str]:
    """Configuration, parameters and the activation type of a model directory.

    Args:
      tokenizer: of the model; None where it is not wanted.
      load_format: `auto` reads the weights, `dummy` makes random ones.
      dtype: `auto` is the checkpoint's.

    Raises:
      ValueError: a bad checkpoint, or the tokenizer has ids that the model has not.
    """
    config = HybridConfig.from_directory(directory)
    _require_same_vocabulary(tokenizer, config)
    resolved = config.dtype if dtype == AUTO else dtype
    if load_format == "dummy":
        return config, dummy_params(config, dtype=resolved, seed=0), resolved
    checkpoint = load_checkpoint(directory, config, dtype=resolved)
    for note in checkpoint.notes:
        _log.warning("%s", note)
    return checkpoint.config, checkpoint.params, resolved


def _require_same_vocabulary(tokenizer: Tokenizer | None, config: HybridConfig) -> None:
    if tokenizer is None:
        return
    largest = max(tokenizer.backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {largest}, the model's vocabulary ends at "
            f"{config.vocab_size - 1}: they do not belong together"
        )


def use_compilation_cache(chosen: str | Path | None) -> None:
    """Keep compiled programs in a directory.

    Args:
      chosen: None keeps none, "auto" is what JAX is configured for, else a folder at home.

    Raises:
      ValueError: it cannot be made.
    """
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if chosen is None or (chosen == AUTO and configured):
        return
    directory = DEFAULT_CACHE if chosen == AUTO else Path(chosen)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compilation_cache_dir {directory} cannot be made ({error}); None keeps no programs"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
