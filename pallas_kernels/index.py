"""Reads at indices that are known to be valid, and division of numbers that are never negative.

NumPy's semantics (negative indices, out-of-range checks, floored division) cost an operation each;
inside a loop body that is most of what a small program does.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def take(array: Array, *index: Any) -> Array:
    """array[index] for indices in range; others are undefined."""
    where = index[0] if len(index) == 1 else index
    return array.at[where].get(mode="promise_in_bounds", wrap_negative_indices=False)


def cut(array: Array, start: tuple[Any, ...], sizes: tuple[int, ...]) -> Array:
    """A block of an array; `start` names the leading axes, the others begin at 0."""
    rest = array.ndim - len(start)
    return lax.dynamic_slice(
        array,
        (*start, *(0,) * rest),
        (*sizes, *array.shape[len(sizes) :]),
        allow_negative_indices=False,
    )


def blocks(
    array: Shaped[Array, "..."],
    index: Int[Array, "lanes axes"],
    *,
    axes: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Shaped[Array, "lanes ..."]:
    """A block of an array for each lane, stacked along a first axis.

    One gather: XLA on the CPU copies what is stacked of several slices an element at a time, and
    copies fast where the index is read as it stands.

    Args:
      index: where the block of each lane begins in `axes`, ascending; in the others it begins at 0.
      sizes: of a block, in all axes.
    """
    if index.shape[0] == 1:
        # XLA would make a slice of the gather and number it apart from ours: a fusion that holds
        # one of each with the same number takes one for the other, and fails to compile.
        start = [jnp.zeros((), index.dtype)] * array.ndim
        for place, axis in enumerate(axes):
            start[axis] = index[0, place]
        return lax.dynamic_slice(array, start, sizes, allow_negative_indices=False)[None]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, array.ndim + 1)),
        collapsed_slice_dims=(),
        start_index_map=axes,
    )
    return lax.gather(array, index, numbers, sizes, mode="promise_in_bounds")


def paste(array: Array, block: Array, start: tuple[Any, ...]) -> Array:
    """The array with a block replaced; `start` names the leading axes."""
    rest = array.ndim - len(start)
    return lax.dynamic_update_slice(
        array, block, (*start, *(0,) * rest), allow_negative_indices=False
    )


def div(a: Array, b: int) -> Array:
    """a // b for a >= 0."""
    return lax.div(a, jnp.asarray(b, a.dtype))


def rem(a: Array, b: int) -> Array:
    """a % b for a >= 0."""
    return lax.rem(a, jnp.asarray(b, a.dtype))
