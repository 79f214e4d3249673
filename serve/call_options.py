"""What the calls of the engine take by name, declared once for all of them."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from serve.inputs import Wanted, require_bool
from serve.sampling_params import ALIASES, SamplingParams


class RequestOptions(TypedDict, total=False):
    """Names and types; `Engine.generate` says what each means and what counts without it."""

    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Sequence[int] | None
    return_state_digest: bool
    stream: bool
    rid: str | Sequence[str] | None
    on_error: str


class BlockingOptions(RequestOptions, total=False):
    """The same of a call that waits for its results."""

    progress: bool


_OF_WANTED = frozenset(field.name for field in dataclasses.fields(Wanted))
_OF_SAMPLING = frozenset(
    {field.name for field in dataclasses.fields(SamplingParams)} | set(ALIASES)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Options of one call, with those that were not given.

    Attributes:
      wanted: what results are to hold beside text and ids.
      stream: parts are wanted, not the whole.
      rid: request ids, or None.
      on_error: what becomes of what fails; not looked into yet.
      progress: a bar is wanted.
    """

    wanted: Wanted = Wanted()
    stream: bool = False
    rid: Any = None
    on_error: str = "raise"
    progress: bool = False

    def __post_init__(self) -> None:
        for name in ("stream", "progress"):
            require_bool(name, getattr(self, name))


def call_options(
    method: Callable[..., Any], given: Mapping[str, Any], known: type[RequestOptions]
) -> CallOptions:
    """The options of a call.

    Args:
      method: what is called, for the message.
      known: what it takes by name beside the parameters of its own.

    Raises:
      TypeError: a name that it does not take, with the best guess.
      ValueError: a bad value.
    """
    unknown = next((name for name in given if name not in known.__optional_keys__), None)
    if unknown is not None:
        raise TypeError(
            f"{method.__name__}() got an unexpected keyword argument {unknown!r}"
            f"{_hint(unknown, method, known)}"
        )
    wanted = {name: value for name, value in given.items() if name in _OF_WANTED}
    others = {name: value for name, value in given.items() if name not in _OF_WANTED}
    return CallOptions(wanted=Wanted(**wanted), **others)


def _hint(unknown: str, method: Callable[..., Any], known: type[RequestOptions]) -> str:
    if unknown in _OF_SAMPLING:
        return "; it is a sampling parameter, and goes into sampling_params"
    own = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    guesses = difflib.get_close_matches(unknown, [*own, *sorted(known.__optional_keys__)], n=1)
    return f"; did you mean {guesses[0]!r}?" if guesses else ""
