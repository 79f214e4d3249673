"""Convert model directories between the Hugging Face and the Orbax format, without loss.

    convert_checkpoint("Qwen3.5-0.8B", "Qwen3.5-0.8B-orbax")    # and back, arguments swapped

Both ways every tensor keeps its bytes, dtype and name; the files that are not weights travel along.
The destination appears whole or not at all: it is written beside its place under another name,
without the file that would make it load, and renamed at the end.
"""

import contextlib
import dataclasses
import enum
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qwen_hybrid import checkpoint_orbax
from qwen_hybrid.checkpoint_files import FLOAT_DTYPES, CheckpointError, TensorReader
from qwen_hybrid.checkpoint_names import Piece
from qwen_hybrid.checkpoint_orbax import Manifest, OrbaxReader, SourceTensor
from qwen_hybrid.checkpoint_source import Source, check_constants, open_source, read_param
from qwen_hybrid.checkpoint_writer import MAX_FILE_BYTES, FileWriter
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.host_memory import check_fits_host
from qwen_hybrid.params import ParamTree, leaves, model_specs, set_leaf
from qwen_hybrid.progress import ProgressBar, readable_bytes

CONFIG = "config.json"
PARTIAL_SUFFIX = ".partial"
# Weights of any format; everything else at the top of a directory travels along.
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt",
                   ".pth", ".gguf", ".h5", ".msgpack")  # fmt: skip


class Format(enum.Enum):
    """Format of a model directory."""

    HUGGING_FACE = "Hugging Face"
    ORBAX = "Orbax"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was done.

    Attributes:
        written: format of the destination.
        num_tensors: tensors on the Hugging Face side.
        num_bytes: their bytes.
        notes: facts that the user should hear.
    """

    written: Format
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: bool | None = None,
) -> Conversion:
    """Convert a model directory of either format into one of the other.

    Host memory holds one copy of the weights on the way to Orbax, and one layer on the way back.

    Args:
        source: a Hugging Face directory, or an Orbax directory that this function wrote.
        destination: must not exist yet.
        max_file_bytes: on the way to Hugging Face, a file is closed before it would exceed this.
        progress: whether to show progress bars; None shows them on a terminal.

    Raises:
        CheckpointError: the source cannot be loaded; the message names the file or the tensor.
        QuantizedCheckpointError: quantised weights.
        FileExistsError: the destination exists, or what a killed conversion left beside it.
        FileNotFoundError: the source has no ``config.json``.
        MemoryError, OSError: no room in memory, or on the disk.
    """
    source, destination = Path(source), Path(destination)
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory")
    if checkpoint_orbax.is_orbax(source):
        return _to_hugging_face(source, destination, max_file_bytes, progress)
    return _to_orbax(source, destination, progress)


def _to_orbax(source: Path, destination: Path, progress: bool | None) -> Conversion:
    opened = open_source(source, HybridConfig.from_directory(source))
    num_bytes = sum(entry.num_bytes for entry in opened.tensors.values())
    check_fits_host(num_bytes, f"converting {source}")
    with _new_directory(destination, num_bytes) as partial:
        with (
            TensorReader() as reader,
            ProgressBar("reading", num_bytes, is_shown=progress) as bar,
        ):
            check_constants(opened.plan, reader)
            params, tensors = _read_params(opened, reader, bar)
            others = _read_others(opened, tensors, reader, bar)
        _copy_other_files(source, partial)
        with ProgressBar("writing", num_bytes, is_shown=progress) as bar:
            checkpoint_orbax.save(partial, params, others, tensors=tuple(tensors), bar=bar)
    return Conversion(Format.ORBAX, len(tensors), num_bytes, opened.notes)


def _read_params(
    source: Source, reader: TensorReader, bar: ProgressBar
) -> tuple[ParamTree, list[SourceTensor]]:
    """Return the parameters in the dtype that they have on disk, and where they came from."""
    params: ParamTree = {}
    tensors: list[SourceTensor] = []
    for path, spec in leaves(model_specs(source.config)):
        pieces = source.plan.pieces[path]
        values = read_param(pieces, spec, _common_dtype(pieces), reader=reader, bar=bar)
        set_leaf(params, path, values)
        name = "/".join(path)
        tensors += [SourceTensor(piece.entry.header, name, piece.offset) for piece in pieces]
    return params, tensors


def _read_others(
    source: Source, tensors: list[SourceTensor], reader: TensorReader, bar: ProgressBar
) -> dict[str, np.ndarray]:
    """Return the bytes of all other tensors by name, and add them to the list of tensors."""
    others: dict[str, np.ndarray] = {}
    used = {tensor.header.name for tensor in tensors}
    for entry in source.tensors.values():
        if entry.name not in used:
            tensors.append(SourceTensor(entry.header, None, 0))
            # Orbax has no arrays without elements.
            if entry.num_bytes:
                others[entry.name] = reader.raw(entry)
            bar.advance(entry.num_bytes)
    return others


def _common_dtype(pieces: list[Piece]) -> np.dtype:
    """Return the dtype of a parameter's tensors: float32, which holds all of them, if it varies."""
    dtypes = {piece.entry.dtype for piece in pieces}
    return np.dtype(FLOAT_DTYPES[dtypes.pop() if len(dtypes) == 1 else "F32"])


def _to_hugging_face(
    source: Path, destination: Path, max_file_bytes: int, progress: bool | None
) -> Conversion:
    manifest = Manifest.read(source)
    headers = [tensor.header for tensor in manifest.tensors]
    num_bytes = sum(header.num_bytes for header in headers)
    with (
        _new_directory(destination, num_bytes) as partial,
        OrbaxReader(source, manifest) as reader,
        FileWriter(partial, headers, max_file_bytes) as writer,
        ProgressBar("converting", num_bytes, is_shown=progress) as bar,
    ):
        for name, values in _source_tensors(reader):
            writer.write(name, values)
            bar.advance(values.nbytes)
        writer.finish()
        _copy_other_files(source, partial)
    return Conversion(Format.HUGGING_FACE, len(headers), num_bytes, ())


def _source_tensors(reader: OrbaxReader) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the bytes of every Hugging Face tensor, one layer after another."""
    by_param: dict[str | None, list[SourceTensor]] = {}
    for tensor in reader.manifest.tensors:
        by_param.setdefault(tensor.param, []).append(tensor)
    groups: dict[str, list[str]] = {}
    for name in reader.manifest.params:
        groups.setdefault(name.split("/")[0], []).append(name)
    for names in groups.values():
        found = reader.params(dict.fromkeys(names))
        for name in names:
            flat = found.pop(name).reshape(-1)
            for tensor in by_param.get(name, []):
                part = flat[tensor.offset : tensor.offset + tensor.header.size]
                part = part.astype(FLOAT_DTYPES[tensor.header.dtype], copy=False)
                yield tensor.header.name, checkpoint_orbax.as_bytes(part)
    for name in reader.manifest.others:
        yield name, reader.other(name)


def _copy_other_files(source: Path, destination: Path) -> None:
    """Copy all files that are not weights; the config, without which nothing loads, comes last."""
    files = [
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.name != checkpoint_orbax.MANIFEST
        and not path.name.endswith(WEIGHT_SUFFIXES)
    ]
    for path in sorted(files, key=lambda path: path.name == CONFIG):
        shutil.copyfile(path, destination / path.name)


@contextlib.contextmanager
def _new_directory(destination: Path, num_bytes: int) -> Iterator[Path]:
    """Give a directory to fill, which becomes the destination if the block ends well."""
    partial = destination.with_name(destination.name + PARTIAL_SUFFIX)
    if destination.exists():
        raise FileExistsError(f"{destination} exists; convert writes a new directory")
    if partial.exists():
        raise FileExistsError(
            f"{partial} exists: a conversion to {destination.name} is running, or was killed; "
            "remove it if none is"
        )
    destination.absolute().parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(destination.absolute().parent).free
    if num_bytes > free:
        raise OSError(
            f"no room for {destination}: {readable_bytes(num_bytes)} needed, "
            f"{readable_bytes(free)} free"
        )
    partial.mkdir()
    try:
        yield partial
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial)
        raise
