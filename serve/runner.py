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
from qwen_hybrid.state import Sequences, StateConfig, init_state
from qwen_hybrid.step import COMPILER_OPTIONS, Chosen, Reads
from serve.request import Logprobs, Pair, Request, StepResult
from serve.sampling_slots import SamplingSlots
from serve.scheduler import Work
from serve.speculation import Speculation
from spec import Accepted, SpecCall, SpecState, StepOutput, Target, step

_log = logging.getLogger(__name__)

# The target of a row that samples a token.
SAMPLE = -1


@dataclasses.dataclass(frozen=True)
class _Packed:
    """The rows of a step in the host's packing.

    Attributes:
      items: by slot.
      ids: of all certain rows.
      reads: (row, target) of those that are read.
      spans: by item, where its reads begin and end.
    """

    items: list[Work]
    ids: list[int]
    reads: list[tuple[int, int]]
    spans: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Given:
    """What the host takes of a step's output; `chosen` only where log-probabilities are wanted."""

    accepted: Accepted
    num_drafts: np.ndarray
    sealed_len: np.ndarray
    chosen: Chosen | None


def _packed(work: list[Work]) -> _Packed:
    packed = _Packed(sorted(work, key=lambda item: item.request.slot), [], [], [])
    for item in packed.items:
        first = len(packed.reads)
        packed.reads.extend(_reads(item, len(packed.ids)))
        packed.spans.append((first, len(packed.reads)))
        packed.ids.extend(item.ids)
    return packed


class Runner:
    """Runs steps one at a time; not thread-safe."""

    def __init__(
        self,
        config: HybridConfig,
        params: ParamTree,
        state_config: StateConfig,
        row_buckets: tuple[int, ...],
        speculation: Speculation,
    ):
        """Allocate the state and get the programs ready to compile.

        Args:
          row_buckets: row counts to compile for, ascending; the last bounds a step.
        """
        self.config, self.state_config, self.row_buckets = config, state_config, row_buckets
        self.speculation = speculation
        self.num_compiles = self.num_late_compiles = 0
        self._is_warm = False
        drafter = speculation.drafter
        model = HybridModel(config, state_config.dtype, drafter.tap_layers)
        self._params, self._draft_params = prepare(params), speculation.params
        # Where parameters are loaded to, and with them what a step returns: a state that JAX may
        # still move would make the first step after the warm-up another program.
        device = jax.local_devices()[0]
        self._state = jax.device_put(init_state(config, state_config), device)
        spec = drafter.state_spec(state_config)
        self._draft = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), spec)
        self._draft = jax.device_put(self._draft, device)
        self._step = jax.jit(
            functools.partial(self._traced_step, model),
            donate_argnums=2,
            compiler_options=COMPILER_OPTIONS,
        )
        self._extract = jax.jit(self._traced_extract)
        self._sampling = SamplingSlots(
            state_config.num_slots, config.vocab_size, marks_ends=drafter.num_drafts > 0
        )
        self._sampling.history = jax.device_put(self._sampling.history, device)

    def _traced_step(self, model, params, draft_params, state, call, reads, parameters):
        self._compiles(f"a step of {call.ids.shape[0]} rows")
        target = Target(model.bind({"params": params}), self.state_config, draft_params)
        return step(target, self.speculation.drafter, state, call, reads, parameters)

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
            self._call(rows, _packed([]), self._spec_call(rows, _packed([])))
        jax.block_until_ready(self._extract(self._state, np.zeros((), np.int32)))
        self._is_warm = True

    def run(self, work: list[Work]) -> list[StepResult]:
        """Compute the rows of a step and commit them; results in the order of the work."""
        packed = _packed(work)
        num_rows = sum(item.num_rows for item in work)
        rows = next(bucket for bucket in self.row_buckets if bucket >= num_rows)
        output = self._call(rows, packed, self._spec_call(rows, packed))
        # Most steps want tokens alone: the rest stays where it is.
        wants_all = any(item.request.wants_logprobs for item in work)
        small = (output.accepted, output.proposal.count, output.sealed_len)
        accepted, num_drafts, sealed_len = jax.device_get(small)
        chosen = jax.device_get(output.chosen) if wants_all else None
        given = _Given(accepted, num_drafts, sealed_len, chosen)
        first_draft, by_request = len(packed.reads), {}
        for item, span in zip(packed.items, packed.spans, strict=True):
            by_request[item.request] = _result(item, given, packed.reads, span, first_draft)
            first_draft += int(given.num_drafts[item.request.slot])
        return [by_request[item.request] for item in work]

    def is_whole(self) -> bool:
        """Whether the decode state is there and valid after a step that raised."""
        held = jax.tree.leaves((self._state, self._sampling.history, self._draft))
        leaves = [leaf for leaf in held if isinstance(leaf, jax.Array)]
        if any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            jax.block_until_ready(leaves)
        except RuntimeError as error:
            _log.error("the decode state is lost: %s", error)
            return False
        return True

    def _spec_call(self, rows: int, packed: _Packed) -> SpecCall:
        """The rows of a step as the device takes them."""
        slots, width = self.state_config.num_slots, self.speculation.drafter.num_drafts
        numbers: Any = np.zeros((6, slots), np.int32)
        count, next_id, max_drafts, num_drafts, most, least = numbers
        ids: Any = np.zeros(rows, np.int32)
        drafts: Any = np.zeros((slots, width), np.int32)
        ids[: len(packed.ids)] = packed.ids
        next_id[:], most[:] = -1, width
        for item in packed.items:
            slot = item.request.slot
            count[slot], max_drafts[slot] = len(item.ids), item.max_drafts
            next_id[slot] = _next_id(item)
            if item.max_drafts:
                given = self.speculation.given(item.request, item.max_drafts)
                num_drafts[slot] = len(given.tokens)
                drafts[slot, : len(given.tokens)] = given.tokens
                most[slot], least[slot] = given.max_accepted, given.min_accepted
        return build(
            SpecCall,
            ids=ids,
            count=count,
            seal_only=np.zeros(slots, bool),
            next_id=next_id,
            max_drafts=max_drafts,
            drafts=drafts,
            num_drafts=num_drafts,
            max_accepted=most,
            min_accepted=least,
        )

    def _call(self, rows: int, packed: _Packed, call: SpecCall) -> StepOutput:
        reads: Any = np.zeros((2, rows), np.int32)
        reads[1] = SAMPLE
        for i, (row, target) in enumerate(packed.reads):
            reads[0, i], reads[1, i] = row, target
        num_reads: Any = np.asarray(len(packed.reads), np.int32)
        requests = [item.request for item in packed.items]
        self._sampling.assign(requests)
        model = dataclasses.replace(self._state, sequences=self._sequences(requests))
        output, state = self._step(
            self._params,
            self._draft_params,
            SpecState(model, self._sampling.history, self._draft),
            call,
            build(Reads, row=reads[0], target=reads[1], count=num_reads),
            self._sampling.parameters,
        )
        self._state, self._sampling.history, self._draft = state.model, state.history, state.draft
        return output

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
            rows = self.row_buckets[0]
            # No rows, only the request's place.
            packed = _Packed([Work(request, [], is_last=False)], [], [], [])
            call = self._spec_call(rows, packed)
            call.seal_only[request.slot] = True
            self._call(rows, packed, call)
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


def _next_id(item: Work) -> int:
    """The token after the rows of a request, or -1 where the last of them samples it."""
    request = item.request
    at = request.committed_len + len(item.ids)
    if at == request.prompt_len + len(request.output_ids):
        return SAMPLE
    return request.token_at(at)


def _result(
    item: Work,
    given: _Given,
    reads: list[tuple[int, int]],
    span: tuple[int, int],
    first_draft: int,
) -> StepResult:
    """What a step gave a request.

    Args:
      span: where the host's reads of it begin and end.
      first_draft: where those of its drafts begin.
    """
    request, accepted = item.request, given.accepted
    slot = request.slot
    start, end = span
    num_scored = sum(target != SAMPLE for _, target in reads[start:end])
    middle = start + num_scored
    num_accepted = int(accepted.num_accepted[slot])
    is_sampled = end > middle
    entries = [*range(middle, end), *range(first_draft, first_draft + num_accepted)]
    return StepResult(
        request,
        tokens=accepted.tokens[slot, : num_accepted + 1].tolist() if is_sampled else [],
        sampled=_logprobs(request, given.chosen, entries, request.num_output_top),
        scored=_logprobs(request, given.chosen, [*range(start, middle)], request.num_input_top),
        num_committed=int(accepted.num_committed[slot]),
        sealed_len=int(given.sealed_len[slot]),
        is_round=is_sampled and bool(request.output_ids),
        num_drafts=int(given.num_drafts[slot]),
        num_accepted=num_accepted,
    )


def _logprobs(request: Request, chosen: Chosen | None, rows: list[int], num_top: int) -> Logprobs:
    if not request.wants_logprobs:
        return Logprobs()
    assert chosen is not None
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
