"""Parameters in the form that the CPU's operators compute with."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dense import InputMajor
from qwen_hybrid.params import ParamTree

# Read row by row, not multiplied.
TABLES = ("embed_tokens", "ngram_embedding")
TAPS = "conv1d"


def prepare(params: ParamTree) -> ParamTree:
    """Widen all but the n-gram table to float32 and store matrices by their input axis.

    The CPU multiplies in float32, where bfloat16 values are exact: widening them once instead of in
    every step changes no bit.

    Returns:
      A tree for `HybridModel`; matrices are `InputMajor`. Donates nothing: both trees are in
      memory until the caller drops the first.
    """

    def leaf(path: Any, array: Array) -> Any:
        name = getattr(path[-1], "key", None)
        if name == "ngram_embedding":
            return array
        wide = array.astype(jnp.float32)
        if array.ndim < 2 or name in TABLES or name == TAPS:
            return wide
        return InputMajor(jnp.swapaxes(wide, -1, -2))

    return jax.tree_util.tree_map_with_path(leaf, params)
