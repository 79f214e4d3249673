"""A Hugging Face directory, opened: every tensor matched with a declaration, ready to be read."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qwen_hybrid.checkpoint_files import (
    CONVERT_ELEMENTS,
    CheckpointError,
    TensorEntry,
    TensorReader,
    read_directory,
)
from qwen_hybrid.checkpoint_names import MTP_PREFIX, Piece, Plan, canonical_name, make_plan
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.host_memory import aligned_empty
from qwen_hybrid.params import ParamSpec, model_specs
from qwen_hybrid.progress import ProgressBar


@dataclasses.dataclass(frozen=True)
class Source:
    """What a directory holds for a model.

    Attributes:
        config: the architecture, without an MTP head if the files hold none.
        tensors: every tensor by its name on disk.
        plan: which of them fill which parameter.
        notes: facts that the user should hear.
    """

    config: HybridConfig
    tensors: Mapping[str, TensorEntry]
    plan: Plan
    notes: tuple[str, ...]


def open_source(directory: Path, config: HybridConfig) -> Source:
    """Read the headers of a directory and match its tensors with a config.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    listing, tensors = read_directory(directory)
    config, notes = without_missing_head(config, tensors, listing)
    plan = make_plan(config, model_specs(config), listing=listing, tensors=tensors)
    return Source(config, tensors, plan, notes + plan.notes)


def without_missing_head(
    config: HybridConfig, names: Iterable[str], listing: Path
) -> tuple[HybridConfig, tuple[str, ...]]:
    """Return the config without an MTP head that the files lack, and a note that says so."""
    if config.num_mtp_layers == 0 or count_mtp(names):
        return config, ()
    note = f"{listing} has no {MTP_PREFIX}* tensors: the MTP head is left out"
    return dataclasses.replace(config, num_mtp_layers=0), (note,)


def count_mtp(names: Iterable[str]) -> int:
    """Return how many tensors on disk belong to an MTP head."""
    canonical = (canonical_name(name) for name in names)
    return sum(name is not None and name.startswith(MTP_PREFIX) for name in canonical)


def read_param(
    pieces: list[Piece], spec: ParamSpec, dtype: Any, *, reader: TensorReader, bar: ProgressBar
) -> np.ndarray:
    """Return one parameter, read in the order of the bytes on disk."""
    values = aligned_empty(spec.shape, dtype)
    flat = values.reshape(-1)
    for piece in sorted(pieces, key=lambda piece: (piece.entry.path, piece.entry.start)):
        part = flat[piece.offset : piece.offset + piece.entry.size]
        reader.read(piece.entry, part)
        bar.advance(part.nbytes)
    return values


def check_constants(plan: Plan, reader: TensorReader) -> None:
    """Raise an error if what a checkpoint stores beside the parameters contradicts the config."""
    for entry, expected in plan.buffers:
        check_buffer(str(entry), reader.array(entry), expected)
    if plan.tied_head is not None and not _are_equal(*plan.tied_head, reader=reader):
        raise CheckpointError(
            f"{plan.tied_head[0]} differs from the embedding, but tie_word_embeddings is true; "
            "set it to false in config.json to load this head"
        )


def check_buffer(name: str, values: np.ndarray, expected: tuple[int, ...]) -> None:
    """Raise an error if stored constants of an n-gram hash are not the config's."""
    stored = tuple(int(value) for value in values)
    if stored != expected:
        raise CheckpointError(f"{name} holds {stored}; the config's n-gram hash gives {expected}")


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
