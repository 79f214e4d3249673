"""The Python API: texts or ids in, result dicts out."""

import asyncio
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import jax
import tqdm

from qwen_hybrid.digest import combined
from qwen_hybrid.numerics import Numerics, numerics
from qwen_hybrid.state import StateConfig
from serve.adaptive import AdaptiveLength
from serve.call_options import BlockingOptions, CallOptions, RequestOptions, call_options
from serve.core import EngineCore
from serve.engine_config import EngineConfig, longest_text, resolve
from serve.errors import EngineDeadError
from serve.inputs import Batch, Inputs, Wanted, require_bool, sampling_defaults_of
from serve.loading import (
    AUTO,
    LOAD_FORMATS,
    engine_config,
    load_model,
    use_compilation_cache,
)
from serve.loop import Call, EngineLoop
from serve.model_path import resolve_model_path
from serve.request import Request
from serve.results import meta_info
from serve.runner import Runner
from serve.sampling_params import SamplingParams
from serve.scheduler import Capacities, Scheduler
from serve.self_check import self_check
from serve.sglang_flags import engine_fields
from serve.speculation import make_speculation
from serve.streams import AsyncWaiter, PartReader, Result, Waiter
from serve.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Params = SamplingParams | dict[str, Any] | None
Prompts = str | Sequence[str] | None
Ids = Sequence[int] | Sequence[Sequence[int]] | None
Results = Result | list[Result]


class Engine:
    """Generates text from a model directory. Thread-safe.

    Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        load_format: str = AUTO,
        skip_tokenizer_init: bool = False,
        incremental_streaming_output: bool = False,
        stream_interval: int = 1,
        sampling_defaults: str = "model",
        compilation_cache_dir: str | Path | None = AUTO,
        **capacities: Any,
    ):
        """Load a model and compile its programs.

        Args:
          model_path: `demo`, `demo-dense` or a model directory, of either format.
          load_format: `auto` reads the weights, `dummy` makes random ones.
          skip_tokenizer_init: ids in, ids out.
          incremental_streaming_output: the parts of a stream hold only what is new.
          stream_interval: tokens of a part of a stream, where the request says nothing.
          sampling_defaults: what counts where a request says nothing: `model` is the model's own
            `generation_config.json`, which is read with the tokenizer, and what that leaves out
            `SamplingParams`; `openai` is `SamplingParams` alone. A ready one is taken as it is.
          compilation_cache_dir: where compiled programs are kept for the next start; None keeps
            none, "auto" what JAX is configured for, else `.cache/qwen-hybrid/compiled` at home.
          capacities: fields of `EngineConfig`, or SGLang's names of them.

        Raises:
          FileNotFoundError: no such model. ValueError: a bad argument or checkpoint.
        """
        if load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format must be auto or dummy, got {load_format!r}")
        require_bool("skip_tokenizer_init", skip_tokenizer_init)
        require_bool("incremental_streaming_output", incremental_streaming_output)
        self._is_incremental = incremental_streaming_output
        self._interval = SamplingParams(stream_interval=stream_interval).stream_interval or 1
        self.engine_config = engine_config(engine_fields(capacities))
        use_compilation_cache(compilation_cache_dir)
        self.model_path = resolve_model_path(model_path)
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.from_directory(self.model_path)
        defaults = sampling_defaults_of(self.tokenizer, sampling_defaults)
        runner, scheduler = self._load(load_format)
        self.inputs = self._new_inputs(defaults, scheduler)
        config = self.engine_config
        adaptive = AdaptiveLength(config.window - 1) if config.speculative_adaptive else None
        self.core = EngineCore(scheduler, runner, adaptive)
        self._start()

    def _load(self, load_format: str) -> tuple[Runner, Scheduler]:
        """Read the model and share the memory out."""
        self.model_config, params, dtype = load_model(
            self.model_path,
            self.tokenizer,
            load_format=load_format,
            dtype=self.engine_config.dtype,
        )
        state_config = resolve(self.engine_config, self.model_config, dtype)
        self.context_length = longest_text(self.engine_config, self.model_config)
        self.numerics: Numerics = numerics(state_config)
        _log.info("numerics %s", self.numerics.describe())
        speculation = make_speculation(
            self.model_config, self.engine_config.speculation, dtype=dtype
        )
        runner = Runner(
            self.model_config, params, state_config, self.engine_config.row_buckets, speculation
        )
        return runner, Scheduler(_capacities(state_config, self.engine_config))

    def _new_inputs(self, defaults: Mapping[str, Any], scheduler: Scheduler) -> Inputs:
        eos = self.tokenizer.eos_token_ids if self.tokenizer else self.model_config.eos_token_ids
        return Inputs(
            tokenizer=self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=tuple(eos),
            context_length=self.context_length,
            sampling_defaults=defaults,
            require_room=scheduler.require_room,
        )

    def _start(self) -> None:
        """Start the step thread and compile in it; a start that fails leaves no thread behind."""
        self.loop = EngineLoop(self.core)
        # The thread holds the loop and the core, not the engine: dropping that ends the thread.
        self._close = weakref.finalize(self, self.loop.close)
        try:
            self.loop.call(self.core.runner.warm_up)
            speculation = self.core.runner.speculation
            is_checked = speculation.is_on and speculation.is_lossless
            if is_checked and not self.engine_config.disable_self_check:
                self.loop.call(lambda: self_check(self.core, self.inputs))
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End every request with an EngineDeadError, the step thread, and release the device
        memory; may be called twice."""
        self._close()

    def generate(
        self,
        prompt: Prompts = None,
        sampling_params: Params | Sequence[Params] = None,
        input_ids: Ids = None,
        **options: Unpack[BlockingOptions],
    ) -> Results | Iterator[Result]:
        """Complete one prompt or a list of them.

        Args:
          prompt: text or list of texts; or else
          input_ids: token ids of one prompt or of a list.
          sampling_params: one for all, or a list as long as the batch.
          return_logprob: log-probabilities of the output, of the raw float32 logits.
          logprob_start_len: those of the prompt's tokens after this position too; -1 for none,
            which is the default.
          top_logprobs_num: those of so many likeliest tokens at each position too, at most 20.
          token_ids_logprob: those of these ids at each position too, at most 128.
          return_state_digest: a digest of the committed state of each request at its end.
          stream: return an iterator of results so far; those of several requests have `index`.
          rid: request ids; drawn if not given. Sample i of n > 1 is named `rid-i`.
          on_error: `raise`, or `return` an {"error": ...} in the place of each prompt that fails.
          progress: show a progress bar, on a terminal.

        Returns:
          A result dict for one prompt; a list in input order for a list, or for n > 1, the samples
          of a prompt side by side.

        Raises:
          ValueError: bad input, before any device work; for a batch it names the index.
          StepError: a step failed. EngineDeadError: the engine did.
          RuntimeError: called inside a running event loop.
          TypeError: an option that there is not.
        """
        chosen = call_options(self.generate, options, BlockingOptions)
        batch = self._read((prompt, sampling_params, input_ids), chosen)
        return self._answer(batch, chosen, instead="async_generate")

    async def async_generate(
        self,
        prompt: Prompts = None,
        sampling_params: Params | Sequence[Params] = None,
        input_ids: Ids = None,
        **options: Unpack[RequestOptions],
    ) -> Results | AsyncIterator[Result]:
        """As `generate`, for coroutines: awaiting it gives results, or an asynchronous iterator.

        A cancelled call aborts its requests. There is no progress bar.
        """
        chosen = call_options(self.async_generate, options, RequestOptions)
        batch = self._read((prompt, sampling_params, input_ids), chosen)
        return await self._async_answer(batch, chosen)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params | Sequence[Params] = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Unpack[BlockingOptions],
    ) -> Results | Iterator[Result]:
        """Answer a conversation, or each of a list of conversations.

        Args:
          messages: dicts with role and content, oldest first.
          tools: JSON schemas of functions that the model may call.
          chat_template_kwargs: further names for the model's template, `enable_thinking` for one.
          options: the other arguments of `generate`.

        Raises:
          ValueError: also if the model has no template or it refuses the messages.
        """
        chosen = call_options(self.chat, options, BlockingOptions)
        prompt = self._conversations(messages, tools, chat_template_kwargs)
        batch = self._read((prompt, sampling_params, None), chosen)
        return self._answer(batch, chosen, instead="async_chat")

    async def async_chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params | Sequence[Params] = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Results | AsyncIterator[Result]:
        """As `chat`, for coroutines, in the way of `async_generate`."""
        chosen = call_options(self.async_chat, options, RequestOptions)
        prompt = self._conversations(messages, tools, chat_template_kwargs)
        return await self._async_answer(self._read((prompt, sampling_params, None), chosen), chosen)

    def score(self, input_ids: Ids, *, top_logprobs_num: int = 0) -> Results:
        """Log-probability of every token of a sequence given those before it, by prefill.

        Args:
          top_logprobs_num: those of so many likeliest tokens at each position too, at most 20.

        Returns:
          A result, or a list for a list; meta_info["input_token_logprobs"] holds
          (log-probability, id, text) triples, None for the first token.
        """
        batch = self._read_to_score(input_ids, top_logprobs_num)
        _refuse_event_loop("async_score")
        return self._run(batch, progress=False)

    async def async_score(self, input_ids: Ids, *, top_logprobs_num: int = 0) -> Results:
        """As `score`, for coroutines; a cancelled call aborts its requests."""
        return await self._async_run(self._read_to_score(input_ids, top_logprobs_num))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End a request, all samples of it, within one step; an unknown one is no error.

        Its caller gets what there is, with the finish reason `abort`.

        Raises:
          ValueError: neither a request nor all.
        """
        require_bool("abort_all", abort_all)
        if not isinstance(rid, str) or not (rid or abort_all):
            raise ValueError(f"give the rid of a request, or abort_all=True; got {rid!r}")
        self.loop.require_open()
        self.loop.abort(lambda request: abort_all or rid in (request.rid, request.call_rid))

    def get_server_info(self) -> dict[str, Any]:
        """Capacities, the numerics record and counters."""
        self.loop.require_open()
        with self.loop.between_steps():
            counters = self.core.counters()
        return {
            "engine_config": dataclasses.asdict(self.engine_config),
            "numerics": dataclasses.asdict(self.numerics),
            "context_length": self.context_length,
            **counters,
        }

    def get_model_info(self) -> dict[str, Any]:
        """What the model is."""
        config = self.model_config
        return {
            "model_path": str(self.model_path),
            "tokenizer_path": str(self.model_path) if self.tokenizer else None,
            "is_generation": True,
            "max_context_length": self.context_length,
            "vocab_size": config.vocab_size,
            "model_type": config.family,
            "num_layers": config.num_layers,
            "dtype": self.numerics.activation_dtype,
            "eos_token_ids": list(self.inputs.eos_token_ids),
            "has_chat_template": self.tokenizer is not None and self.tokenizer.chat is not None,
        }

    def flush_cache(self) -> bool:
        """Forget everything kept of finished requests.

        Returns:
          False, and nothing is done, while requests run or wait.
        """
        self.loop.require_open()
        with self.loop.between_steps():
            return self.core.is_idle

    def start_profile(self, directory: str | Path) -> None:
        """Record a trace of host and device until `stop_profile`.

        Raises:
          ValueError: no directory. RuntimeError: one is being recorded.
        """
        if not isinstance(directory, (str, Path)) or directory == "":
            raise ValueError(f"a profile needs the name of a directory, got {directory!r}")
        jax.profiler.start_trace(str(directory))

    def stop_profile(self) -> None:
        """Write the trace.

        Raises:
          RuntimeError: none is being recorded.
        """
        jax.profiler.stop_trace()

    def _conversations(self, messages: Any, tools: Any, variables: dict[str, Any] | None) -> Any:
        self.loop.require_open()
        return self.inputs.conversations(messages, tools, variables or {})

    def _read(self, arguments: tuple[Any, Any, Any], options: CallOptions) -> Batch:
        """The requests of a call; the arguments are prompt, parameters and ids."""
        self.loop.require_open()
        return self.inputs.read(
            *arguments, rid=options.rid, wanted=options.wanted, on_error=options.on_error
        )

    def _read_to_score(self, input_ids: Ids, top_logprobs_num: int) -> Batch:
        wanted = Wanted(return_logprob=True, logprob_start_len=0, top_logprobs_num=top_logprobs_num)
        params = SamplingParams(max_new_tokens=0)
        return self._read((None, params, input_ids), CallOptions(wanted=wanted))

    def _answer(
        self, batch: Batch, options: CallOptions, *, instead: str
    ) -> Results | Iterator[Result]:
        _refuse_event_loop(instead)
        if options.stream:
            return self._stream(batch)
        return self._run(batch, progress=options.progress)

    async def _async_answer(
        self, batch: Batch, options: CallOptions
    ) -> Results | AsyncIterator[Result]:
        return self._async_stream(batch) if options.stream else await self._async_run(batch)

    @contextlib.contextmanager
    def _submitted(self, call: Call) -> Iterator[None]:
        """Queue a call; on any way out nothing of it stays."""
        try:
            self.loop.submit(call)
            yield
        finally:
            self.loop.abandon(call)

    def _run(self, batch: Batch, *, progress: bool) -> Results:
        waiter = Waiter()
        call = Call(batch.requests, waiter.wake, each_token=False)
        total = len(call.requests)
        # `disable=None` is tqdm's word for: on a terminal only.
        disable = None if progress else True
        with tqdm.tqdm(total=total, unit="request", disable=disable) as bar, self._submitted(call):
            while call.num_unfinished:
                waiter.wait()
                bar.update(total - call.num_unfinished - bar.n)
        return self._results(batch)

    async def _async_run(self, batch: Batch) -> Results:
        waiter = AsyncWaiter()
        call = Call(batch.requests, waiter.wake, each_token=False)
        with self._submitted(call):
            while call.num_unfinished:
                await waiter.wait()
        return self._results(batch)

    def _stream(self, batch: Batch) -> Iterator[Result]:
        waiter, reader = Waiter(), self._reader(batch)
        call = Call(batch.requests, waiter.wake, each_token=True)
        yield from reader.refusals()
        with self._submitted(call):
            while not reader.is_done:
                waiter.wait()
                yield from self._parts(reader)

    async def _async_stream(self, batch: Batch) -> AsyncIterator[Result]:
        waiter, reader = AsyncWaiter(), self._reader(batch)
        call = Call(batch.requests, waiter.wake, each_token=True)
        for part in reader.refusals():
            yield part
        with self._submitted(call):
            while not reader.is_done:
                await waiter.wait()
                for part in self._parts(reader):
                    yield part

    def _reader(self, batch: Batch) -> PartReader:
        return PartReader(
            batch,
            self._outcome,
            is_incremental=self._is_incremental,
            interval=self._interval,
        )

    def _parts(self, reader: PartReader) -> list[Result]:
        with self.loop.between_steps():
            return reader.parts()

    def _results(self, batch: Batch) -> Results:
        results = [self._outcome(batch, at) for at in range(len(batch.entries))]
        return results if batch.is_list else results[0]

    def _outcome(self, batch: Batch, at: int) -> Result:
        """What the caller gets for an entry of a batch, so far.

        Raises:
          Exception: the entry failed, and the caller did not want that returned.
        """
        index, entry = batch.entries[at]
        error = entry.error if isinstance(entry, Request) else entry
        if isinstance(entry, Request) and error is None:
            return self._result(entry)
        assert error is not None
        if batch.on_error == "raise" or isinstance(error, EngineDeadError):
            raise error
        return {"error": {"message": str(error), "type": type(error).__name__, "index": index}}

    def _result(self, request: Request) -> Result:
        info = meta_info(request, self.tokenizer, self.engine_config.window)
        if request.state_digests is not None:
            info["state_digest"] = combined(request.state_digests)
        result: Result = {"output_ids": list(request.output_ids), "meta_info": info}
        if request.output_text is not None:
            result["text"] = request.output_text.shown
        return result


def _refuse_event_loop(instead: str) -> None:
    """Raise where waiting would stop an event loop, naming what to await instead."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"this call would block the running event loop: await {instead}")


def _capacities(state: StateConfig, config: EngineConfig) -> Capacities:
    return Capacities(
        num_slots=state.num_slots,
        num_blocks=state.num_blocks,
        num_state_slots=state.num_state_slots,
        block_size=state.block_size,
        log_rows=state.log_rows,
        max_rows=config.max_rows,
        prefill_rows=config.chunked_prefill_size,
        num_drafts=config.window - 1,
    )
