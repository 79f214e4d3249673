"""The programs of an experiment: a step, the same with faults, and a commit gone wrong."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.rows import TILE_ROWS
from pallas_kernels.sampling import history_spec
from pallas_kernels.struct import build
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.fixed_batch import SLOTS_OF_ONE, fixed_batch, start_state
from qwen_hybrid.host_memory import check_fits
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import ModelState, Sequences, StateConfig, inventory, state_spec
from qwen_hybrid.step import COMPILER_OPTIONS, Reads, SlotParameters
from spec.drafter import GivenDrafts, Target
from spec.drift.faults import Fault, Faults
from spec.drift.faulty_layers import faulty_layers
from spec.drift.parts import Reader
from spec.drift.rings import with_short_rings
from spec.fixed_batch import parameters
from spec.state import SpecCall, SpecState, StepOutput
from spec.step import step


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What one call of a single sequence verifies.

    Attributes:
      ids: its certain rows.
      drafts: tokens after them; none is plain decoding.
      num_accepted: how many of the drafts are accepted, whatever the target samples.
      is_read: the last certain row samples a token.
    """

    ids: list[int]
    drafts: list[int] = dataclasses.field(default_factory=list)
    num_accepted: int = 0
    is_read: bool = True


class Program:
    """Runs steps of one sequence. Prefill, plain decoding and verify rounds are one program.

    Attributes:
      faults: those that it can make; plain steps are compiled apart, without them.
      max_tokens: of a sequence.
      reader: takes snapshots of its states.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        width: int,
        max_tokens: int,
        dtype: str,
        state_dtype: Any,
        faults: tuple[Fault, ...] = (),
    ):
        """Get ready to compile.

        Args:
          width: rows of a verify window.
          max_tokens: of a sequence, the rows of its last window included.

        Raises:
          MemoryError: the device has not the memory.
        """
        batch = fixed_batch(
            batch_size=1, max_tokens=max_tokens, dtype=dtype, state_dtype=state_dtype
        )
        self.config, self.faults, self.max_tokens = config, faults, max_tokens
        self.state_config: StateConfig = dataclasses.replace(batch, max_window=width)
        entries = inventory(state_spec(config, self.state_config))
        # Plain decoding's, the rounds', and what a step makes of one of them.
        check_fits(3 * sum(entry.num_bytes for entry in entries), "the states of two runs")
        self.reader = Reader(config, self.state_config)
        self._drafter = GivenDrafts(width - 1)
        self.num_rows = -(-width // TILE_ROWS) * TILE_ROWS
        self._model = HybridModel(config, dtype)
        compiled = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
        self._plain, self._faulty = compiled(self._step), compiled(self._faulty_step)
        self._spoil = compiled(self._spoiled)

    @property
    def width(self) -> int:
        """Rows of a verify window."""
        return self._drafter.num_drafts + 1

    def start(self) -> SpecState:
        """An empty sequence."""
        spec = history_spec(1, self.config.vocab_size)
        history = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)
        return SpecState(start_state(self.config, self.state_config), history, ())

    def plain(
        self, params: Any, state: SpecState, drafted: Drafted
    ) -> tuple[StepOutput, SpecState]:
        """A step as the engine makes it."""
        return self._plain(params, state, *self._inputs(drafted))

    def faulty(
        self, params: Any, state: SpecState, drafted: Drafted, *, fault: Fault | None
    ) -> tuple[StepOutput, SpecState]:
        """A step of the program that can make faults, with one of them or none."""
        return self._faulty(params, state, *self._inputs(drafted), self._chosen(fault))

    def after_commit(self, state: SpecState, last: int, fault: Fault | None) -> SpecState:
        """The state with the faults that are made when a step is over.

        Args:
          last: position of the newest row written.
        """
        at: Any = np.asarray([last], np.int32)
        model = self._spoil(state.model, at, self._chosen(fault))
        return dataclasses.replace(state, model=model)

    def _chosen(self, fault: Fault | None) -> Any:
        return np.asarray(-1 if fault is None else self.faults.index(fault), np.int32)

    def _inputs(self, drafted: Drafted) -> tuple[SpecCall, Reads, SlotParameters]:
        count, num_drafts = len(drafted.ids), len(drafted.drafts)
        ids: Any = np.zeros(self.num_rows, np.int32)
        drafts: Any = np.zeros((1, self.width - 1), np.int32)
        ids[:count], drafts[0, :num_drafts] = drafted.ids, drafted.drafts
        call = build(
            SpecCall,
            ids=ids,
            count=_one(count),
            seal_only=np.zeros(1, bool),
            next_id=_one(-1),
            max_drafts=_one(num_drafts),
            drafts=drafts,
            num_drafts=_one(num_drafts),
            max_accepted=_one(drafted.num_accepted),
            min_accepted=_one(drafted.num_accepted),
        )
        row: Any = np.zeros(self.num_rows, np.int32)
        row[0] = count - 1
        num_reads: Any = np.asarray(int(drafted.is_read), np.int32)
        reads = build(Reads, row=row, target=np.full_like(row, -1), count=num_reads)
        return call, reads, parameters(1)

    def _step(
        self,
        params: Any,
        state: SpecState,
        call: SpecCall,
        reads: Reads,
        parameters: SlotParameters,
    ) -> tuple[StepOutput, SpecState]:
        model = dataclasses.replace(state.model, sequences=_with_next_slot(state.model))
        target = Target(self._model.bind({"params": params}), self.state_config, {})
        state = dataclasses.replace(state, model=model)
        return step(target, self._drafter, state, call, reads, parameters)

    def _faulty_step(self, *inputs: Any) -> tuple[StepOutput, SpecState]:
        *given, chosen = inputs
        with nn.intercept_methods(faulty_layers(Faults(chosen, self.faults))):
            return self._step(*given)

    def _spoiled(
        self, state: ModelState, last: Int[Array, " B"], chosen: Int[Array, ""]
    ) -> ModelState:
        faults = Faults(chosen, self.faults)
        state = faults.pick(
            Fault.RING_OVERWRITE, lambda: with_short_rings(state, last, self.config), lambda: state
        )
        right = state.sequences.committed_len
        length = faults.pick(
            Fault.COMMIT_OFF_BY_ONE, lambda: jnp.minimum(right + 1, last + 1), lambda: right
        )
        length = faults.pick(Fault.COMMIT_ONE_SHORT, lambda: right - 1, lambda: length)
        sequences = dataclasses.replace(state.sequences, committed_len=length)
        return dataclasses.replace(state, sequences=sequences)


def _one(value: int) -> Any:
    return np.asarray([value], np.int32)


def _with_next_slot(state: ModelState) -> Sequences:
    """A seal goes to the one of the sequence's state slots that is free."""
    sequences = state.sequences
    assert SLOTS_OF_ONE == 2
    free = jnp.where(sequences.sealed_slot == 1, 2, 1).astype(jnp.int32)
    return dataclasses.replace(sequences, next_slot=free)
