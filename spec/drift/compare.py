"""How far two arrays of state are apart: bits, values, units in the last place."""

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of two arrays; those of rows are aligned at their first.

    Attributes:
      num_elements: of the longer one.
      num_different: whose bits differ, those that only one has included.
      max_abs: largest difference of values that both have; infinite if one is not finite.
      max_ulps: the same, in steps between neighbouring numbers of their type; of whole numbers 0.
    """

    num_elements: int
    num_different: int = 0
    max_abs: float = 0.0
    max_ulps: int = 0

    @property
    def is_zero(self) -> bool:
        """The same bits, to the last."""
        return self.num_different == 0


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Compare two arrays of one type that may have different numbers of rows.

    Raises:
      ValueError: another type, or rows of another shape.
    """
    if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
        raise ValueError(f"{a.dtype} {a.shape} cannot be compared with {b.dtype} {b.shape}")
    count = min(len(a), len(b))
    longer = max(a.size, b.size)
    unpaired = longer - min(a.size, b.size)
    left, right = a[:count], b[:count]
    unequal = _bits(left) != _bits(right)
    num_different = int(unequal.sum())
    if num_different == 0:
        return Difference(longer, unpaired)
    left, right = left[unequal], right[unequal]
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(_values(left) - _values(right))
    max_abs = float(apart.max()) if np.isfinite(apart).all() else float("inf")
    return Difference(longer, num_different + unpaired, max_abs, _ulps(left, right))


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _values(x: np.ndarray) -> np.ndarray:
    """As float64; states keep bfloat16 as uint16."""
    return (x.view(jnp.bfloat16) if x.dtype == np.uint16 else x).astype(np.float64)


def _ulps(a: np.ndarray, b: np.ndarray) -> int:
    if a.dtype == np.int32:
        return 0
    return int(np.abs(_order(a) - _order(b)).max())


def _order(x: np.ndarray) -> np.ndarray:
    """Numbers in their order: bits count up from zero, and down for negative ones."""
    bits, sign = _bits(x).astype(np.int64), 1 << (8 * x.dtype.itemsize - 1)
    return np.where(bits & sign, sign - bits, bits)
