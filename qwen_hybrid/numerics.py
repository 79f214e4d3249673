"""Everything that may change bits, in one record."""

import dataclasses
import json
from importlib import metadata
from pathlib import Path

import jax

from pallas_kernels.attention import SPAN
from pallas_kernels.rows import TILE_ROWS
from qwen_hybrid.state import StateConfig
from qwen_hybrid.step import COMPILER_OPTIONS

KERNEL_REVISION = 2


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What one set of bits belongs to; states of different records never meet.

    Attributes:
      activation_dtype, log_dtype, kv_dtype, state_dtype: types of rows, log, keys and values,
        sealed states.
      quantization: scheme of the weights.
      block_size, row_tile, attention_span, k_splits: the canonical order.
      tensor_parallel_size: devices a product is cut over.
      kernel_revision: counts changes of arithmetic.
      jax, jaxlib, compiler_options: what compiles it.
      device: compute capability of the GPU, or the CPU's vector instruction sets.
    """

    activation_dtype: str
    log_dtype: str
    kv_dtype: str
    state_dtype: str
    quantization: str
    block_size: int
    row_tile: int
    attention_span: int
    k_splits: int
    tensor_parallel_size: int
    kernel_revision: int
    jax: str
    jaxlib: str
    compiler_options: str
    device: str

    def describe(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


_VECTOR_FLAGS = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


def _cpu() -> str:
    """Vector instruction sets of the processor; XLA compiles for what it finds."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    words: set[str] = set()
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            words.update(line.split(":", 1)[1].split())
    return "cpu " + " ".join(flag for flag in _VECTOR_FLAGS if flag in words)


def device_kind() -> str:
    """The kind of device that bits are compared on."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _cpu()
    return f"{device.platform} {device.device_kind}"


def numerics(state: StateConfig) -> Numerics:
    """The record of an engine with this state."""
    return Numerics(
        activation_dtype=state.dtype,
        log_dtype=state.dtype,
        kv_dtype=state.dtype,
        state_dtype=state.state_dtype.value,
        quantization="none",
        block_size=state.block_size,
        row_tile=TILE_ROWS,
        attention_span=SPAN,
        k_splits=1,
        tensor_parallel_size=1,
        kernel_revision=KERNEL_REVISION,
        jax=jax.__version__,
        jaxlib=metadata.version("jaxlib"),
        compiler_options=json.dumps(COMPILER_OPTIONS, sort_keys=True),
        device=device_kind(),
    )
