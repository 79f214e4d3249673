"""Parameters of a DSpark draft model: declared once, read from and written to directories.

The tree follows the published tensor names with ``.weight`` dropped. Embedding and head are the
target's and not part of it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array

from qwen_hybrid.checkpoint_files import (
    SINGLE_FILE,
    CheckpointError,
    TensorEntry,
    TensorReader,
    read_directory,
)
from qwen_hybrid.checkpoint_names import Piece, Planner
from qwen_hybrid.checkpoint_source import read_param
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.host_memory import check_fits
from qwen_hybrid.initializers import random_array
from qwen_hybrid.params import (
    ACTIVATION,
    FLOAT32,
    ParamSpec,
    ParamTree,
    abstract_params,
    leaves,
    num_bytes,
    set_leaf,
)
from qwen_hybrid.prepare import prepare
from qwen_hybrid.progress import ProgressBar

CONFIG_FILE = "config.json"
PREFIX = "model."
# Other writers' names of two modules.
ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
# The target's, or derived from the config.
SKIPPED_MODULES = ("lm_head.", "embed_tokens.", "rotary_emb.")
DTYPES = ("float32", "bfloat16")


def _matrix(name: str, out: tuple[int, str], inner: tuple[int, str]) -> ParamSpec:
    return ParamSpec((out[0], inner[0]), ACTIVATION, (out[1], inner[1]), f"{name}.weight", "normal")


def _norm(name: str, size: int, axis: str = "embed") -> ParamSpec:
    """Declare a plain norm weight: not zero-centred, unlike the target's."""
    return ParamSpec((size,), ACTIVATION, (axis,), f"{name}.weight", "ones")


def _layer_specs(config: DSparkConfig, prefix: str) -> ParamTree:
    embed, mlp = (config.hidden_size, "embed"), (config.intermediate_size, "mlp")
    queries = (config.num_heads * config.head_dim, "heads")
    keys = (config.num_kv_heads * config.head_dim, "kv_heads")
    attention, feed = f"{prefix}self_attn.", f"{prefix}mlp."
    return {
        "input_layernorm": _norm(f"{prefix}input_layernorm", embed[0]),
        "post_attention_layernorm": _norm(f"{prefix}post_attention_layernorm", embed[0]),
        "self_attn": {
            "q_proj": _matrix(f"{attention}q_proj", queries, embed),
            "k_proj": _matrix(f"{attention}k_proj", keys, embed),
            "v_proj": _matrix(f"{attention}v_proj", keys, embed),
            "o_proj": _matrix(f"{attention}o_proj", embed, queries),
            "q_norm": _norm(f"{attention}q_norm", config.head_dim, "head_dim"),
            "k_norm": _norm(f"{attention}k_norm", config.head_dim, "head_dim"),
        },
        "mlp": {
            "gate_proj": _matrix(f"{feed}gate_proj", mlp, embed),
            "up_proj": _matrix(f"{feed}up_proj", mlp, embed),
            "down_proj": _matrix(f"{feed}down_proj", embed, mlp),
        },
    }


def _markov_specs(config: DSparkConfig) -> ParamTree:
    """Declare the head that conditions a draft on the token before it."""
    prefix, rank = "markov_head.", (config.markov_rank, "rank")
    table = (config.vocab_size, "vocab")
    first = _matrix(f"{prefix}markov_w1", table, rank)
    specs: ParamTree = {
        "markov_w1": ParamSpec(first.shape, first.dtype, first.axes, first.name, "embedding"),
        "markov_w2": _matrix(f"{prefix}markov_w2", table, rank),
    }
    if config.markov_head_type == "gated":
        width = (config.hidden_size + rank[0], "embed_rank")
        specs["gate_proj"] = _affine(f"{prefix}gate_proj", rank, width, ACTIVATION)
    if config.markov_head_type == "rnn":
        width = (config.hidden_size + 2 * rank[0], "embed_rank")
        # Rows of the gate, of the candidate, of the output.
        specs["joint_proj"] = _affine(
            f"{prefix}joint_proj", (3 * rank[0], "ranks"), width, ACTIVATION
        )
    return specs


def _affine(name: str, out: tuple[int, str], inner: tuple[int, str], dtype: str) -> ParamTree:
    shape, axes = (out[0], inner[0]), (out[1], inner[1])
    return {
        "weight": ParamSpec(shape, dtype, axes, f"{name}.weight", "normal"),
        "bias": ParamSpec((out[0],), dtype, (out[1],), f"{name}.bias", "zeros"),
    }


def dspark_specs(config: DSparkConfig) -> ParamTree:
    """Declare a whole draft model; names are those on disk."""
    embed = (config.hidden_size, "embed")
    specs: ParamTree = {
        "fc": _matrix("fc", embed, (config.tap_width, "taps")),
        "hidden_norm": _norm("hidden_norm", embed[0]),
    }
    for index in range(config.num_layers):
        specs[f"layers_{index}"] = _layer_specs(config, f"layers.{index}.")
    specs["norm"] = _norm("norm", embed[0])
    specs["markov_head"] = _markov_specs(config)
    if config.has_confidence_head:
        width = config.hidden_size + config.markov_rank * config.confidence_reads_markov
        specs["confidence_head"] = _affine(
            "confidence_head.proj", (1, "one"), (width, "embed_rank"), FLOAT32
        )
    return specs


def random_draft(config: DSparkConfig, key: Array, *, dtype: str) -> ParamTree:
    """Return random parameters, for tests and for the start of training."""
    params: ParamTree = {}
    flat = list(leaves(dspark_specs(config)))
    for (path, spec), own in zip(flat, jax.random.split(key, len(flat)), strict=True):
        set_leaf(params, path, random_array(spec, own, dtype))
    return params


def prepare_draft(params: ParamTree) -> ParamTree:
    """Return the tree in the form that the CPU's operators compute with; see `prepare`."""
    table = params["markov_head"]["markov_w1"]
    prepared = prepare(params)
    # Read row by row, not multiplied.
    markov = {**prepared["markov_head"], "markov_w1": table.astype(jnp.float32)}
    return {**prepared, "markov_head": markov}


def read_draft_config(directory: str | Path) -> DSparkConfig:
    """Return the architecture of a draft model's directory.

    Raises:
        CheckpointError: no readable ``config.json``.
        NotImplementedError: another draft architecture.
        ValueError: a missing or impossible key; the message names it and the file.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return DSparkConfig.from_hf(keys)
    except NotImplementedError as error:
        raise NotImplementedError(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_draft(
    directory: str | Path, config: DSparkConfig, *, dtype: str, progress: bool | None = None
) -> ParamTree:
    """Load the parameters of a draft model, tensor by tensor.

    Args:
        directory: holds an index with its files, or one safetensors file.
        config: as `read_draft_config` returns it.
        dtype: the target's activation dtype, "float32" or "bfloat16".
        progress: whether to show a progress bar; None shows it on a terminal.

    Raises:
        CheckpointError: missing, surplus, misshaped or quantised tensors; unreadable, truncated or
            damaged files. The message names the file and the tensors.
        MemoryError: the weights do not fit.
    """
    directory = Path(directory)
    listing, tensors = read_directory(directory)
    planner = Planner(listing, _by_canonical_name(tensors), _prefix(tensors))
    specs = dspark_specs(config)
    entries = {path: planner.take(spec.name, spec.shape) for path, spec in leaves(specs)}
    planner.finish()
    needed = num_bytes(specs, dtype)
    check_fits(needed, f"loading {directory} in {dtype}")
    params: ParamTree = {}
    with TensorReader() as reader, ProgressBar("loading", needed, is_shown=progress) as bar:
        for path, spec in leaves(specs):
            entry = entries[path]
            assert entry is not None, "finish raises if a tensor is missing"
            resolved = jnp.dtype(spec.resolved_dtype(dtype))
            pieces = [Piece(entry, 0)]
            values = read_param(pieces, spec, resolved, reader=reader, bar=bar)
            set_leaf(params, path, jax.device_put(values))
    return params


def _by_canonical_name(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        canonical = name.removeprefix(PREFIX)
        for alias, module in ALIASES.items():
            if canonical.startswith(alias):
                canonical = module + canonical.removeprefix(alias)
        if canonical.startswith(SKIPPED_MODULES) or ".rotary_emb." in canonical:
            continue
        if canonical in found:
            raise CheckpointError(f"{entry} duplicates {found[canonical]}")
        found[canonical] = entry
    return found


def _prefix(tensors: Mapping[str, TensorEntry]) -> str:
    """Return what this writer puts before its names, for messages."""
    return PREFIX if any(name.startswith(PREFIX) for name in tensors) else ""


def save_draft(
    directory: str | Path, hf_config: Mapping[str, Any], params: ParamTree, *, dtype: str
) -> None:
    """Write a draft model's directory: ``config.json`` and one safetensors file.

    Args:
        directory: made if absent; files of the same names are replaced.
        hf_config: content of ``config.json``; its dtype is set.
        params: parameter tree of that config.
        dtype: "float32" or "bfloat16"; the confidence head stays float32.

    Raises:
        ValueError: the tree is not that of the config.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    specs = dspark_specs(DSparkConfig.from_hf(hf_config))
    declared = {path: leaf.shape for path, leaf in leaves(abstract_params(specs, dtype))}
    given = {path: tuple(value.shape) for path, value in leaves(params)}
    if declared != given:
        wrong = sorted({*declared.items()} ^ {*given.items()})
        raise ValueError(f"parameters do not fit the config: {wrong[:5]}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    values = dict(leaves(params))
    tensors = {
        spec.name: np.asarray(values[path]).astype(jnp.dtype(spec.resolved_dtype(dtype)))
        for path, spec in leaves(specs)
    }
    safetensors.numpy.save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    text = json.dumps({**hf_config, "dtype": dtype}, indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
