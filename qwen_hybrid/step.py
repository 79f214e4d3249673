"""One jitted step: rows in, a token and its log-probability out for the rows that are read."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.index import take
from pallas_kernels.rows import map_tiles
from pallas_kernels.sampling import Sampling, choose, log_probability
from pallas_kernels.struct import struct
from qwen_hybrid.layers import Weights
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import Call, ModelState, StateConfig

# Casts happen where the code says so: keeping a wider value would make bits depend on fusion.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@struct
class Reads:
    """Rows whose next token is wanted.

    Attributes:
      row: packed indices, the first `count` valid.
      target: the token to give the log-probability of, or -1 for the one chosen.
      count: how many.
    """

    row: Int[Array, " R"]
    target: Int[Array, " R"]
    count: Int[Array, ""]


@struct
class Chosen:
    """What each read row gives.

    Attributes:
      token: the token the row samples for the position after its own.
      log_probability: of the target, or of `token`, under the raw float32 logits.
    """

    token: Int[Array, " R"]
    log_probability: Float[Array, " R"]


def step(
    model: HybridModel,
    state_config: StateConfig,
    params: Weights,
    state: ModelState,
    call: Call,
    reads: Reads,
    sampling: Sampling,
) -> tuple[Chosen, ModelState]:
    """Compute the rows of a call and choose a token for each row that is read.

    Nothing is committed.

    Args:
      sampling: parameters of each slot.

    Donates: `state`, where the caller jits it so.
    """
    bound = model.bind({"params": params})
    x, rows, state = bound(call, state, state_config)

    def choose_rows(row: Array, target: Array) -> Chosen:
        logits = bound.head(bound.final(take(x, row)))
        slot = take(rows.slot, row)
        own = Sampling(*(take(getattr(sampling, f), slot) for f in Sampling.__dataclass_fields__))
        token = choose(logits, own, take(rows.position, row) + 1)
        return Chosen(token, log_probability(logits, jnp.where(target >= 0, target, token)))

    return map_tiles(choose_rows, reads.count, reads.row, reads.target), state


def logits(
    model: HybridModel,
    state_config: StateConfig,
    params: Weights,
    state: ModelState,
    call: Call,
) -> tuple[Float[Array, "R V"], ModelState]:
    """Logits of every row of a call, float32; rows beyond the call's are arbitrary."""
    bound = model.bind({"params": params})
    x, rows, state = bound(call, state, state_config)
    return map_tiles(lambda x: bound.head(bound.final(x)), rows.num_rows, x), state
