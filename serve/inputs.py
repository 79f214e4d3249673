"""Arguments of the Python API made into requests: every check that needs no device."""

import dataclasses
import hashlib
import numbers
import secrets
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qwen_hybrid.step import MAX_TOP_LOGPROBS
from serve.output_text import OutputText
from serve.request import Request
from serve.sampling_params import (
    MAX_TOKEN_IDS_LOGPROB,
    SamplingParams,
    require_supported,
    require_vocabulary,
    with_model_defaults,
)
from serve.tokenizer import Tokenizer

ON_ERROR = ("raise", "return")
SAMPLING_DEFAULTS = ("model", "openai")
# What the template is given by other arguments.
TEMPLATE_NAMES = frozenset({"messages", "tools"})


def require_bool(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def sampling_defaults_of(tokenizer: Tokenizer | None, chosen: str) -> Mapping[str, Any]:
    """What counts where a request says nothing, beside the defaults of `SamplingParams`.

    Args:
      tokenizer: of the model, read with its `generation_config.json`; None: neither was.
      chosen: `model` takes that file's values, `openai` takes none.

    Raises:
      ValueError: neither, or a value of the file is out of its range.
    """
    if chosen not in SAMPLING_DEFAULTS:
        raise ValueError(f"sampling_defaults must be model or openai, got {chosen!r}")
    found = tokenizer.generation_defaults if tokenizer and chosen == "model" else {}
    # Here, so that a bad file ends the start and not every request.
    with_model_defaults(None, found)
    return found


def fold(seed: int, index: int) -> int:
    """Seed of sample `index` of a prompt, a signed 64-bit integer.

    `fold(seed, 0) = seed`; else the first 8 bytes, little-endian, of the SHA-256 of the decimal
    numbers "seed index". Passed as `sampling_seed` it gives that sample alone.
    """
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What results are to hold beside text and ids; the same for all prompts of a call.

    Attributes:
      return_logprob: log-probabilities of the output.
      logprob_start_len: those of the prompt's tokens after this position too; -1 for none.
      top_logprobs_num: those of so many likeliest tokens too.
      token_ids_logprob: those of these ids too; None for none.
      return_state_digest: a digest of the committed state at the end.
    """

    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Sequence[int] | None = None
    return_state_digest: bool = False

    def __post_init__(self) -> None:
        for name in ("return_logprob", "return_state_digest"):
            require_bool(name, getattr(self, name))
        if self.token_ids_logprob is not None:
            ids = _listed("token_ids_logprob", self.token_ids_logprob, "a list of token ids")
            object.__setattr__(self, "token_ids_logprob", tuple(ids))
        start, top, ids = self.logprob_start_len, self.top_logprobs_num, self.token_ids
        if not _is_int(start) or start < -1:
            raise ValueError(f"logprob_start_len must be an integer of at least -1, got {start!r}")
        if not _is_int(top) or not 0 <= top <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {top!r}")
        if len(ids) > MAX_TOKEN_IDS_LOGPROB:
            raise ValueError(
                f"token_ids_logprob must have at most {MAX_TOKEN_IDS_LOGPROB} ids, got {len(ids)}"
            )
        if not self.return_logprob and (start >= 0 or top or ids):
            name = (start >= 0 and "logprob_start_len") or (top and "top_logprobs_num")
            raise ValueError(f"{name or 'token_ids_logprob'} needs return_logprob=True")

    @property
    def token_ids(self) -> list[Any]:
        """`token_ids_logprob` as a list."""
        return list(self.token_ids_logprob or ())


@dataclasses.dataclass(frozen=True)
class Batch:
    """The requests of one call.

    Attributes:
      entries: (index of the prompt, request or what is wrong with the prompt); the samples of a
        prompt side by side.
      is_list: a list is returned: a list was given, or several samples were asked for.
      on_error: what becomes of what fails: `raise` or `return`.
    """

    entries: list[tuple[int, Request | Exception]]
    is_list: bool
    on_error: str

    @property
    def requests(self) -> list[Request]:
        """The requests alone."""
        return [entry for _, entry in self.entries if isinstance(entry, Request)]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat in the place of a prompt.

    Attributes:
      messages: oldest first.
      tools: JSON schemas of functions, or None.
      variables: further names for the template.
    """

    messages: Any
    tools: Any
    variables: dict[str, Any]

    def render(self, tokenizer: Tokenizer) -> str:
        """The prompt's text.

        Raises:
          ValueError: the model has no template, or it refuses the messages.
        """
        messages = _listed("messages", self.messages, "a list of messages")
        return tokenizer.apply_chat_template(messages, tools=self.tools, **self.variables)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Reads and checks arguments. Read-only, so threads may share it.

    Attributes:
      tokenizer: of the model, or None: ids only.
      vocab_size: ids that the model has.
      eos_token_ids: ids that end a text; empty if unknown.
      context_length: tokens of the longest prompt plus completion.
      sampling_defaults: the model's `generation_config.json`, or empty: what counts where a request
        says nothing.
      require_room: raises a ValueError for a request that can never fit.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context_length: int
    sampling_defaults: Mapping[str, Any]
    require_room: Callable[[Request], None]

    def read(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        rid: Any = None,
        wanted: Wanted | None = None,
        on_error: str = "raise",
    ) -> Batch:
        """Make the requests of a call; nothing is queued yet.

        Raises:
          ValueError: bad input; for a batch it names the index. With `on_error="return"` only
            what concerns the whole call.
        """
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error must be raise or return, got {on_error!r}")
        wanted = wanted or Wanted()
        prompts, is_list = self._prompts(prompt, input_ids)
        encode = self._encode if input_ids is None else _as_ids
        params = _broadcast("sampling_params", sampling_params, len(prompts), is_list)
        rids = _broadcast("rid", rid, len(prompts), is_list)
        entries: list[tuple[int, Request | Exception]] = []
        for index, (item, one, name) in enumerate(zip(prompts, params, rids, strict=True)):
            try:
                full = with_model_defaults(one, self.sampling_defaults)
                samples = self._samples(encode(item), full, name, wanted)
                entries += [(index, request) for request in samples]
            except (TypeError, ValueError) as error:
                if on_error == "raise":
                    where = f"request {index}: " if is_list else ""
                    raise ValueError(f"{where}{error}") from error
                entries.append((index, error))
        batch = Batch(entries, is_list or len(entries) > 1, on_error)
        names = [request.rid for request in batch.requests]
        if len(set(names)) < len(names):
            raise ValueError("request ids must differ within a batch")
        return batch

    def conversations(self, messages: Any, tools: Any, variables: Any) -> Any:
        """A conversation, or a list of them, to be read as a prompt; not looked into yet.

        Raises:
          ValueError: no tokenizer, or no list.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer; skip_tokenizer_init is set")
        if not isinstance(variables, dict) or not TEMPLATE_NAMES.isdisjoint(variables):
            raise ValueError(
                f"chat_template_kwargs must be a dict without {', '.join(sorted(TEMPLATE_NAMES))}, "
                f"got {variables!r}"
            )
        items = _listed("messages", messages, "a list of messages or of such lists")
        if items and isinstance(items[0], (list, tuple)):
            return [Conversation(one, tools, variables) for one in items]
        return Conversation(items, tools, variables)

    def _prompts(self, prompt: Any, input_ids: Any) -> tuple[list[Any], bool]:
        """The prompts, not looked into yet, and whether a list was given."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give exactly one of prompt and input_ids")
        if prompt is not None:
            if self.tokenizer is None:
                raise ValueError("skip_tokenizer_init is set: give input_ids")
            if isinstance(prompt, (str, Conversation)):
                return [prompt], False
            return _listed("prompt", prompt, "a string or a list of strings"), True
        items = _listed("input_ids", input_ids, "a list of integers or of such lists")
        is_list = len(items) > 0 and not _is_int(items[0])
        return items if is_list else [items], is_list

    def _encode(self, text: Any) -> list[int]:
        assert self.tokenizer is not None
        if isinstance(text, Conversation):
            text = text.render(self.tokenizer)
        if not isinstance(text, str):
            raise ValueError(f"prompt must be a string, got {text!r}")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError("prompt must be Unicode text, got bytes that are not UTF-8")
        return self.tokenizer.encode(text)

    def _samples(
        self, ids: list[int], params: SamplingParams, rid: Any, wanted: Wanted
    ) -> list[Request]:
        """The `n` requests of a prompt."""
        if rid is not None and not (isinstance(rid, str) and rid):
            raise ValueError(f"rid must be a string that is not empty, got {rid!r}")
        self._check_prompt(ids)
        self._check_params(params)
        # Before the length is looked at: that is what it is for.
        ids = ids[-params.truncate_prompt_tokens :] if params.truncate_prompt_tokens else ids
        self._check_logprobs(wanted, len(ids))
        self._check_length(len(ids), params.max_new_tokens)
        name = rid or uuid.uuid4().hex
        given = params.sampling_seed
        seed = secrets.randbits(63) if given is None else given
        prompt_ids = [int(i) for i in ids]
        requests = [
            Request(
                rid=name if params.n == 1 else f"{name}-{index}",
                call_rid=name,
                prompt_ids=prompt_ids,
                params=params,
                seed=fold(seed, index),
                sample_index=index,
                eos_ids=frozenset(self.eos_token_ids),
                output_text=OutputText(self.tokenizer, params) if self.tokenizer else None,
                return_logprob=wanted.return_logprob,
                logprob_start_len=wanted.logprob_start_len,
                top_logprobs_num=wanted.top_logprobs_num,
                token_ids_logprob=tuple(int(i) for i in wanted.token_ids),
                return_state_digest=wanted.return_state_digest,
            )
            for index in range(params.n)
        ]
        self.require_room(requests[0])
        return requests

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise ValueError("a prompt needs at least one token")
        self._check_ids("input_ids", ids)

    def _check_ids(self, name: str, ids: list[int]) -> None:
        size = self.vocab_size
        wrong = next((i for i in ids if not _is_int(i) or not 0 <= i < size), None)
        if wrong is not None:
            raise ValueError(f"{name} must be integers in [0, {size - 1}], got {wrong!r}")

    def _check_logprobs(self, wanted: Wanted, prompt_len: int) -> None:
        self._check_ids("token_ids_logprob", wanted.token_ids)
        if wanted.logprob_start_len >= prompt_len:
            raise ValueError(
                f"logprob_start_len must be below the prompt's length ({prompt_len} tokens), "
                f"got {wanted.logprob_start_len}"
            )

    def _check_params(self, params: SamplingParams) -> None:
        require_supported(params)
        require_vocabulary(params, self.vocab_size)
        if self.tokenizer is not None:
            return
        for name in ("stop", "stop_regex"):
            if getattr(params, name) is not None:
                raise ValueError(f"{name} needs a tokenizer; skip_tokenizer_init is set")
        if params.min_new_tokens > 0 and not self.eos_token_ids:
            raise ValueError(
                "min_new_tokens needs the ids that end a text; skip_tokenizer_init is set and the "
                "model's config names none"
            )

    def _check_length(self, prompt_len: int, new: int) -> None:
        longest = self.context_length
        if prompt_len > longest:
            raise ValueError(
                f"The input ({prompt_len} tokens) is longer than the model's context length "
                f"({longest} tokens). context_length sets it."
            )
        if prompt_len + new > longest:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {longest} "
                f"tokens. You requested a total of {prompt_len + new} tokens: {prompt_len} tokens "
                f"from the input messages and {new} tokens for the completion. Lower "
                "max_new_tokens or raise context_length."
            )


def _listed(name: str, value: Any, expected: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, dict)):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return list(value)


def _as_ids(ids: Any) -> list[Any]:
    return _listed("input_ids", ids, "a list of integers")


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _broadcast(name: str, value: Any, count: int, is_list: bool) -> list[Any]:
    """One value for each prompt: a list must match the batch."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if not is_list or len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
    return list(value)
