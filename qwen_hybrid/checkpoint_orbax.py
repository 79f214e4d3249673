"""Orbax checkpoint directories: a parameter tree with a checksum of every tensor.

    params/        the parameter tree, an ordinary Orbax checkpoint
    others/        tensors of the source that are no parameters, as bytes; absent if there are none
    tensors.json   checksums, and which Hugging Face tensors the parameters were
    config.json and the other files of a Hugging Face directory that are not weights

`tensors.json` is written last: a directory without it was not finished, or is not ours.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from qwen_hybrid.checkpoint_files import ITEM_SIZES, CheckpointError, TensorHeader, some_names
from qwen_hybrid.params import ParamSpec, ParamTree, leaves, set_leaf
from qwen_hybrid.progress import ProgressBar

MANIFEST = "tensors.json"
PARAMS = "params"
OTHERS = "others"
FORMAT = "qwen-hybrid-orbax"
VERSION = 1
# Files that Orbax puts into its own directories.
ORBAX_MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
# A sharded restore reads whole chunks, and a restore holds the chunks that it reads.
CHUNK_BYTES = 64 << 20
MESSAGE_CHARS = 1000

# Where to put a parameter, by its declaration.
Placement = Callable[[ParamSpec], jax.sharding.Sharding]


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of an Orbax checkpoint.

    Attributes:
        dtype: its NumPy name.
        shape: its shape.
        sha256: checksum of its bytes in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, values: np.ndarray) -> "StoredArray":
        """Describe an array."""
        return cls(values.dtype.name, values.shape, checksum(values))

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """A tensor of the Hugging Face directory that a checkpoint was made from.

    Attributes:
        header: its name, dtype and shape there.
        param: the parameter that holds it, as its path joined by slashes; None if it is one of
            the others, under its own name.
        offset: place of its first element in the flat parameter.
    """

    header: TensorHeader
    param: str | None
    offset: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of `tensors.json`.

    Attributes:
        params: the arrays of `params/`, by path joined by slashes.
        others: those of `others/`, by name.
        tensors: what they were on the other side.
    """

    params: dict[str, StoredArray]
    others: dict[str, StoredArray]
    tensors: tuple[SourceTensor, ...]

    @property
    def num_param_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(stored.num_bytes for stored in self.params.values())

    def without(self, prefix: str) -> "Manifest":
        """Return the manifest without the parameters below a path."""
        kept = {name: value for name, value in self.params.items() if not name.startswith(prefix)}
        return dataclasses.replace(self, params=kept)

    def write(self, directory: Path) -> None:
        """Write the file, with a checksum of its own content."""
        content = dataclasses.asdict(self)
        head = {"format": FORMAT, "version": VERSION, "sha256": _text_checksum(content)}
        text = json.dumps(head | content, indent=1) + "\n"
        (directory / MANIFEST).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read the file.

        Raises:
            CheckpointError: unreadable, of another format or version, or changed since.
        """
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            head = (content.pop("format"), content.pop("version"))
            if head != (FORMAT, VERSION):
                raise CheckpointError(
                    f"{path} is of format {head[0]} version {head[1]}, not {FORMAT} {VERSION}"
                )
            if content.pop("sha256") != _text_checksum(content):
                raise CheckpointError(f"{path} is damaged: its content has another checksum")
            return cls(
                params={name: _stored(value) for name, value in content["params"].items()},
                others={name: _stored(value) for name, value in content["others"].items()},
                tensors=tuple(_source(value) for value in content["tensors"]),
            )
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error


def _stored(value: Mapping[str, Any]) -> StoredArray:
    return StoredArray(value["dtype"], tuple(value["shape"]), value["sha256"])


def _source(value: Mapping[str, Any]) -> SourceTensor:
    header = value["header"]
    entry = TensorHeader(header["name"], header["dtype"], tuple(header["shape"]))
    if entry.dtype not in ITEM_SIZES:
        raise ValueError(f"{entry.name} has an unknown dtype: {entry.dtype}")
    return SourceTensor(entry, value["param"], value["offset"])


def _text_checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def checksum(values: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes in row-major order."""
    return hashlib.sha256(as_bytes(values).data).hexdigest()


def as_bytes(values: np.ndarray) -> np.ndarray:
    """Return an array's bytes in row-major order, without a copy where it has that order."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def is_orbax(directory: Path) -> bool:
    """Return whether a directory is an Orbax checkpoint of ours.

    Raises:
        CheckpointError: it is someone else's, or holds the weights in both formats.
    """
    if (directory / MANIFEST).is_file():
        if any(directory.glob("*.safetensors")):
            raise CheckpointError(f"{directory} holds both {MANIFEST} and *.safetensors files")
        return True
    places = (directory, directory / PARAMS)
    marks = [place / mark for place in places for mark in ORBAX_MARKS if (place / mark).exists()]
    if marks:
        raise CheckpointError(
            f"{directory} has {marks[0].relative_to(directory)} but no {MANIFEST}: not an Orbax "
            "checkpoint that convert wrote, or not a whole one"
        )
    return False


def save(
    directory: Path,
    params: ParamTree,
    others: Mapping[str, np.ndarray],
    *,
    tensors: tuple[SourceTensor, ...],
    bar: ProgressBar,
) -> None:
    """Write host arrays as a checkpoint into an existing directory, without copying them.

    Args:
        directory: where to.
        params: the parameters.
        others: bytes of the tensors that are no parameters, by name.
        tensors: what all of them are on the other side.
        bar: counts the bytes of arrays with a checksum.
    """
    _save_tree(directory / PARAMS, params)
    if others:
        _save_tree(directory / OTHERS, dict(others))

    def describe(values: np.ndarray) -> StoredArray:
        bar.advance(values.nbytes)
        return StoredArray.of(values)

    Manifest(
        params={"/".join(path): describe(values) for path, values in leaves(params)},
        others={name: describe(values) for name, values in others.items()},
        tensors=tensors,
    ).write(directory)


def _save_tree(directory: Path, tree: ParamTree) -> None:
    largest = max(values.nbytes for _, values in leaves(tree))
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    handlers = type_handlers.create_type_handler_registry(
        # By default Orbax copies all host arrays before it writes the first.
        (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, type_handlers.ArrayHandler()),
    )
    with _checkpointer(largest, type_handler_registry=handlers) as checkpointer:
        checkpointer.save(directory.absolute(), ocp.args.PyTreeSave(tree, save_args))


def _checkpointer(largest: int, **options: Any) -> ocp.Checkpointer:
    """Return Orbax's reader and writer; compression would cost time and memory, and gain little."""
    # Orbax refuses an array that is larger than its limit of bytes in flight.
    limit = max(1, -(-largest // 10**9))
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=limit, restore_concurrent_gb=limit, use_compression=False, **options
    )
    return ocp.Checkpointer(handler)


class OrbaxReader:
    """Restores arrays of a checkpoint, each checked against its checksum. Close it after use."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        arrays = (*manifest.params.values(), *manifest.others.values())
        self._stack = contextlib.ExitStack()
        largest = max((stored.num_bytes for stored in arrays), default=0)
        self._checkpointer = self._stack.enter_context(_checkpointer(largest))

    def __enter__(self) -> "OrbaxReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def params(self, targets: Mapping[str, jax.sharding.Sharding | None]) -> dict[str, Any]:
        """Return some parameters by name: on the host where the sharding is None.

        Raises:
            CheckpointError: a parameter cannot be read or is damaged; the message names it.
        """
        paths = {name: tuple(name.split("/")) for name in targets}
        return self._restore(PARAMS, paths, targets, self.manifest.params)

    def other(self, name: str) -> np.ndarray:
        """Return the bytes of one tensor that is no parameter; raises as `params` does."""
        return self._restore(OTHERS, {name: (name,)}, {name: None}, self.manifest.others)[name]

    def _restore(
        self,
        part: str,
        paths: Mapping[str, tuple[str, ...]],
        targets: Mapping[str, jax.sharding.Sharding | None],
        stored: Mapping[str, StoredArray],
    ) -> dict[str, Any]:
        try:
            tree = self._read(self.directory / part, paths, targets)
        except MemoryError:
            raise
        # Orbax and TensorStore raise bare exceptions for damaged files.
        except Exception as error:
            if len(paths) > 1:
                # One at a time, to learn which one it is.
                for name in paths:
                    self._restore(part, {name: paths[name]}, targets, stored)
            raise CheckpointError(
                f"cannot read {some_names(paths)} of {self.directory / part}: {_first(error)}"
            ) from error
        found = {"/".join(path): value for path, value in leaves(tree)}
        for name in paths:
            _verify(self.directory / part, name, found[name], stored[name])
        return found

    def _read(
        self,
        directory: Path,
        paths: Mapping[str, tuple[str, ...]],
        targets: Mapping[str, jax.sharding.Sharding | None],
    ) -> ParamTree:
        item: ParamTree = {}
        arguments: ParamTree = {}
        for name, path in paths.items():
            sharding = targets[name]
            how = (
                ocp.RestoreArgs(restore_type=np.ndarray)
                if sharding is None
                else ocp.ArrayRestoreArgs(sharding=sharding)
            )
            set_leaf(item, path, 0)
            set_leaf(arguments, path, how)
        return self._checkpointer.restore(
            directory.absolute(),
            ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True),
        )


def _first(error: Exception) -> str:
    """Return the start of an error's message, on one line."""
    return " ".join(str(error).split())[:MESSAGE_CHARS] or repr(error)


def _verify(root: Path, name: str, values: Any, stored: StoredArray) -> None:
    """Raise an error unless an array is the one that was saved, wherever its parts lie."""
    found = StoredArray(values.dtype.name, tuple(values.shape), checksum(np.asarray(values)))
    if (found.dtype, found.shape) != (stored.dtype, stored.shape):
        raise CheckpointError(
            f"{name} of {root} is {found.dtype}{list(found.shape)}, "
            f"saved as {stored.dtype}{list(stored.shape)}"
        )
    if found != stored:
        raise CheckpointError(
            f"{name} of {root} is damaged: its bytes have another checksum than when saved"
        )


def check_declared(directory: Path, manifest: Manifest, specs: ParamTree) -> None:
    """Raise an error unless a checkpoint holds exactly the declared parameters."""
    declared = {"/".join(path): spec.shape for path, spec in leaves(specs)}
    stored = {name: array.shape for name, array in manifest.params.items()}
    wrong = [
        f"{name} {list(stored[name]) if name in stored else 'absent'}, "
        f"{list(declared[name]) if name in declared else 'absent'} in the config"
        for name in declared | stored
        if stored.get(name) != declared.get(name)
    ]
    if wrong:
        raise CheckpointError(f"{directory} does not fit its config: {some_names(wrong)}")


def groups(specs: ParamTree) -> Iterator[dict[str, ParamSpec]]:
    """Yield the declarations by name, those of one layer together."""
    for key, part in specs.items():
        tree = {key: part}
        yield {"/".join(path): spec for path, spec in leaves(tree)}
