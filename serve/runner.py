"""Owns the device: parameters, decode state, the compiled programs."""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sampling import Sampling
from pallas_kernels.struct import build
from qwen_hybrid import digest
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.model import HybridModel
from qwen_hybrid.params import ParamTree
from qwen_hybrid.state import Call, Sequences, StateConfig, commit, init_state
from qwen_hybrid.step import COMPILER_OPTIONS, Reads, step
from serve.request import Request
from serve.scheduler import Work

_log = logging.getLogger(__name__)

MAX_TEMPERATURE = float(np.finfo(np.float32).max)
MAX_TOP_K = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one request got from a step.

    Attributes:
      request: whose.
      token, log_probability: the token its last row sampled, if that row was read.
      scored: log-probabilities of the tokens after its rows, if it is being scored.
    """

    request: Request
    token: int | None
    log_probability: float | None
    scored: list[float]


def widen(params: ParamTree) -> ParamTree:
    """Matrices in float32, tables as they are.

    The CPU multiplies in float32; bfloat16 values are exact there, so that widening once instead
    of in every step changes no bit.
    """

    def leaf(path, array):
        is_table = any(getattr(key, "key", None) == "ngram_embedding" for key in path)
        return array if is_table else array.astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, params)


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
        self.num_compiles = 0
        model = HybridModel(config, state_config.dtype)
        self._params = widen(params)
        self._state = init_state(config, state_config)
        self._step = jax.jit(
            functools.partial(self._traced_step, model),
            donate_argnums=1,
            compiler_options=COMPILER_OPTIONS,
        )
        self._extract = jax.jit(digest.extract)
        self._sampling = _SamplingArrays(state_config.num_slots)

    def _traced_step(self, model: HybridModel, params, state, call, reads, sampling):
        # Runs when a program is traced, that is once per compilation.
        self.num_compiles += 1
        _log.info("compiling a step of %d rows", call.ids.shape[0])
        chosen, state = step(model, self.state_config, params, state, call, reads, sampling)
        return chosen, commit(state, call.certain)

    def warm_up(self) -> None:
        """Compile every program before the first request."""
        for rows in self.row_buckets:
            nothing = np.zeros(self.state_config.num_slots, np.int32)
            self._call(rows, np.zeros(0, np.int32), nothing, [], nothing.astype(bool), [])

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
        tokens, logprobs = self._call(
            rows, np.asarray(ids, np.int32), count, reads, no_seal, requests
        )
        return [_result(item, tokens[a:b], logprobs[a:b]) for item, a, b in spans]

    def _call(
        self,
        rows: int,
        ids: np.ndarray,
        count: Any,
        reads: list[tuple[int, int]],
        seal_only: Any,
        requests: list[Request],
    ) -> tuple[np.ndarray, np.ndarray]:
        packed: Any = np.zeros((3, rows), np.int32)
        packed[0, : len(ids)] = ids
        packed[2] = -1
        for i, (row, target) in enumerate(reads):
            packed[1, i], packed[2, i] = row, target
        for request in requests:
            self._sampling.set(request)
        state = dataclasses.replace(self._state, sequences=self._sequences(requests))
        num_reads: Any = np.asarray(len(reads), np.int32)
        chosen, self._state = self._step(
            self._params,
            state,
            build(Call, ids=packed[0], count=count, certain=count, seal_only=seal_only),
            build(Reads, row=packed[1], target=packed[2], count=num_reads),
            self._sampling.arrays,
        )
        token, log_probability = jax.device_get((chosen.token, chosen.log_probability))
        return token[: len(reads)], log_probability[: len(reads)]

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
    """(packed row, target) of the rows whose logits are wanted."""
    request = item.request
    if request.score_prompt:
        at = request.committed_len
        targets = request.prompt_ids[at + 1 : at + 1 + len(item.ids)]
        return [(first_row + i, target) for i, target in enumerate(targets)]
    if item.is_last and request.params.max_new_tokens > 0:
        return [(first_row + len(item.ids) - 1, -1)]
    return []


def _result(item: Work, tokens: np.ndarray, logprobs: np.ndarray) -> StepResult:
    if item.request.score_prompt:
        return StepResult(item.request, None, None, [float(p) for p in logprobs])
    if not len(tokens):
        return StepResult(item.request, None, None, [])
    return StepResult(item.request, int(tokens[0]), float(logprobs[0]), [])


class _SamplingArrays:
    """Sampling parameters of every slot, as the step takes them."""

    def __init__(self, num_slots: int):
        def of(value: float, dtype: Any, *shape: int) -> Any:
            return np.full((num_slots, *shape), value, dtype)

        self.arrays = build(
            Sampling,
            temperature=of(0, np.float32),
            top_k=of(0, np.int32),
            top_p=of(1, np.float32),
            min_p=of(0, np.float32),
            seed=of(0, np.uint32, 2),
        )

    def set(self, request: Request) -> None:
        """Take over a request's parameters."""
        arrays: Any = self.arrays
        params, slot, seed = request.params, request.slot, request.seed % (1 << 64)
        arrays.temperature[slot] = min(params.temperature, MAX_TEMPERATURE)
        # Beyond the vocabulary, top-k keeps all.
        arrays.top_k[slot] = min(max(params.top_k, 0), MAX_TOP_K)
        arrays.top_p[slot], arrays.min_p[slot] = params.top_p, params.min_p
        arrays.seed[slot] = seed >> 32, seed & 0xFFFFFFFF
