"""Draft state: the keys and values of every layer, in pages that the target's block table names.

A page holds what the target's page of the same number holds: the rows of one block of one sequence.
Nothing is rolled back: rows at or beyond the committed length are never read, and are written again
when their position is.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bits import storage_dtype
from pallas_kernels.struct import build, struct
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.state import AttentionState


@struct
class DSparkState:
    """Context of a draft model.

    Attributes:
      layers: keys and values of each layer, keys after norm and rotation.
    """

    layers: tuple[AttentionState, ...]


def dspark_state_spec(
    config: DSparkConfig, *, num_blocks: int, block_size: int, dtype: str
) -> DSparkState:
    """Declare every array of the draft state; of this the memory budget is made.

    Args:
      config: the draft model.
      num_blocks: pages, as many as the target has.
      block_size: tokens of a page.
      dtype: activation dtype.
    """
    heads, width, stored = config.num_kv_heads, config.head_dim, storage_dtype(dtype)
    key: Any = jax.ShapeDtypeStruct((num_blocks, heads, width, block_size), stored)
    value: Any = jax.ShapeDtypeStruct((num_blocks, heads, block_size, width), stored)
    layer = build(AttentionState, key_pages=key, value_pages=value)
    return build(DSparkState, layers=(layer,) * config.num_layers)


def init_dspark_state(
    config: DSparkConfig, *, num_blocks: int, block_size: int, dtype: str
) -> DSparkState:
    """Return an empty draft state."""
    spec = dspark_state_spec(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)
