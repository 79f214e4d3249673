"""Tensors on disk: the index and the safetensors files of a checkpoint directory.

Headers are read and checked first, tensor bytes are read on demand straight into the caller's
array. Nothing is memory-mapped, so a loader's resident memory stays that of its destination.
"""

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOAT_DTYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
PLAIN_DTYPES: dict[str, Any] = FLOAT_DTYPES | {"I64": np.int64}
ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
    "BF16": 2, "F16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
# A longer header means that the file is not safetensors; the format's own limit.
MAX_HEADER_BYTES = 100_000_000
# Elements converted at a time where the dtypes on disk and in memory differ.
CONVERT_ELEMENTS = 1 << 22
NAMES_SHOWN = 5


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be loaded; the message names the file and the tensor."""


def some_names(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file says of a tensor: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self.size * ITEM_SIZES[self.dtype]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: name on disk.
        path: file that holds it.
        dtype: safetensors dtype name.
        shape: shape on disk.
        start: offset of its first byte in the file; of any alignment.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self.size * ITEM_SIZES[self.dtype]

    @property
    def header(self) -> TensorHeader:
        """The entry without its place."""
        return TensorHeader(self.name, self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)} in {self.path}"


def read_directory(directory: Path) -> tuple[Path, dict[str, TensorEntry]]:
    """Return the file that lists the tensors, and every tensor by its name on disk.

    With an index only what it names is listed, so stray files are ignored.

    Raises:
        CheckpointError: no weights, a file that is missing, truncated or not safetensors, or a
            tensor that the index promises and its file does not hold.
    """
    index = _index_path(directory)
    if index is None:
        path = _single_file(directory)
        return path, read_header(path)
    tensors: dict[str, TensorEntry] = {}
    for file_name, names in _index_files(index).items():
        header = read_header(directory / file_name)
        absent = [name for name in names if name not in header]
        if absent:
            raise CheckpointError(
                f"{directory / file_name} lacks tensors that {index} places there: "
                f"{some_names(absent)}"
            )
        tensors |= {name: header[name] for name in names}
    return index, tensors


def _index_path(directory: Path) -> Path | None:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    found = sorted(directory.glob(f"*{INDEX_SUFFIX}"))
    if len(found) > 1:
        official = [path for path in found if path.name == f"model{INDEX_SUFFIX}"]
        if not official:
            raise CheckpointError(f"{directory} has several indices: {some_names(map(str, found))}")
        found = official
    return found[0] if found else None


def _single_file(directory: Path) -> Path:
    found = sorted(directory.glob("*.safetensors"))
    if directory / SINGLE_FILE in found:
        return directory / SINGLE_FILE
    if len(found) != 1:
        raise CheckpointError(
            f"{directory} must hold an index (*{INDEX_SUFFIX}), {SINGLE_FILE} or one "
            f"*.safetensors file; it holds {len(found)} of the last"
        )
    return found[0]


def _index_files(index: Path) -> dict[str, list[str]]:
    """Return the tensor names of each file that an index names."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file_name)) for name, file_name in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a checkpoint index: {error!r}") from error
    files: dict[str, list[str]] = {}
    for name, file_name in pairs:
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{index} places {name} outside the directory: {file_name}")
        files.setdefault(file_name, []).append(name)
    if not files:
        raise CheckpointError(f"{index} names no tensors")
    return files


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file, checked against its length.

    Raises:
        CheckpointError: unreadable, truncated, or not a safetensors file.
    """
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if file_size < 8 or not 0 < header_size <= min(file_size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: {file_size} bytes, "
                    f"header of {header_size}"
                )
            header = json.loads(file.read(header_size))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} has a broken safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a broken safetensors header: not a mapping")
    header.pop("__metadata__", None)
    start = 8 + header_size
    return {name: _entry(name, path, value, start, file_size) for name, value in header.items()}


def _entry(name: str, path: Path, value: Any, start: int, file_size: int) -> TensorEntry:
    """Return a header's entry, checked: known dtype, extent as its shape, within the file."""
    try:
        begin, end = (int(offset) for offset in value["data_offsets"])
        shape = tuple(int(length) for length in value["shape"])
        entry = TensorEntry(name, path, str(value["dtype"]), shape, start + begin)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a broken entry for {name}: {error!r}") from error
    if entry.dtype not in ITEM_SIZES:
        raise CheckpointError(f"{path} holds {name} in an unknown dtype: {entry.dtype}")
    if begin < 0 or min(shape, default=0) < 0 or end - begin != entry.num_bytes:
        raise CheckpointError(f"{path} has a broken entry for {name}: {value}")
    if start + end > file_size:
        raise CheckpointError(
            f"{path} is truncated: {name} ends at byte {start + end}, the file at {file_size}"
        )
    return entry


class TensorReader:
    """Reads tensors into arrays. Owns its open files until it is closed."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._files: dict[Path, io.BufferedReader] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, entry: TensorEntry, into: np.ndarray) -> None:
        """Fill a flat contiguous array of the tensor's size, converting to its dtype.

        Raises:
            CheckpointError: the file ends early or cannot be read.
        """
        source = np.dtype(PLAIN_DTYPES[entry.dtype])
        if source == into.dtype:
            self._read_bytes(entry, entry.start, into.view(np.uint8))
            return
        for begin in range(0, entry.size, CONVERT_ELEMENTS):
            part = into[begin : begin + CONVERT_ELEMENTS]
            raw = np.empty(part.size, source)
            self._read_bytes(entry, entry.start + begin * source.itemsize, raw.view(np.uint8))
            part[:] = raw.astype(into.dtype)

    def array(self, entry: TensorEntry) -> np.ndarray:
        """Return the tensor in its own dtype."""
        values = np.empty(entry.size, PLAIN_DTYPES[entry.dtype])
        self.read(entry, values)
        return values.reshape(entry.shape)

    def raw(self, entry: TensorEntry) -> np.ndarray:
        """Return the tensor's bytes, of any dtype."""
        values = np.empty(entry.num_bytes, np.uint8)
        self._read_bytes(entry, entry.start, values)
        return values

    def _read_bytes(self, entry: TensorEntry, start: int, into: np.ndarray) -> None:
        try:
            file = self._open(entry.path)
            file.seek(start)
            count = file.readinto(into.data) if into.size else 0
        except OSError as error:
            raise CheckpointError(f"cannot read {entry}: {error}") from error
        if count != into.size:
            raise CheckpointError(f"{entry.path} ends inside {entry.name}: the file is truncated")

    def _open(self, path: Path) -> io.BufferedReader:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(path.open("rb"))
        return self._files[path]
