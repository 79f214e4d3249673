"""Weights of a model: loaded from a Hugging Face directory, random, or saved as a directory."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from qwen_hybrid.checkpoint_files import (
    CONVERT_ELEMENTS,
    TensorEntry,
    TensorReader,
    read_directory,
)
from qwen_hybrid.checkpoint_files import CheckpointError as CheckpointError
from qwen_hybrid.checkpoint_names import (
    MTP_PREFIX,
    Piece,
    Plan,
    canonical_name,
    make_plan,
)
from qwen_hybrid.checkpoint_names import QuantizedCheckpointError as QuantizedCheckpointError
from qwen_hybrid.checkpoint_writer import save_hf as save_hf
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dummy import dummy_params as dummy_params
from qwen_hybrid.dummy import resolve_dtype
from qwen_hybrid.host_memory import aligned_empty, check_fits
from qwen_hybrid.params import ParamTree, leaves, model_specs, num_bytes, set_leaf
from qwen_hybrid.progress import ProgressBar


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        config: the architecture as loaded: without an MTP head if the files hold none.
        params: the parameter tree, on the default device.
        notes: facts that the user should hear, such as an MTP head left out.
    """

    config: HybridConfig
    params: ParamTree
    notes: tuple[str, ...]


def load_checkpoint(
    directory: str | Path,
    config: HybridConfig | None = None,
    *,
    dtype: str = "auto",
    progress: bool | None = None,
) -> Checkpoint:
    """Load a Hugging Face directory tensor by tensor.

    Host memory holds the destination and, on its way to the device, one parameter. Vision
    tensors are skipped. An MTP head that the config announces and the files lack (whoever
    re-saves a checkpoint with transformers loses it) is left out and reported.

    Args:
        directory: holds an index with its files, or one safetensors file.
        config: the architecture; None reads the directory's ``config.json``.
        dtype: "float32", "bfloat16", or "auto" for the config's own. Parameters that are
            declared float32 stay float32.
        progress: whether to show a progress bar; None shows it on a terminal.

    Raises:
        CheckpointError: missing, surplus or misshaped tensors, unreadable or truncated files.
        QuantizedCheckpointError: quantised weights.
        MemoryError: the weights do not fit; the message has the needed and available bytes.
    """
    directory = Path(directory)
    config = HybridConfig.from_directory(directory) if config is None else config
    dtype = resolve_dtype(config, dtype)
    listing, tensors = read_directory(directory)
    notes: tuple[str, ...] = ()
    if config.num_mtp_layers and not _has_mtp(tensors):
        config = dataclasses.replace(config, num_mtp_layers=0)
        notes = (f"{listing} has no {MTP_PREFIX}* tensors: the MTP head is left out",)
    specs = model_specs(config)
    plan = make_plan(config, specs, listing=listing, tensors=tensors)
    check_fits(num_bytes(specs, dtype), f"loading {directory} in {dtype}")
    with TensorReader() as reader:
        _check_constants(plan, reader)
        params = _read_params(plan, specs, reader, dtype=dtype, progress=progress)
    return Checkpoint(config, params, notes + plan.notes)


def load_params(
    directory: str | Path,
    config: HybridConfig,
    *,
    dtype: str = "auto",
    progress: bool | None = None,
) -> ParamTree:
    """Return the parameter tree of a Hugging Face directory; see ``load_checkpoint``.

    There is no "mtp" in the tree if the files hold no MTP head.
    """
    return load_checkpoint(directory, config, dtype=dtype, progress=progress).params


def _has_mtp(tensors: Mapping[str, TensorEntry]) -> bool:
    names = (canonical_name(name) for name in tensors)
    return any(name is not None and name.startswith(MTP_PREFIX) for name in names)


def _read_params(
    plan: Plan, specs: ParamTree, reader: TensorReader, *, dtype: str, progress: bool | None
) -> ParamTree:
    params: ParamTree = {}
    with ProgressBar("loading", num_bytes(specs, dtype), is_shown=progress) as bar:
        for path, spec in leaves(specs):
            values = aligned_empty(spec.shape, jnp.dtype(spec.resolved_dtype(dtype)))
            _read_pieces(plan.pieces[path], values.reshape(-1), reader, bar)
            set_leaf(params, path, jax.device_put(values))
    return params


def _read_pieces(
    pieces: list[Piece], values: np.ndarray, reader: TensorReader, bar: ProgressBar
) -> None:
    """Fill a flat parameter in the order of the bytes on disk."""
    for piece in sorted(pieces, key=lambda piece: (piece.entry.path, piece.entry.start)):
        part = values[piece.offset : piece.offset + piece.entry.size]
        reader.read(piece.entry, part)
        bar.advance(part.nbytes)


def _check_constants(plan: Plan, reader: TensorReader) -> None:
    """Raise an error if what a checkpoint stores beside the parameters contradicts the config."""
    for entry, expected in plan.buffers:
        stored = tuple(int(value) for value in reader.array(entry))
        if stored != expected:
            raise CheckpointError(
                f"{entry} holds {stored}; the config's n-gram hash gives {expected}"
            )
    if plan.tied_head is not None and not _are_equal(*plan.tied_head, reader=reader):
        raise CheckpointError(
            f"{plan.tied_head[0]} differs from the embedding, but tie_word_embeddings is true; "
            "set it to false in config.json to load this head"
        )


def _are_equal(first: TensorEntry, second: TensorEntry, *, reader: TensorReader) -> bool:
    """Return whether two tensors on disk have the same bytes, reading a piece at a time."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    width = first.num_bytes // max(first.size, 1)
    for begin in range(0, first.size, CONVERT_ELEMENTS):
        count = min(CONVERT_ELEMENTS, first.size - begin)
        parts = (
            dataclasses.replace(entry, shape=(count,), start=entry.start + begin * width)
            for entry in (first, second)
        )
        if len({reader.array(part).tobytes() for part in parts}) > 1:
            return False
    return True
