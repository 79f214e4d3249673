"""Frozen dataclasses of arrays that JAX can trace, shard and donate."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

_T = TypeVar("_T")


def static(default: Any = dataclasses.MISSING) -> Any:
    """Mark a field that shapes the program: hashable, part of the tree's structure."""
    return dataclasses.field(default=default, metadata={"static": True})


def build(cls: type[_T], **fields: Any) -> _T:
    """Make a struct without calling `__init__`, so that its leaves may be specs instead of arrays.

    Raises:
      TypeError: fields are missing or unknown.
    """
    known = {f.name: f.default for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {
        name: default for name, default in known.items() if default is not dataclasses.MISSING
    }
    values |= fields
    if values.keys() != known.keys():
        raise TypeError(f"{cls.__name__} has the fields {sorted(known)}, got {sorted(fields)}")
    obj = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(obj, name, value)
    return obj


@dataclass_transform(frozen_default=True, field_specifiers=(static,))
def struct(cls: type[_T]) -> type[_T]:
    """Make `cls` a frozen dataclass that is also a pytree.

    Rebuilding never calls `__init__`, so trees of specs, shardings or `None` pass the run-time
    shape checker.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    data = tuple(f.name for f in fields if not f.metadata.get("static", False))
    meta = tuple(f.name for f in fields if f.metadata.get("static", False))

    def flatten(obj):
        keyed = tuple((jax.tree_util.GetAttrKey(n), getattr(obj, n)) for n in data)
        return keyed, tuple(getattr(obj, n) for n in meta)

    def unflatten(aux, children):
        values = dict(zip(data, children, strict=True))
        return build(cls, **values, **dict(zip(meta, aux, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
