"""Writers of Hugging Face directories that transformers and this package load."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from qwen_hybrid.checkpoint_files import (
    INDEX_SUFFIX,
    ITEM_SIZES,
    SINGLE_FILE,
    TensorHeader,
)
from qwen_hybrid.checkpoint_names import (
    HEAD,
    MTP_PREFIX,
    TABLE_NAME,
    TEXT_PREFIXES,
    disk_shape,
    ple_modules,
    table_buffers,
)
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dummy import resolve_dtype
from qwen_hybrid.params import ParamSpec, ParamTree, leaves, model_specs

MAX_FILE_BYTES = 4 * 10**9


def save_hf(
    directory: str | Path,
    hf_config: Mapping[str, Any],
    params: ParamTree,
    *,
    dtype: str = "bfloat16",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a Hugging Face directory in the official form: fused experts, sharded n-gram tables.

    Parameters that are declared float32 are written in float32, the others in ``dtype``, which
    is also noted in the written config. An MTP head goes under ``mtp.*``.

    Args:
        directory: made if absent; files of the same names are replaced.
        hf_config: content of ``config.json``.
        params: parameter tree of that config.
        dtype: "float32" or "bfloat16".
        max_file_bytes: a file is closed before it would exceed this; one file needs no index.

    Raises:
        ValueError: the tree is not that of the config; the message names the parameters.
    """
    config = HybridConfig.from_hf(hf_config)
    dtype = resolve_dtype(config, dtype)
    specs = model_specs(config)
    _check_tree(specs, params)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for stale in [*directory.glob("*.safetensors"), *directory.glob(f"*{INDEX_SUFFIX}")]:
        stale.unlink()
    _write_json(directory / "config.json", _with_dtype(hf_config, dtype))
    groups = _group(_disk_tensors(config, specs, params, dtype), max_file_bytes)
    _write_files(directory, groups)


def _write_files(directory: Path, groups: Iterator[dict[str, np.ndarray]]) -> None:
    """Write one file per group, and the index if there are several.

    File names count the files, so they are given once the last group is written.
    """
    paths: list[Path] = []
    numbers: dict[str, int] = {}
    total_size = 0
    for tensors in groups:
        numbers |= dict.fromkeys(tensors, len(paths))
        total_size += sum(values.nbytes for values in tensors.values())
        paths.append(directory / f"part-{len(paths)}.safetensors")
        safetensors.numpy.save_file(tensors, paths[-1], metadata={"format": "pt"})
    _name_files(directory, paths, numbers, total_size)


def _name_files(
    directory: Path, paths: list[Path], numbers: Mapping[str, int], total_size: int
) -> None:
    """Give finished files their names, and the index if there are several.

    Args:
        directory: where they belong.
        paths: where they are.
        numbers: for each tensor, which of them holds it.
        total_size: bytes of all tensors.
    """
    if len(paths) == 1:
        paths[0].rename(directory / SINGLE_FILE)
        return
    names = [f"model-{n:05d}-of-{len(paths):05d}.safetensors" for n in range(1, len(paths) + 1)]
    for path, name in zip(paths, names, strict=True):
        path.rename(directory / name)
    weight_map = {name: names[number] for name, number in numbers.items()}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(directory / f"model{INDEX_SUFFIX}", index)


class FileWriter:
    """Writes known tensors, one at a time and in any order, into as few files as allowed.

    The files get their names in `finish`; until then nothing takes them for weights. Close it
    after use.
    """

    def __init__(self, directory: Path, headers: Iterable[TensorHeader], max_bytes: int) -> None:
        """Open the files and write their headers.

        Args:
            directory: where they belong.
            headers: the tensors, in the order in which files are filled.
            max_bytes: a file is closed before it would exceed this.
        """
        self._directory = directory
        self._places: dict[str, tuple[int, int, int]] = {}
        self._unwritten: set[str] = set()
        self._total_size = 0
        self._stack = contextlib.ExitStack()
        self._paths: list[Path] = []
        self._files = []
        for group in _fill_files(headers, max_bytes):
            self._paths.append(directory / f"part-{len(self._paths)}.unfinished")
            self._files.append(self._stack.enter_context(self._paths[-1].open("wb")))
            self._start_file(group)

    def __enter__(self) -> "FileWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_file(self, group: list[TensorHeader]) -> None:
        """Write the header of the newest file and note where its tensors go."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        # Wider elements first, so that every tensor is aligned to its own.
        for tensor in sorted(group, key=lambda tensor: -ITEM_SIZES[tensor.dtype]):
            end = at + tensor.num_bytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            self._places[tensor.name] = (len(self._files) - 1, at, tensor.num_bytes)
            at = end
        head = json.dumps(entries).encode()
        head += b" " * (-len(head) % 8)
        self._files[-1].write(len(head).to_bytes(8, "little") + head)
        for tensor in group:
            number, at, num_bytes = self._places[tensor.name]
            self._places[tensor.name] = (number, at + 8 + len(head), num_bytes)
            self._unwritten.add(tensor.name)
            self._total_size += num_bytes

    def write(self, name: str, values: np.ndarray) -> None:
        """Write the bytes of a tensor, once.

        Raises:
            ValueError: no such tensor is left to write, or it has another size.
        """
        number, at, num_bytes = self._places[name]
        if name not in self._unwritten or values.nbytes != num_bytes:
            raise ValueError(f"{name} was written before or is not {num_bytes} bytes")
        self._unwritten.remove(name)
        self._files[number].seek(at)
        self._files[number].write(values.data)

    def finish(self) -> None:
        """Close the files, give them their names and write the index.

        Raises:
            ValueError: a tensor was not written.
        """
        left = [name for name in self._unwritten if self._places[name][2]]
        if left:
            raise ValueError(f"{len(left)} tensors were not written: {left[:5]}")
        self._stack.close()
        numbers = {name: number for name, (number, _, _) in self._places.items()}
        _name_files(self._directory, self._paths, numbers, self._total_size)


def _fill_files(headers: Iterable[TensorHeader], max_bytes: int) -> Iterator[list[TensorHeader]]:
    """Yield the tensors in groups of at most this many bytes; one larger tensor stands alone."""
    group: list[TensorHeader] = []
    size = 0
    for header in headers:
        if group and size + header.num_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(header)
        size += header.num_bytes
    yield group


def _check_tree(specs: ParamTree, params: ParamTree) -> None:
    declared = {path: spec.shape for path, spec in leaves(specs)}
    given = {path: tuple(value.shape) for path, value in leaves(params)}
    wrong = [
        f"{'/'.join(path)} {given.get(path, 'absent')}, declared {declared.get(path, 'absent')}"
        for path in declared | given
        if declared.get(path) != given.get(path)
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} parameters do not fit the config: {'; '.join(wrong[:5])}")


def _with_dtype(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config with the dtype that the files have."""
    config = {key: value for key, value in hf_config.items() if key != "torch_dtype"}
    config["dtype"] = dtype
    if "text_config" in config:
        config["text_config"] = _with_dtype(config["text_config"], dtype)
    return config


def _disk_tensors(
    config: HybridConfig, specs: ParamTree, params: ParamTree, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of a directory under its name there."""
    values = dict(leaves(params))
    for path, spec in leaves(specs):
        array = np.asarray(values[path]).astype(jnp.dtype(spec.resolved_dtype(dtype)))
        array = np.ascontiguousarray(array.reshape(disk_shape(spec)))
        if config.ple is not None and spec.name.endswith(TABLE_NAME):
            yield from _table_shards(spec, array, config.ple.num_shards)
        else:
            yield _disk_name(spec.name), array
    for module, table in ple_modules(config).items():
        for name, numbers in table_buffers(table).items():
            yield _disk_name(f"{module}.{name}"), np.array(numbers, np.int64)


def _table_shards(
    spec: ParamSpec, array: np.ndarray, num_shards: int
) -> Iterator[tuple[str, np.ndarray]]:
    stem = spec.name.removesuffix("weight")
    shard_rows = -(-len(array) // num_shards)
    for number, begin in enumerate(range(0, len(array), shard_rows)):
        name = _disk_name(f"{stem}shard_{number}.weight")
        yield name, array[begin : begin + shard_rows]


def _disk_name(name: str) -> str:
    return name if name == HEAD or name.startswith(MTP_PREFIX) else TEXT_PREFIXES[0] + name


def _group(
    tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tensors in groups of at most this many bytes; one larger tensor stands alone."""
    group: dict[str, np.ndarray] = {}
    size = 0
    for name, values in tensors:
        if group and size + values.nbytes > max_bytes:
            yield group
            group, size = {}, 0
        group[name] = values
        size += values.nbytes
    yield group


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
