"""How callers wait for their requests, and the parts of a stream."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from serve.inputs import Batch
from serve.request import Request

Result = dict[str, Any]


class Waiter:
    """Lets a thread sleep until the step thread has something for it."""

    def __init__(self):
        self._event = threading.Event()

    def wake(self) -> None:
        """Let the next or the current `wait` return; called by the step thread."""
        self._event.set()

    def wait(self) -> None:
        """Sleep until `wake`, unless that was called since the last `wait`."""
        self._event.wait()
        self._event.clear()


class AsyncWaiter:
    """The same for a coroutine; at most one wake-up is on its way."""

    def __init__(self):
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_pending = False

    def wake(self) -> None:
        """As `Waiter.wake`.

        Raises:
          RuntimeError: the event loop is closed.
        """
        if not self._is_pending:
            self._is_pending = True
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """As `Waiter.wait`."""
        await self._event.wait()
        self._event.clear()
        self._is_pending = False


@dataclasses.dataclass
class _Shown:
    """What a stream has shown of a request.

    Attributes:
      num_ids: output ids.
      num_chars: of the text.
      is_last: nothing more will come.
    """

    num_ids: int = 0
    num_chars: int = 0
    is_last: bool = False


class PartReader:
    """Makes the parts of a stream out of the progress of its requests.

    A part holds what came since the one before, however many steps that took; it is cumulative
    unless told otherwise. The parts of several requests name theirs by `index`.
    """

    def __init__(
        self,
        batch: Batch,
        outcome: Callable[[Batch, int], Result],
        *,
        is_incremental: bool,
        interval: int,
    ):
        """Start with nothing shown.

        Args:
          outcome: the result so far of an entry of the batch.
          is_incremental: a part holds only what is new.
          interval: tokens of a part at least, where a request's parameters say nothing.
        """
        self._batch, self._outcome = batch, outcome
        self._is_incremental, self._interval = is_incremental, interval
        self._shown = {request: _Shown() for request in batch.requests}

    @property
    def is_done(self) -> bool:
        """Every request has shown its last part."""
        return all(shown.is_last for shown in self._shown.values())

    def refusals(self) -> Iterator[Result]:
        """Parts for the prompts that make no request."""
        for at, (_, entry) in enumerate(self._batch.entries):
            if not isinstance(entry, Request):
                yield self._outcome(self._batch, at)

    def parts(self) -> list[Result]:
        """What is new; to be called between steps."""
        return [
            self._part(entry, at)
            for at, (_, entry) in enumerate(self._batch.entries)
            if isinstance(entry, Request) and self._is_due(entry)
        ]

    def _is_due(self, request: Request) -> bool:
        shown = self._shown[request]
        interval = request.params.stream_interval or self._interval
        is_long = len(request.output_ids) - shown.num_ids >= interval
        return not shown.is_last and (is_long or request.is_finished)

    def _part(self, request: Request, at: int) -> Result:
        shown = self._shown[request]
        before = dataclasses.replace(shown)
        part = self._outcome(self._batch, at)
        shown.num_ids, shown.is_last = len(request.output_ids), request.is_finished
        shown.num_chars = len(part.get("text", ""))
        if self._is_incremental and request.error is None:
            part = _cut(part, before)
        return part | {"index": at} if self._batch.is_list else part


def _cut(part: Result, shown: _Shown) -> Result:
    """The part without what was shown before."""
    info = {
        key: value[shown.num_ids :] if key.startswith("output_") else value
        for key, value in part["meta_info"].items()
    }
    new = part | {"output_ids": part["output_ids"][shown.num_ids :], "meta_info": info}
    return new | ({"text": part["text"][shown.num_chars :]} if "text" in part else {})
