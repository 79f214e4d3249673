"""Owns the device: parameters, decode state, the compiled programs."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import numpy as np

from pallas_kernels.struct import build
from qwen_hybrid import digest
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.model import HybridModel
from qwen_hybrid.params import ParamTree
from qwen_hybrid.prepare import prepare
from qwen_hybrid.state import Call, Sequences, StateConfig, commit, init_state
from qwen_hybrid.step import COMPILER_OPTIONS, Chosen, Reads, step
from serve.request import Logprobs, Pair, Request, StepResult
from serve.sampling_slots import SamplingSlots
from serve.scheduler import Work

_log = logging.getLogger(__name__)

# The target of a row that samples a token.
SAMPLE = -1


class Runner:
    """Runs steps one at a time; not thread-safe."""

    def __init__(
        self,
        config: HybridConfig,
        params: ParamTree,
        state_config: StateConfig,
        row_buckets: tuple[int, ...],
    ):
        """Allocate the state and get the programs ready to compile.

        Args:
          row_buckets: row counts to compile for, ascending; the last bounds a step.
        """
        self.config, self.state_config, self.row_buckets = config, state_config, row_buckets
        self.num_compiles = self.num_late_compiles = 0
        self._is_warm = False
        model = HybridModel(config, state_config.dtype)
        self._params = prepare(params)
        # Where parameters are loaded to, and with them what a step returns: a state that JAX may
        # still move would make the first step after the warm-up another program.
        device = jax.local_devices()[0]
        self._state = jax.device_put(init_state(config, state_config), device)
        self._step = jax.jit(
            functools.partial(self._traced_step, model),
            donate_argnums=(1, 2),
            compiler_options=COMPILER_OPTIONS,
        )
        self._extract = jax.jit(self._traced_extract)
        self._sampling = SamplingSlots(state_config.num_slots, config.vocab_size)
        self._sampling.history = jax.device_put(self._sampling.history, device)

    def _traced_step(self, model: HybridModel, params, state, history, call, reads, parameters):
        self._compiles(f"a step of {call.ids.shape[0]} rows")
        chosen, state, history = step(
            model, self.state_config, params, state, history, call, reads, parameters
        )
        return chosen, commit(state, call.certain), history

    def _traced_extract(self, state, slot):
        self._compiles("the extract of a slot's state")
        return digest.extract(state, slot)

    def _compiles(self, what: str) -> None:
        """Count a compilation: a traced function runs once in each."""
        self.num_compiles += 1
        if self._is_warm:
            self.num_late_compiles += 1
            _log.warning("compiling %s after the start: a request waits for it", what)
        else:
            _log.info("compiling %s", what)

    def warm_up(self) -> None:
        """Compile every program before the first request."""
        self._sampling.warm_up()
        for rows in self.row_buckets:
            nothing = np.zeros(self.state_config.num_slots, np.int32)
            self._call(rows, np.zeros(0, np.int32), nothing, [], nothing.astype(bool), [])
        jax.block_until_ready(self._extract(self._state, np.zeros((), np.int32)))
        self._is_warm = True

    def run(self, work: list[Work]) -> list[StepResult]:
        """Compute the rows of a step and commit them."""
        by_slot = sorted(work, key=lambda item: item.request.slot)
        ids: list[int] = []
        count = np.zeros(self.state_config.num_slots, np.int32)
        reads: list[tuple[int, int]] = []
        spans: list[tuple[Work, int, int]] = []
        for item in by_slot:
            first = len(reads)
            reads.extend(_reads(item, len(ids)))
            spans.append((item, first, len(reads)))
            ids.extend(item.ids)
            count[item.request.slot] = len(item.ids)
        rows = next(bucket for bucket in self.row_buckets if bucket >= len(ids))
        no_seal = np.zeros(count.shape, bool)
        requests = [item.request for item in by_slot]
        chosen = self._call(rows, np.asarray(ids, np.int32), count, reads, no_seal, requests)
        targets = [target for _, target in reads]
        # Most steps want tokens alone: the rest stays where it is.
        if not any(request.wants_logprobs for request in requests):
            tokens = jax.device_get(chosen.token).tolist()
            return [StepResult(item.request, tokens[a:b]) for item, a, b in spans]
        chosen = jax.device_get(chosen)
        return [_result(item.request, chosen, a, targets[a:b]) for item, a, b in spans]

    def is_whole(self) -> bool:
        """Whether the decode state is there and valid after a step that raised."""
        held = jax.tree.leaves((self._state, self._sampling.history))
        leaves = [leaf for leaf in held if isinstance(leaf, jax.Array)]
        if any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            jax.block_until_ready(leaves)
        except RuntimeError as error:
            _log.error("the decode state is lost: %s", error)
            return False
        return True

    def _call(
        self,
        rows: int,
        ids: np.ndarray,
        count: Any,
        reads: list[tuple[int, int]],
        seal_only: Any,
        requests: list[Request],
    ) -> Chosen:
        packed: Any = np.zeros((3, rows), np.int32)
        packed[0, : len(ids)] = ids
        packed[2] = SAMPLE
        for i, (row, target) in enumerate(reads):
            packed[1, i], packed[2, i] = row, target
        self._sampling.assign(requests)
        state = dataclasses.replace(self._state, sequences=self._sequences(requests))
        num_reads: Any = np.asarray(len(reads), np.int32)
        chosen, self._state, self._sampling.history = self._step(
            self._params,
            state,
            self._sampling.history,
            build(Call, ids=packed[0], count=count, certain=count, seal_only=seal_only),
            build(Reads, row=packed[1], target=packed[2], count=num_reads),
            self._sampling.parameters,
        )
        return chosen

    def _sequences(self, requests: list[Request]) -> Sequences:
        """Where the slots of a call stand; the others compute nothing."""
        sc = self.state_config
        numbers: Any = np.zeros((4, sc.num_slots), np.int32)
        numbers[3] = -1
        table: Any = np.zeros((sc.num_slots, sc.blocks_per_slot), np.int32)
        for r in requests:
            numbers[:, r.slot] = (r.committed_len, r.sealed_len, r.sealed_slot, r.next_slot)
            table[r.slot, : len(r.blocks)] = r.blocks
        return build(
            Sequences,
            committed_len=numbers[0],
            sealed_len=numbers[1],
            sealed_slot=numbers[2],
            next_slot=numbers[3],
            block_table=table,
        )

    def state_digests(self, request: Request, depth: int) -> dict[str, str]:
        """Digest of every part of a request's committed state at `depth` rows.

        The request must still own its slot; a due seal is stored first, in `next_slot`.
        """
        sc = self.state_config
        if depth // sc.block_size * sc.block_size > request.sealed_len:
            mark = np.zeros(sc.num_slots, bool)
            mark[request.slot] = True
            nothing = np.zeros(sc.num_slots, np.int32)
            empty = np.zeros(0, np.int32)
            self._call(self.row_buckets[0], empty, nothing, [], mark, [request])
        else:
            sequences = self._sequences([request])
            self._state = dataclasses.replace(self._state, sequences=sequences)
        slot = np.asarray(request.slot, np.int32)
        part = jax.device_get(self._extract(self._state, slot))
        return digest.digests(digest.canonical(part, depth, self.config, sc))


def _reads(item: Work, first_row: int) -> list[tuple[int, int]]:
    """(packed row, target) of the rows whose logits are wanted, scored ones first."""
    request = item.request
    start, end = request.committed_len, request.committed_len + len(item.ids)
    reads = []
    if request.input_start >= 0:
        # What an earlier piece, or the same before a preemption, has given is not given again.
        first = max(request.input_start + request.num_scored, start)
        targets = request.prompt_ids[first + 1 : end + 1]
        reads = [(first_row + first - start + i, target) for i, target in enumerate(targets)]
    # The newest token is the last row's: the one after it is still to be sampled.
    if end == request.prompt_len + len(request.output_ids) and request.params.max_new_tokens > 0:
        reads.append((first_row + len(item.ids) - 1, SAMPLE))
    return reads


def _result(request: Request, chosen: Chosen, first: int, targets: list[int]) -> StepResult:
    """What the reads from `first` on give a request."""
    num_scored = sum(target != SAMPLE for target in targets)
    middle, end = first + num_scored, first + len(targets)
    return StepResult(
        request,
        tokens=[int(token) for token in chosen.token[middle:end]],
        sampled=_logprobs(request, chosen, slice(middle, end), request.num_output_top),
        scored=_logprobs(request, chosen, slice(first, middle), request.num_input_top),
    )


def _logprobs(request: Request, chosen: Chosen, rows: slice, num_top: int) -> Logprobs:
    if not request.wants_logprobs:
        return Logprobs()
    # Columns that nobody asked for are most of the array.
    values, top = chosen.log_probability[rows], chosen.top[rows, :num_top]
    num_top, after_top = top.shape[1], 1 + chosen.top.shape[1]
    own = request.token_ids_logprob
    return Logprobs(
        tokens=values[:, 0].tolist(),
        top=_pairs(values[:, 1 : 1 + num_top], top),
        token_ids=_pairs(
            values[:, after_top : after_top + len(own)], np.tile(own, (len(values), 1))
        ),
    )


def _pairs(values: Any, ids: Any) -> list[list[Pair]]:
    """(log-probability, id) by row."""
    rows = zip(values.tolist(), ids.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]
