"""Put a changed function in the place of another, wherever our modules hold it."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest

OURS = ("pallas_kernels", "qwen_hybrid", "cache", "spec", "serve", "tests")


def swap(
    patch: pytest.MonkeyPatch, module: ModuleType, name: str, make: Callable[[Any], Any]
) -> None:
    """Replace a function by `make(function)` in its module and in those that imported it.

    Raises:
      AttributeError: the module has no such function: the mutant is out of date.
    """
    original = getattr(module, name)
    changed = make(original)
    for path, other in list(sys.modules.items()):
        if path.partition(".")[0] not in OURS:
            continue
        for key, value in list(vars(other).items()):
            if value is original:
                patch.setattr(other, key, changed)


class Shim:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, **changed: Any):
        self._module, self._changed = module, changed

    def __getattr__(self, name: str) -> Any:
        changed = self.__dict__["_changed"]
        return changed[name] if name in changed else getattr(self.__dict__["_module"], name)


def where_by_zero(mask: Any, x: Any, y: Any) -> Any:
    """`jnp.where`, but what is to be zero is multiplied by it."""
    is_zero = isinstance(y, float) and y == 0.0
    return x * mask.astype(x.dtype) if is_zero else jnp.where(mask, x, y)
