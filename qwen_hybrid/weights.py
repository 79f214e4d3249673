"""Weights of a model: loaded from a directory of either format, random, or saved as one."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from qwen_hybrid import checkpoint_orbax
from qwen_hybrid.checkpoint_files import CheckpointError as CheckpointError
from qwen_hybrid.checkpoint_files import TensorReader
from qwen_hybrid.checkpoint_names import MTP_PREFIX, canonical_name, ple_modules, table_buffers
from qwen_hybrid.checkpoint_names import QuantizedCheckpointError as QuantizedCheckpointError
from qwen_hybrid.checkpoint_orbax import Manifest, OrbaxReader, Placement
from qwen_hybrid.checkpoint_source import (
    check_buffer,
    check_constants,
    count_mtp,
    open_source,
    read_param,
    without_missing_head,
)
from qwen_hybrid.checkpoint_writer import save_hf as save_hf
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dummy import dummy_params as dummy_params
from qwen_hybrid.dummy import resolve_dtype
from qwen_hybrid.host_memory import check_fits
from qwen_hybrid.params import ParamSpec, ParamTree, leaves, model_specs, num_bytes, set_leaf
from qwen_hybrid.progress import ProgressBar


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        config: the architecture as loaded: without an MTP head if the files hold none.
        params: the parameter tree, where it was to be placed.
        notes: facts that the user should hear, such as an MTP head left out.
    """

    config: HybridConfig
    params: ParamTree
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Loading:
    """How to load: the resolved dtype, where to, and whether to show it."""

    dtype: str
    placement: Placement
    progress: bool | None


def load_checkpoint(
    directory: str | Path,
    config: HybridConfig | None = None,
    *,
    dtype: str = "auto",
    placement: Placement | None = None,
    progress: bool | None = None,
) -> Checkpoint:
    """Load a Hugging Face directory tensor by tensor, or an Orbax directory layer by layer.

    Host memory holds the destination and, on its way to the device, one parameter (one layer).
    Vision tensors are skipped. An MTP head that the config announces and the files lack (whoever
    re-saves a checkpoint with transformers loses it) is left out and reported.

    Args:
        directory: holds an index with its files, or one safetensors file, or what
            `convert_checkpoint` made of such a directory.
        config: the architecture; None reads the directory's ``config.json``.
        dtype: "float32", "bfloat16", or "auto" for the config's own. Parameters that are
            declared float32 stay float32.
        placement: sharding of each parameter, by its declaration; None puts all of them on the
            default device.
        progress: whether to show a progress bar; None shows it on a terminal.

    Raises:
        CheckpointError: no such directory; missing, surplus or misshaped tensors; unreadable,
            truncated or damaged files; an Orbax directory of other origin.
        FileNotFoundError: no ``config.json`` in it, though needed.
        QuantizedCheckpointError: quantised weights.
        MemoryError: the weights do not fit; the message has the needed and available bytes.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    config = HybridConfig.from_directory(directory) if config is None else config
    if placement is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placement = functools.partial(_everywhere, default)
    how = _Loading(resolve_dtype(config, dtype), placement, progress)
    load = _load_orbax if checkpoint_orbax.is_orbax(directory) else _load_hf
    return load(directory, config, how)


def load_params(
    directory: str | Path,
    config: HybridConfig,
    *,
    dtype: str = "auto",
    progress: bool | None = None,
) -> ParamTree:
    """Return the parameter tree of a directory; see ``load_checkpoint``.

    There is no "mtp" in the tree if the files hold no MTP head.
    """
    return load_checkpoint(directory, config, dtype=dtype, progress=progress).params


def _everywhere(sharding: jax.sharding.Sharding, spec: ParamSpec) -> jax.sharding.Sharding:
    del spec
    return sharding


def _load_hf(directory: Path, config: HybridConfig, how: _Loading) -> Checkpoint:
    source = open_source(directory, config)
    specs = model_specs(source.config)
    needed = num_bytes(specs, how.dtype)
    check_fits(needed, f"loading {directory} in {how.dtype}")
    params: ParamTree = {}
    with (
        TensorReader() as reader,
        ProgressBar("loading", needed, is_shown=how.progress) as bar,
    ):
        check_constants(source.plan, reader)
        for path, spec in leaves(specs):
            dtype = jnp.dtype(spec.resolved_dtype(how.dtype))
            values = read_param(source.plan.pieces[path], spec, dtype, reader=reader, bar=bar)
            set_leaf(params, path, jax.device_put(values, how.placement(spec)))
    return Checkpoint(source.config, params, source.notes)


def _load_orbax(directory: Path, config: HybridConfig, how: _Loading) -> Checkpoint:
    manifest = Manifest.read(directory)
    names = [tensor.header.name for tensor in manifest.tensors]
    listing = directory / checkpoint_orbax.MANIFEST
    config, notes = without_missing_head(config, names, listing)
    if config.num_mtp_layers == 0 and count_mtp(names):
        unused = count_mtp(names)
        notes = (f"ignored {unused} {MTP_PREFIX}* tensors: the config has no MTP head",)
        manifest = manifest.without(MTP_PREFIX.replace(".", "/"))
    specs = model_specs(config)
    checkpoint_orbax.check_declared(directory, manifest, specs)
    check_fits(num_bytes(specs, how.dtype), f"loading {directory} in {how.dtype}")
    params: ParamTree = {}
    with (
        OrbaxReader(directory, manifest) as reader,
        ProgressBar("restoring", manifest.num_param_bytes, is_shown=how.progress) as bar,
    ):
        _check_orbax_constants(config, reader)
        for group in checkpoint_orbax.groups(specs):
            found = reader.params({name: how.placement(spec) for name, spec in group.items()})
            for name, spec in group.items():
                value = found.pop(name)
                bar.advance(value.nbytes)
                dtype = jnp.dtype(spec.resolved_dtype(how.dtype))
                value = value if value.dtype == dtype else value.astype(dtype)
                set_leaf(params, tuple(name.split("/")), value)
    return Checkpoint(config, params, notes)


def _check_orbax_constants(config: HybridConfig, reader: OrbaxReader) -> None:
    """Raise an error if the hash constants of another config were stored."""
    stored = {canonical_name(name): name for name in reader.manifest.others}
    for module, table in ple_modules(config).items():
        for key, expected in table_buffers(table).items():
            name = stored.get(f"{module}.{key}")
            if name is None:
                raise CheckpointError(f"{reader.directory} lacks {module}.{key}")
            check_buffer(f"{name} of {reader.directory}", reader.other(name).view("<i8"), expected)
