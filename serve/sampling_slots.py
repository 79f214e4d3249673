"""What the sampler knows of every batch slot: parameters, and the history that penalties read."""

from typing import Any

import jax
import numpy as np

from pallas_kernels.sampling import (
    ENDS_OUTPUT,
    GENERATED,
    IN_PROMPT,
    Penalties,
    Sampling,
    SlotHistory,
    history_spec,
    with_slot,
)
from pallas_kernels.struct import build
from qwen_hybrid.step import SlotParameters, Wanted
from serve.request import Request
from serve.sampling_params import MAX_TOKEN_IDS_LOGPROB

MAX_FLOAT = float(np.finfo(np.float32).max)
MAX_TOP_K = int(np.iinfo(np.int32).max)


def marks_row(request: Request, vocab_size: int) -> np.ndarray:
    """A request's row of `SlotHistory.marks`, as if it had run from its prompt without a break."""
    marks = np.bincount(request.output_ids, minlength=vocab_size).astype(np.int32) * GENERATED
    marks[request.prompt_ids] |= IN_PROMPT
    # A tokenizer may end texts with ids that the model has no logit for.
    marks[[token for token in request.stop_ids if token < vocab_size]] |= ENDS_OUTPUT
    return marks


def bias_row(request: Request, vocab_size: int) -> np.ndarray:
    """A request's row of `SlotHistory.bias`."""
    bias = np.zeros(vocab_size, np.float32)
    for token, value in (request.params.logit_bias or {}).items():
        bias[token] = np.clip(value, -MAX_FLOAT, MAX_FLOAT)
    return bias


class SamplingSlots:
    """Sampling state of the slots, on the device.

    Attributes:
      parameters: of each slot, sent again only when a slot has got another request.
      history: what penalties read; a step takes it and puts back what it returns.
    """

    def __init__(self, num_slots: int, vocab_size: int, *, marks_ends: bool):
        """Start with slots that nobody uses.

        Args:
          marks_ends: the history tells which tokens end a slot's output, penalties or not.
        """
        self._vocab_size, self._marks_ends = vocab_size, marks_ends
        # A request may come back to its slot after a preemption that let another one in.
        self._owners: list[tuple[Request, int] | None] = [None] * num_slots
        self._arrays: Any = _parameters(num_slots)
        self.parameters: SlotParameters = self._sent()
        spec = history_spec(num_slots, vocab_size)
        self.history: SlotHistory = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), spec)
        self._with_slot = jax.jit(with_slot, donate_argnums=0)

    def warm_up(self) -> None:
        """Compile what the first request with penalties needs."""
        self._write(0, np.zeros(self._vocab_size, np.int32), np.zeros(self._vocab_size, np.float32))

    def assign(self, requests: list[Request]) -> None:
        """Make the requests' slots theirs, those that are not yet since their last admission."""
        is_new = False
        for request in requests:
            owner = self._owners[request.slot]
            if owner is None or owner[0] is not request or owner[1] != request.num_admissions:
                self._owners[request.slot] = request, request.num_admissions
                self._set(request)
                is_new = True
        if is_new:
            self.parameters = self._sent()

    def _sent(self) -> SlotParameters:
        # The device may read the very memory it is given, so that it gets a copy of its own.
        return jax.tree.map(lambda a: jax.device_put(a.copy()), self._arrays)

    def _set(self, request: Request) -> None:
        arrays, params, slot = self._arrays, request.params, request.slot
        sampling, penalties, wanted = arrays.sampling, arrays.penalties, arrays.wanted
        seed = request.seed % (1 << 64)
        sampling.temperature[slot] = min(params.temperature, MAX_FLOAT)
        # Beyond the vocabulary, top-k keeps all.
        sampling.top_k[slot] = min(max(params.top_k, 0), MAX_TOP_K)
        sampling.top_p[slot], sampling.min_p[slot] = params.top_p, params.min_p
        sampling.seed[slot] = seed >> 32, seed & 0xFFFFFFFF
        penalties.repetition[slot] = params.repetition_penalty
        penalties.frequency[slot] = params.frequency_penalty
        penalties.presence[slot] = params.presence_penalty
        penalties.min_len[slot] = request.prompt_len + min(params.min_new_tokens, MAX_TOP_K // 2)
        penalties.in_use[slot] = params.changes_logits
        wanted.any[slot] = request.wants_logprobs
        wanted.top[slot] = max(request.num_input_top, request.num_output_top) > 0
        wanted.token_ids[slot] = 0
        wanted.token_ids[slot, : len(request.token_ids_logprob)] = request.token_ids_logprob
        if params.changes_logits or self._marks_ends:
            size = self._vocab_size
            self._write(slot, marks_row(request, size), bias_row(request, size))

    def _write(self, slot: int, marks: np.ndarray, bias: np.ndarray) -> None:
        at: Any = np.asarray(slot, np.int32)
        self.history = self._with_slot(self.history, at, marks, bias)


def _parameters(num_slots: int) -> SlotParameters:
    """Parameters of slots that nobody uses, in host memory."""

    def of(value: float, dtype: Any, *shape: int) -> Any:
        return np.full((num_slots, *shape), value, dtype)

    return build(
        SlotParameters,
        sampling=build(
            Sampling,
            temperature=of(0, np.float32),
            top_k=of(0, np.int32),
            top_p=of(1, np.float32),
            min_p=of(0, np.float32),
            seed=of(0, np.uint32, 2),
        ),
        penalties=build(
            Penalties,
            repetition=of(1, np.float32),
            frequency=of(0, np.float32),
            presence=of(0, np.float32),
            min_len=of(0, np.int32),
            in_use=of(False, np.bool_),
        ),
        wanted=build(
            Wanted,
            any=of(False, np.bool_),
            top=of(False, np.bool_),
            token_ids=of(0, np.int32, MAX_TOKEN_IDS_LOGPROB),
        ),
    )
