"""Pieces every layer shares: declaring parameters, the gated MLP, residual sums."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dense import linear
from qwen_hybrid.initializers import random_array
from qwen_hybrid.params import ParamSpec, ParamTree

Weights = Mapping[str, Any]


def declare(module: nn.Module, specs: ParamTree, dtype: str) -> dict[str, Any]:
    """Create or fetch a module's parameters from their declarations.

    What is there is taken as it is: prepared matrices have their axes swapped.
    """

    def init(spec: ParamSpec | ParamTree):
        def make(key: Array) -> Any:
            is_leaf = lambda s: isinstance(s, ParamSpec)  # noqa: E731
            flat, tree = jax.tree.flatten(spec, is_leaf=is_leaf)
            keys = jax.random.split(key, len(flat))
            arrays = [random_array(s, k, dtype) for s, k in zip(flat, keys, strict=True)]
            return jax.tree.unflatten(tree, arrays)

        return make

    def fetch(name: str, spec: ParamSpec | ParamTree) -> Any:
        if module.has_variable("params", name):
            return module.get_variable("params", name)
        return module.param(name, init(spec))

    return {name: fetch(name, spec) for name, spec in specs.items()}


def gated_mlp(weights: Weights, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """down(silu(gate x) * up x)."""
    gate = linear(x, weights["gate_proj"]).astype(jnp.float32)
    up = linear(x, weights["up_proj"]).astype(jnp.float32)
    return linear((jax.nn.silu(gate) * up).astype(x.dtype), weights["down_proj"])


def add(x: Array, *terms: Array) -> Array:
    """Sum in float32, rounded once to the type of `x`."""
    total = x.astype(jnp.float32)
    for term in terms:
        total = total + term.astype(jnp.float32)
    return total.astype(x.dtype)
