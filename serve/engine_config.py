"""Capacities of an engine."""

import dataclasses
import math
from typing import Any

import jax

from pallas_kernels.gated_delta_net import StateDtype
from pallas_kernels.rows import TILE_ROWS
from pallas_kernels.sampling import history_spec
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.host_memory import check_fits
from qwen_hybrid.state import StateConfig, inventory, state_spec
from serve.speculation import (
    DSPARK,
    NEXTN,
    Debug,
    Settings,
    algorithm_of,
    make_drafter,
    width_of,
)

# Of one step, and of one block: beyond it no machine has the memory.
MAX_ROWS = 1 << 20
DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_CONTEXT = 4096
DEFAULT_MEMORY_BYTES = 1 << 30


def _tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS) * TILE_ROWS


def _require_count(name: str, value: Any, most: int | None) -> None:
    """Raise a ValueError unless `value` is an integer of at least 1, and at most `most`."""
    rule = "an integer of at least 1" if most is None else f"an integer in [1, {most}]"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < 1 or (most is not None and value > most):
        raise ValueError(f"{name} must be {rule}, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine may use; `resolve` turns it into shapes.

    Attributes:
      max_running_requests: sequences that run side by side.
      context_length: longest prompt plus completion, or None for the smaller of the model's and
        4096.
      chunked_prefill_size: prompt tokens of one step at most.
      block_size: tokens of a block.
      memory_bytes: budget of the decode state, or None for as much as all sequences at full
        length can use, at most 1 GiB.
      dtype: activation dtype: auto (the checkpoint's), float32 or bfloat16.
      state_dtype: storage of sealed states.
      speculative_algorithm: NEXTN (also MTP), DSPARK, NGRAM, or None to draft nothing.
      speculative_num_draft_tokens: rows of a verify window: the drafts, and the target's own
        token; None for the algorithm's default.
      speculative_draft_model_path: of DSPARK: demo-dspark, demo-dense-dspark or a directory.
      speculative_dspark_block_size: the same as one row less of speculative_num_draft_tokens.
      speculative_dspark_threshold: verify no draft that is taken, with those before it, with less
        than this probability, as the confidence head has it; 0 verifies all.
      speculative_adaptive: verify fewer drafts where many requests generate or few are accepted.
      disable_self_check: start with speculation although nobody has seen that it changes no bit.
      speculative_debug: drafts for diagnosis: reject, accept:N, oracle, adversarial:K or random.
    """

    max_running_requests: int = 8
    context_length: int | None = None
    chunked_prefill_size: int = 256
    block_size: int = 64
    memory_bytes: int | None = None
    dtype: str = "auto"
    state_dtype: str = "float32"
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_draft_model_path: str | None = None
    speculative_dspark_block_size: int | None = None
    speculative_dspark_threshold: float = 0.0
    speculative_adaptive: bool = False
    disable_self_check: bool = False
    speculative_debug: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "chunked_prefill_size"):
            _require_count(name, getattr(self, name), MAX_ROWS)
        for name in ("context_length", "memory_bytes"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), None)
        _require_count("block_size", self.block_size, MAX_ROWS)
        if self.block_size % TILE_ROWS:
            raise ValueError(f"block_size must be a multiple of {TILE_ROWS}, got {self.block_size}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be {', '.join(DTYPES)}, got {self.dtype!r}")
        known = [d.value for d in StateDtype]
        if self.state_dtype not in known:
            raise ValueError(f"state_dtype must be one of {known}, got {self.state_dtype!r}")
        for name in ("speculative_adaptive", "disable_self_check"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.speculative_debug is not None:
            Debug.parse(self.speculative_debug)
        if (self.speculative_draft_model_path is None) == (self.algorithm == DSPARK):
            raise ValueError(
                "speculative_draft_model_path is needed by DSPARK and by nothing else, got "
                f"{self.speculative_draft_model_path!r} and {self.algorithm}"
            )
        _ = self.window

    @property
    def algorithm(self) -> str | None:
        """The speculative algorithm by its own name."""
        return algorithm_of(self.speculative_algorithm)

    @property
    def window(self) -> int:
        """Rows of a generating request in a step, at most."""
        return width_of(self.algorithm, self.speculative_debug, self._width)

    @property
    def _width(self) -> int | None:
        width, block = self.speculative_num_draft_tokens, self.speculative_dspark_block_size
        if block is None:
            return width
        if self.algorithm != DSPARK or width not in (None, block + 1):
            raise ValueError(
                f"speculative_dspark_block_size {block!r} is for DSPARK, in the place of "
                f"speculative_num_draft_tokens, which is one more; got {self.algorithm} and {width}"
            )
        return block + 1

    @property
    def speculation(self) -> Settings:
        """How to draft."""
        return Settings(
            algorithm=self.algorithm,
            width=self.window,
            debug=self.speculative_debug,
            draft_model_path=self.speculative_draft_model_path,
            confidence_threshold=self.speculative_dspark_threshold,
        )

    @property
    def max_rows(self) -> int:
        """Rows of the widest step."""
        return _tiles(self.max_running_requests * self.window + self.chunked_prefill_size)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Row counts that programs are compiled for, ascending."""
        return tuple(sorted({_tiles(self.max_running_requests * self.window), self.max_rows}))


def longest_text(config: EngineConfig, model: HybridConfig) -> int:
    """Tokens of the longest prompt plus completion.

    Raises:
      ValueError: more than the model has positions.
    """
    longest = model.max_position_embeddings
    context = config.context_length or min(longest, DEFAULT_CONTEXT)
    if context > longest:
        raise ValueError(
            f"context_length must be at most the model's {longest} positions, got {context}"
        )
    return context


def resolve(config: EngineConfig, model: HybridConfig, dtype: str) -> StateConfig:
    """Size the pools from the byte budget, for this device.

    Raises:
      ValueError: as `size_pools`.
      MemoryError: the device has not that much memory.
    """
    state_config, num_bytes = size_pools(config, model, dtype)
    check_fits(num_bytes, "the decode state")
    return state_config


def size_pools(config: EngineConfig, model: HybridConfig, dtype: str) -> tuple[StateConfig, int]:
    """Size the pools from the byte budget, whatever this device has.

    Every array of the state is counted, as its declared inventory lists it, and the history that
    the sampler keeps of each slot.

    Returns:
      The pools, and the bytes of all of it.

    Raises:
      ValueError: the context is longer than the model's, or the budget does not hold one sequence
        at full length; the message has needed and available bytes.
    """
    context = longest_text(config, model)
    if model.qsa is not None and config.block_size % model.qsa.ratio:
        raise ValueError(
            f"block_size must be a multiple of the {model.qsa.ratio} tokens of an index key, got "
            f"{config.block_size}"
        )
    per_slot = -(-context // config.block_size)
    slots = config.max_running_requests
    smallest = StateConfig(
        num_slots=slots,
        num_blocks=per_slot,
        num_state_slots=1 + slots + max(1, -(-slots // 8)),
        blocks_per_slot=per_slot,
        block_size=config.block_size,
        max_window=config.window,
        with_mtp=config.algorithm == NEXTN,
        dtype=dtype,
        state_dtype=StateDtype(config.state_dtype),
    )
    drafter = make_drafter(model, config.speculation)
    entries = inventory((state_spec(model, smallest), drafter.state_spec(smallest)))
    fixed = sum(e.num_bytes for e in entries if e.per != "block")
    history = history_spec(slots, model.vocab_size)
    fixed += sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(history))
    block = sum(e.num_bytes for e in entries if e.per == "block") // per_slot
    budget = config.memory_bytes or max(
        fixed + block * per_slot, min(DEFAULT_MEMORY_BYTES, fixed + block * per_slot * slots)
    )
    available = math.inf if block == 0 else (budget - fixed) // block
    if available < per_slot:
        raise ValueError(
            f"memory_bytes {budget} is too small: {slots} sequences need {fixed} bytes and one of "
            f"{context} tokens {block * per_slot} more"
        )
    num_blocks = int(min(available, per_slot * slots))
    return dataclasses.replace(smallest, num_blocks=num_blocks), fixed + block * num_blocks
