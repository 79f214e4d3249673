"""Memory that is free for weights, and buffers that JAX can adopt without a copy."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Alignment at which JAX's CPU backend adopts a NumPy buffer as it is.
ALIGNMENT = 64
CGROUP = Path("/sys/fs/cgroup")
CGROUP_V1 = CGROUP / "memory"
MEMINFO = Path("/proc/meminfo")


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialised array whose first byte is aligned for JAX."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def available_bytes() -> int | None:
    """Return the bytes free for weights on the default device; None where that is unknown."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None
    return available_host_bytes()


def available_host_bytes() -> int | None:
    """Return the bytes of main memory that are free; None where that is unknown."""
    limits = [_meminfo_available(), _cgroup_available()]
    return min((limit for limit in limits if limit is not None), default=None)


def check_fits(needed: int, purpose: str) -> None:
    """Raise a MemoryError with both numbers unless the bytes are free on the default device."""
    _check(needed, available_bytes(), purpose)


def check_fits_host(needed: int, purpose: str) -> None:
    """The same for main memory."""
    _check(needed, available_host_bytes(), purpose)


def _check(needed: int, available: int | None, purpose: str) -> None:
    if available is not None and needed > available:
        raise MemoryError(f"{purpose} needs {needed:,} bytes; {available:,} bytes are available")


def _meminfo_available() -> int | None:
    for line in _read(MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    """Return what the container's limit leaves; file pages count as free, as in meminfo."""
    for limit, usage, stat, page_key in (
        (CGROUP / "memory.max", CGROUP / "memory.current", CGROUP / "memory.stat", "file"),
        (
            CGROUP_V1 / "memory.limit_in_bytes",
            CGROUP_V1 / "memory.usage_in_bytes",
            CGROUP_V1 / "memory.stat",
            "total_cache",
        ),
    ):
        limit_text, usage_text = _read(limit).strip(), _read(usage).strip()
        if limit_text.isdigit() and usage_text.isdigit():
            pairs = (line.split() for line in _read(stat).splitlines())
            pages = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
            return int(limit_text) - int(usage_text) + pages.get(page_key, 0)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
