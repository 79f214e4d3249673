"""How a sealed state is stored."""

import enum

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.bits import from_bits, storage_dtype, to_bits


class StateDtype(enum.Enum):
    """Storage of sealed states.

    FLOAT32 keeps all bits, BFLOAT16 rounds once per block, BFLOAT16_PAIR keeps a high and a low
    half (about 16 mantissa bits).
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    BFLOAT16_PAIR = "bfloat16_pair"

    @property
    def dtype(self):
        """Array type of the pool: float32, or uint16 that holds the bits of bfloat16."""
        return storage_dtype(jnp.float32 if self is StateDtype.FLOAT32 else jnp.bfloat16)

    @property
    def planes(self) -> int:
        """Arrays of that type per state."""
        return 2 if self is StateDtype.BFLOAT16_PAIR else 1

    def encode(self, state: Float[Array, "*S"]) -> Array:
        """Stored planes `[planes, *S]` of a float32 state."""
        high = to_bits(state, self.dtype)
        if self is not StateDtype.BFLOAT16_PAIR:
            return high[None]
        low = to_bits(state - from_bits(high).astype(jnp.float32), self.dtype)
        return jnp.stack((high, low))

    def decode(self, planes: Array) -> Array:
        """Float32 state of stored planes."""
        wide = from_bits(planes).astype(jnp.float32)
        return wide[0] if self.planes == 1 else wide[0] + wide[1]
