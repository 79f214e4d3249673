"""Writer of Hugging Face directories that transformers and this package load."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from qwen_hybrid.checkpoint_files import INDEX_SUFFIX, SINGLE_FILE
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
    if len(paths) == 1:
        paths[0].rename(directory / SINGLE_FILE)
        return
    names = [f"model-{n:05d}-of-{len(paths):05d}.safetensors" for n in range(1, len(paths) + 1)]
    for path, name in zip(paths, names, strict=True):
        path.rename(directory / name)
    weight_map = {name: names[number] for name, number in numbers.items()}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(directory / f"model{INDEX_SUFFIX}", index)


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
