"""Random weights of any architecture, for tests, benchmarks and the start of training."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.host_memory import aligned_empty, check_fits
from qwen_hybrid.params import ParamSpec, ParamTree, leaves, model_specs, num_bytes, set_leaf
from qwen_hybrid.progress import ProgressBar

# Elements drawn at a time; bounds the float32 copy that exists beside the parameter.
PIECE_ELEMENTS = 1 << 22
# Range of the decay rates and, in the units of the gate, of the time steps of a fresh model.
MAX_DECAY = 16.0
MIN_STEP, MAX_STEP = 1e-3, 1e-1


def dummy_params(
    config: HybridConfig, *, dtype: str = "auto", seed: int = 0, progress: bool | None = None
) -> ParamTree:
    """Return random weights on the default device, a function of the config and the seed alone.

    Args:
        config: any architecture; its quantisation is ignored.
        dtype: "float32", "bfloat16", or "auto" for the config's own.
        seed: seed of the weights.
        progress: whether to show a progress bar; None shows it on a terminal.

    Raises:
        MemoryError: the weights do not fit; the message has the needed and available bytes.
    """
    dtype = resolve_dtype(config, dtype)
    specs = model_specs(config)
    needed = num_bytes(specs, dtype)
    check_fits(needed, f"random {dtype} weights of {config.family}")
    params: ParamTree = {}
    with ProgressBar("random weights", needed, is_shown=progress) as bar:
        for path, spec in leaves(specs):
            rng = np.random.default_rng([seed, zlib.crc32("/".join(path).encode())])
            values = aligned_empty(spec.shape, jnp.dtype(spec.resolved_dtype(dtype)))
            _fill(values.reshape(-1), spec, rng)
            set_leaf(params, path, jax.device_put(values))
            bar.advance(values.nbytes)
    return params


def resolve_dtype(config: HybridConfig, dtype: str) -> str:
    """Return "float32" or "bfloat16"; "auto" is float32 only if the checkpoint is."""
    if dtype == "auto":
        return "float32" if config.dtype == "float32" else "bfloat16"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f'dtype must be "auto", "float32" or "bfloat16"; got {dtype!r}')
    return dtype


def _fill(values: np.ndarray, spec: ParamSpec, rng: np.random.Generator) -> None:
    """Fill a flat parameter piece by piece."""
    for begin in range(0, values.size, PIECE_ELEMENTS):
        part = values[begin : begin + PIECE_ELEMENTS]
        part[:] = random_values(spec, part.size, rng).astype(values.dtype)


def random_values(spec: ParamSpec, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return this many float32 draws from the distribution that a declaration names."""
    match spec.init:
        case "zeros":
            return np.zeros(size, np.float32)
        case "ones":
            return np.ones(size, np.float32)
        case "normal" | "embedding":
            scale = np.float32(1 / math.sqrt(spec.shape[-1]))
            return rng.standard_normal(size, np.float32) * scale
        case "conv":
            bound = 1 / math.sqrt(spec.shape[-1])
            return rng.uniform(-bound, bound, size).astype(np.float32)
        case "a_log":
            return np.log(rng.uniform(1, MAX_DECAY, size)).astype(np.float32)
        case "dt_bias":
            # Log-uniform time steps, through the inverse of softplus.
            steps = np.exp(rng.uniform(math.log(MIN_STEP), math.log(MAX_STEP), size))
            return (steps + np.log(-np.expm1(-steps))).astype(np.float32)
        case _:
            raise ValueError(f"{spec.name} has an unknown init: {spec.init!r}")
