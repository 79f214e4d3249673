"""Prompts from the command line, a file or standard input, and their results in the same order."""

import asyncio
import collections
import dataclasses
import difflib
import json
import pathlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from serve.cli.errors import UsageError
from serve.cli.flags import Flag

STANDARD_STREAM = "-"
CONTENTS = ("prompt", "messages", "input_ids")
OPTIONS = (
    "id",
    "sampling_params",
    "tools",
    "chat_template_kwargs",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
)

# What the engine would take, but not as one prompt.
KINDS: Sequence[tuple[str, type, str]] = (
    ("prompt", str, "a string"),
    ("messages", list, "a list of messages"),
    ("input_ids", list, "a list of integers"),
    ("sampling_params", dict, "a JSON object"),
    ("chat_template_kwargs", dict, "a JSON object"),
)

PROMPT_FLAG = Flag(
    name="prompt", metavar="TEXT", is_list=True, help="a text; may be given several times"
)
INPUT_FLAG = Flag(
    name="input",
    metavar="FILE",
    help="a JSON object a line, each with prompt, messages or input_ids; - is standard input",
)

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of input.

    Attributes:
      id: names its result; the position if the line has none.
      index: position in the input, from 0.
      fields: what the line says, empty if it says nothing usable.
      error: why it cannot be run, or None.
    """

    id: str | int
    index: int
    fields: Mapping[str, Any]
    error: str | None = None


def read_jobs(prompts: Sequence[str] | None, path: str | None) -> list[Job]:
    """Return what is to be done, in order; a line that cannot be used becomes a job with an error.

    Args:
      prompts: texts from the command line, or None.
      path: a file of JSON lines, `-` or None; both are standard input if there are no prompts.

    Raises:
      UsageError: both or neither are given.
      OSError: the file cannot be read.
      ValueError: it is not UTF-8, or two lines have one id.
    """
    if prompts and path:
        raise UsageError("give --prompt or --input, not both")
    if prompts:
        return [Job(i, i, {"prompt": prompt}) for i, prompt in enumerate(prompts)]
    if path is None and sys.stdin.isatty():
        raise UsageError("give --prompt, --input or JSON lines on standard input")
    jobs = [_job(line, index) for index, line in enumerate(_lines(path or STANDARD_STREAM))]
    _require_different_ids(jobs)
    return jobs


def _lines(path: str) -> list[str]:
    """Return the lines of a file that are not blank."""
    where = "standard input" if path == STANDARD_STREAM else path
    data = sys.stdin.buffer.read() if path == STANDARD_STREAM else pathlib.Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}") from error
    # Not splitlines: JSON texts may hold the other separators that it knows.
    return [line for line in text.split("\n") if line.strip()]


def _job(line: str, index: int) -> Job:
    """Return the job that a line describes."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Job(index, index, {}, f"not JSON: {error}")
    if not isinstance(fields, dict):
        return Job(index, index, {}, f"a line must be a JSON object, got {type(fields).__name__}")
    name = fields.get("id", index)
    if not _is_id(name):
        return Job(index, index, {}, f"id must be a string or an integer, got {name!r}")
    return Job(name, index, fields, _problem(fields))


def _is_id(name: Any) -> bool:
    """Whether `name` can name a result: text that is Unicode, or an integer."""
    if isinstance(name, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in name)
    return isinstance(name, int) and not isinstance(name, bool)


def _problem(fields: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a line, beside what the engine finds."""
    known = (*CONTENTS, *OPTIONS)
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        guess = difflib.get_close_matches(unknown, known, n=1)
        return f"unknown key {unknown!r}" + (f"; did you mean {guess[0]!r}?" if guess else "")
    given = [name for name in CONTENTS if fields.get(name) is not None]
    if len(given) != 1:
        return f"give exactly one of {', '.join(CONTENTS)}; got {', '.join(given) or 'none'}"
    for name, kind, expected in KINDS:
        if fields.get(name) is not None and not isinstance(fields[name], kind):
            return f"{name} must be {expected}, got {fields[name]!r}"
    if any(isinstance(item, list) for item in fields.get("input_ids") or []):
        return "input_ids must be a list of integers, got a list of lists"
    return None


def _require_different_ids(jobs: list[Job]) -> None:
    """Raise if two jobs would write results of one name."""
    seen: dict[str | int, int] = {}
    for job in jobs:
        first = seen.setdefault(job.id, job.index)
        if first != job.index:
            raise ValueError(f"lines {first + 1} and {job.index + 1} have the same id {job.id!r}")


async def in_order(
    jobs: Iterable[Job], answer: Callable[[Job], Awaitable[Result]], *, window: int
) -> AsyncIterator[tuple[Job, Result]]:
    """Yield every job with its answer, in the order of the jobs, however the answers come.

    Args:
      answer: computes one; it must not raise for what is wrong with its job.
      window: jobs that are under way, or done and behind one that is not.
    """
    under_way: collections.deque[tuple[Job, asyncio.Future]] = collections.deque()
    try:
        for job in jobs:
            under_way.append((job, asyncio.ensure_future(answer(job))))
            if len(under_way) == window:
                first, future = under_way[0]
                yield first, await future
                under_way.popleft()
        while under_way:
            first, future = under_way[0]
            yield first, await future
            under_way.popleft()
    finally:
        for _, future in under_way:
            future.cancel()
        await asyncio.gather(*(future for _, future in under_way), return_exceptions=True)


def failure(job: Job, error: Exception | str) -> Result:
    """The result of a job that could not be done."""
    kind = type(error).__name__ if isinstance(error, Exception) else "ValueError"
    return {"id": job.id, "error": {"message": str(error), "type": kind, "index": job.index}}


def is_failure(result: Mapping[str, Any]) -> bool:
    """Whether a result, or one of its samples, is that of a job that failed or was cut off."""
    parts = result.get("samples", [result])
    return "error" in result or any(_is_aborted(part) for part in parts)


def _is_aborted(part: Mapping[str, Any]) -> bool:
    reason = part.get("meta_info", {}).get("finish_reason") or {}
    return reason.get("type") == "abort"
