"""The Python API: texts or ids in, result dicts out."""

import concurrent.futures
import dataclasses
import logging
import numbers
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from qwen_hybrid.config import HybridConfig
from qwen_hybrid.digest import combined
from qwen_hybrid.numerics import Numerics, numerics
from qwen_hybrid.weights import dummy_params, load_checkpoint
from serve.engine_config import EngineConfig, longest_text, resolve
from serve.model_path import resolve_model_path
from serve.request import Request
from serve.results import meta_info, visible_ids
from serve.runner import Runner, StepResult
from serve.sampling_params import (
    SamplingParams,
    as_sampling_params,
    require_supported,
    require_vocabulary,
)
from serve.scheduler import Capacities, Scheduler
from serve.tokenizer import IncrementalDetokenizer, Tokenizer

_log = logging.getLogger(__name__)

AUTO = "auto"
DEFAULT_CACHE = Path.home() / ".cache" / "qwen-hybrid" / "compiled"

Params = SamplingParams | dict[str, Any] | None
Result = dict[str, Any]


class Engine:
    """Generates text from a model directory.

    One thread at a time may use it. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        load_format: str = "auto",
        skip_tokenizer_init: bool = False,
        compilation_cache_dir: str | Path | None = AUTO,
        **capacities: Any,
    ):
        """Load a model and compile its programs.

        Args:
          model_path: `demo`, `demo-dense` or a Hugging Face directory.
          load_format: `auto` reads the weights, `dummy` makes random ones.
          skip_tokenizer_init: ids in, ids out.
          compilation_cache_dir: where compiled programs are kept for the next start; None keeps
            none, "auto" what JAX is configured for, else `.cache/qwen-hybrid/compiled` at home.
          capacities: fields of `EngineConfig`.

        Raises:
          FileNotFoundError: no such model. ValueError: a bad argument or checkpoint.
        """
        if load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format must be auto or dummy, got {load_format!r}")
        self.engine_config = _engine_config(capacities)
        _use_compilation_cache(compilation_cache_dir)
        directory = resolve_model_path(model_path)
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.from_directory(directory)
        self.model_config, params, dtype = _load(directory, load_format, self.engine_config.dtype)
        state_config = resolve(self.engine_config, self.model_config, dtype)
        self.numerics: Numerics = numerics(state_config)
        _log.info("numerics %s", self.numerics.describe())
        self._runner = Runner(
            self.model_config, params, state_config, self.engine_config.row_buckets
        )
        self._runner.warm_up()
        self.scheduler = Scheduler(
            Capacities(
                num_slots=state_config.num_slots,
                num_blocks=state_config.num_blocks,
                num_state_slots=state_config.num_state_slots,
                block_size=state_config.block_size,
                log_rows=state_config.log_rows,
                max_rows=self.engine_config.max_rows,
                prefill_rows=self.engine_config.chunked_prefill_size,
            )
        )
        self.context_length = longest_text(self.engine_config, self.model_config)
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "engine-step")
        self._is_open = True

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Release the device memory; may be called twice."""
        if self._is_open:
            self._is_open = False
            self._worker.shutdown()
            del self._runner

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        return_logprob: bool = False,
        return_state_digest: bool = False,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
    ) -> Result | list[Result] | Iterator[Result]:
        """Complete one prompt or a list of them.

        Args:
          prompt: text or list of texts; or else
          input_ids: token ids of one prompt or of a list.
          sampling_params: one for all, or a list as long as the batch.
          return_logprob: log-probabilities of the output, of the raw float32 logits.
          return_state_digest: a digest of the committed state of each request at its end.
          stream: return an iterator of cumulative results of one prompt.
          rid: request ids; drawn if not given.

        Returns:
          A result dict for one prompt, a list in input order for a list.

        Raises:
          ValueError: bad input, before any device work; for a batch it names the index.
        """
        requests, is_batch = self.requests(prompt, sampling_params, input_ids, rid)
        for request in requests:
            request.return_logprob = return_logprob
            request.return_state_digest = return_state_digest
        if stream:
            if is_batch:
                raise ValueError("stream=True takes one prompt, got a list")
            return self._stream(requests[0])
        self._run(requests)
        results = [self._result(request) for request in requests]
        return results if is_batch else results[0]

    def score(self, input_ids: Sequence[int] | Sequence[Sequence[int]]) -> Result | list[Result]:
        """Log-probability of every token of a sequence given those before it, by prefill.

        Returns:
          A result, or a list for a list; meta_info["input_token_logprobs"] holds
          (log-probability, id, text) triples, None for the first token.
        """
        params = SamplingParams(max_new_tokens=0)
        requests, is_batch = self.requests(None, params, input_ids, None)
        for request in requests:
            request.score_prompt = True
        self._run(requests)
        results = [self._result(request) for request in requests]
        return results if is_batch else results[0]

    def get_server_info(self) -> dict[str, Any]:
        """Capacities, the numerics record and counters."""
        self._require_open()
        return {
            "engine_config": dataclasses.asdict(self.engine_config),
            "numerics": dataclasses.asdict(self.numerics),
            "context_length": self.context_length,
            "num_blocks": self.scheduler.capacities.num_blocks,
            "compile_total": self._runner.num_compiles,
        }

    def requests(
        self, prompt: Any, sampling_params: Any, input_ids: Any, rid: Any
    ) -> tuple[list[Request], bool]:
        """Check the arguments of `generate` and make its requests; nothing is queued yet.

        Whoever drives the engine by hand adds them to `scheduler` and calls `step`.

        Returns:
          The requests, and whether a list was given.
        """
        self._require_open()
        prompts, is_batch = self._prompts(prompt, input_ids)
        read = self._encode if input_ids is None else _as_ids
        params = _broadcast("sampling_params", sampling_params, len(prompts), is_batch)
        rids = _broadcast("rid", rid, len(prompts), is_batch)
        requests = []
        for index, (item, one, name) in enumerate(zip(prompts, params, rids, strict=True)):
            try:
                requests.append(self._request(read(item), as_sampling_params(one), name))
            except (TypeError, ValueError) as error:
                where = f"request {index}: " if is_batch else ""
                raise ValueError(f"{where}{error}") from error
        names = [request.rid for request in requests]
        if len(set(names)) < len(names):
            raise ValueError("request ids must differ within a batch")
        return requests, is_batch

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError("the engine is shut down")

    def _prompts(self, prompt: Any, input_ids: Any) -> tuple[list[Any], bool]:
        """The prompts, not looked into yet, and whether a list was given."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give exactly one of prompt and input_ids")
        if prompt is not None:
            if self.tokenizer is None:
                raise ValueError("skip_tokenizer_init is set: give input_ids")
            if isinstance(prompt, str):
                return [prompt], False
            return _listed("prompt", prompt, "a string or a list of strings"), True
        items = _listed("input_ids", input_ids, "a list of integers or of such lists")
        is_batch = len(items) > 0 and not _is_int(items[0])
        return items if is_batch else [items], is_batch

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"prompt must be a string, got {text!r}")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("prompt must be Unicode text, got bytes that are not UTF-8")
        assert self.tokenizer is not None
        return self.tokenizer.encode(text)

    def _request(self, ids: list[int], params: SamplingParams, rid: str | None) -> Request:
        vocab = self.model_config.vocab_size
        if not ids:
            raise ValueError("a prompt needs at least one token")
        wrong = next((i for i in ids if not _is_int(i) or not 0 <= i < vocab), None)
        if wrong is not None:
            raise ValueError(f"input_ids must be integers in [0, {vocab - 1}], got {wrong!r}")
        require_supported(params)
        require_vocabulary(params, vocab)
        total, longest = len(ids) + params.max_new_tokens, self.context_length
        if len(ids) > longest:
            raise ValueError(
                f"The input ({len(ids)} tokens) is longer than the model's context length "
                f"({longest} tokens)."
            )
        if total > longest:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {longest} "
                f"tokens. You requested a total of {total} tokens: {len(ids)} tokens from the "
                f"input messages and {params.max_new_tokens} tokens for the completion."
            )
        seed = params.sampling_seed
        eos = self.tokenizer.eos_token_ids if self.tokenizer else self.model_config.eos_token_ids
        return Request(
            rid=rid or uuid.uuid4().hex,
            prompt_ids=[int(i) for i in ids],
            params=params,
            seed=secrets.randbits(63) if seed is None else seed,
            eos_ids=frozenset(eos),
        )

    def _run(self, requests: list[Request]) -> None:
        """Run until all are finished; on any way out nothing of them stays."""
        try:
            for request in requests:
                self.scheduler.add(request)
            while not all(request.is_finished for request in requests):
                self.step()
        finally:
            self._abandon(requests)

    def _abandon(self, requests: list[Request]) -> None:
        for request in requests:
            request.finish({"type": "abort", "message": "abandoned", "status_code": None})
            self.scheduler.release(request)

    def _stream(self, request: Request) -> Iterator[Result]:
        params = request.params
        detokenizer = (
            self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
            if self.tokenizer
            else None
        )
        text, shown, seen, is_done = "", 0, 0, False
        try:
            self.scheduler.add(request)
            while not is_done:
                # The steps of another stream may have brought this one on, to its end even.
                if not request.is_finished:
                    self.step()
                is_done = request.is_finished
                if len(request.output_ids) > seen or is_done:
                    seen = len(request.output_ids)
                    ids = visible_ids(request)
                    text += _push(detokenizer, ids[shown:], is_done)
                    shown = len(ids)
                    yield self._result(request, text)
        finally:
            self._abandon([request])

    def step(self) -> None:
        """Run one step and hand out what it gave; finished requests are released.

        Raises:
          KeyboardInterrupt: only once the step has ended. It runs in a thread of its own, since an
            interrupt between giving the state to the device and taking it back would lose it.
        """
        self._require_open()
        future = self._worker.submit(self._run_step)
        interrupt: KeyboardInterrupt | None = None
        while not future.done():
            try:
                concurrent.futures.wait([future])
            except KeyboardInterrupt as error:
                interrupt = error
        future.result()
        if interrupt is not None:
            raise interrupt

    def _run_step(self) -> None:
        work = self.scheduler.plan()
        if not work:
            raise RuntimeError("no request can advance although some are unfinished")
        now = time.monotonic()
        for item in work:
            item.request.started_s = item.request.started_s or now
        results = self._runner.run(work)
        # Every state that a seal replaced goes back before a digest may need a slot for its own.
        for item in work:
            self._count_rows(item.request, len(item.ids))
        for result in results:
            self._advance(result)

    def _count_rows(self, request: Request, num_rows: int) -> None:
        size = self.scheduler.capacities.block_size
        boundary = (request.committed_len + num_rows - 1) // size * size
        request.committed_len += num_rows
        if request.next_slot > 0 and boundary > request.sealed_len:
            self.scheduler.stored(request, boundary)

    def _advance(self, result: StepResult) -> None:
        request = result.request
        request.input_logprobs.extend(result.scored)
        if result.token is not None:
            request.take_token(result.token, result.log_probability or 0.0)
        elif request.remaining_prompt == 0:
            request.finish({"type": "length", "length": 0})
        if request.is_finished:
            if request.return_state_digest:
                request.state_digests = self._digest(request)
            self.scheduler.release(request)

    def _digest(self, request: Request) -> dict[str, str]:
        depth, size = request.committed_len, self.scheduler.capacities.block_size
        if depth // size * size > request.sealed_len and not self.scheduler.reserve_seal(request):
            raise RuntimeError("no state slot is free for the seal of a digest")
        return self._runner.state_digests(request, depth)

    def _result(self, request: Request, text: str | None = None) -> Result:
        info = meta_info(request, self.tokenizer)
        if request.state_digests is not None:
            info["state_digest"] = combined(request.state_digests)
        result: Result = {"output_ids": list(request.output_ids), "meta_info": info}
        if self.tokenizer is not None:
            skip = request.params.skip_special_tokens
            result["text"] = (
                self.tokenizer.decode(visible_ids(request), skip_special_tokens=skip)
                if text is None
                else text
            )
        return result


def _push(detokenizer: IncrementalDetokenizer | None, ids: list[int], is_last: bool) -> str:
    if detokenizer is None:
        return ""
    text = detokenizer.push(ids)
    return text + detokenizer.flush() if is_last else text


def _listed(name: str, value: Any, expected: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return list(value)


def _as_ids(ids: Any) -> list[Any]:
    return _listed("input_ids", ids, "a list of integers")


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _broadcast(name: str, value: Any, count: int, is_batch: bool) -> list[Any]:
    """One value for each request: a list must match the batch."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if not is_batch or len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
    return list(value)


def _engine_config(capacities: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(capacities) - known)
    if unknown:
        raise ValueError(f"unknown engine argument {unknown[0]!r}; known are {sorted(known)}")
    return EngineConfig(**capacities)


def _load(directory: Path, load_format: str, dtype: str) -> tuple[HybridConfig, Any, str]:
    config = HybridConfig.from_directory(directory)
    resolved = config.dtype if dtype == "auto" else dtype
    if load_format == "dummy":
        return config, dummy_params(config, dtype=resolved, seed=0), resolved
    checkpoint = load_checkpoint(directory, config, dtype=resolved)
    for note in checkpoint.notes:
        _log.warning("%s", note)
    return checkpoint.config, checkpoint.params, resolved


def _use_compilation_cache(chosen: str | Path | None) -> None:
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if chosen is None or (chosen == AUTO and configured):
        return
    directory = DEFAULT_CACHE if chosen == AUTO else Path(chosen)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"compilation_cache_dir {directory} cannot be made ({error}); None keeps no programs"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
