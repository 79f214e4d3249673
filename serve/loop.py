"""The step loop: one thread that owns the core, and what other threads ask of it.

Callers put messages into an inbox, which may be done anywhere, in a finalizer too; the thread acts
on them between steps. `lock` is held while the thread changes requests, so that who holds it sees
them between two steps; the device computes without it.
"""

import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from serve.core import EngineCore
from serve.errors import EngineDeadError
from serve.request import Request
from serve.scheduler import Work

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Call:
    """Requests of one caller, who is woken as they get on.

    Attributes:
      requests: the caller's.
      num_unfinished: how many have not ended yet.
      each_token: wake after every token, not only after the last.
    """

    def __init__(self, requests: list[Request], wake: Callable[[], None], *, each_token: bool):
        """Nothing is queued yet.

        Args:
          wake: called by the step thread: quick, thread-safe, and soon followed by a look at the
            requests. A RuntimeError says that nobody waits any more.
        """
        self.requests, self.wake, self.each_token = requests, wake, each_token
        self.num_unfinished = len(requests)


class EngineLoop:
    """Runs a core's steps in a thread while there is work. Thread-safe."""

    def __init__(self, core: EngineCore):
        """Start the thread."""
        self._core = core
        self._inbox: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._calls: dict[Request, Call] = {}
        self._rids: set[str] = set()
        # Reentrant, since a garbage collection may run `close` wherever it is held.
        self._lock = threading.RLock()
        self._is_open = True
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._thread.start()

    def require_open(self) -> None:
        """Raise EngineDeadError if no request can be served any more."""
        if not self._is_open:
            raise self._ended()

    def _ended(self) -> EngineDeadError:
        if self._cause is None:
            return EngineDeadError("the engine is shut down")
        error = EngineDeadError(f"the engine's step thread has died of {self._cause!r}")
        error.__cause__ = self._cause
        return error

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, between steps, and return or raise what it does.

        Whoever steps the core himself does it here, or the thread would step it too. What JAX
        compiles depends on settings of the thread, so that programs are made where they are used.

        Raises:
          EngineDeadError: the thread has ended, or does before it comes to the function.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def answer() -> bool:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            return True

        with self._lock:
            self.require_open()
            self._inbox.put(answer)
        while not concurrent.futures.wait([future], timeout=1).done:
            if not self._thread.is_alive():
                raise self._ended()
        return future.result()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold the requests still; to be left soon, since the next step waits."""
        with self._lock:
            yield

    def submit(self, call: Call) -> None:
        """Queue the requests of a call.

        Raises:
          ValueError: a request id is in use. EngineDeadError: the engine is.
        """
        with self._lock:
            self.require_open()
            used = next((r.rid for r in call.requests if r.rid in self._rids), None)
            if used is not None:
                raise ValueError(f"request id {used!r} is in use")
            for request in call.requests:
                request.arrived_s = time.monotonic()
                self._calls[request] = call
                self._rids.add(request.rid)
            self._inbox.put(lambda: self._add(call))

    def abandon(self, call: Call) -> None:
        """End what is left of a call before the next step, without waiting for that."""
        if call.num_unfinished:
            self._inbox.put(lambda: self._abort(call.requests, "abandoned"))

    def abort(self, wanted: Callable[[Request], bool]) -> None:
        """End the requests that `wanted` says before the next step, without waiting for that."""
        self._inbox.put(lambda: self._abort([r for r in self._active() if wanted(r)], "aborted"))

    def close(self) -> None:
        """End every request and the thread, which lets go of the core; may be called twice."""
        with self._lock:
            self._is_open = False
        self._inbox.put(lambda: False)
        # So may the thread itself, by that way.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        cause = None
        try:
            while self._take_messages():
                if not self._core.is_idle:
                    self._step()
        except BaseException as error:
            cause = error
            _log.exception("the step thread dies")
        self._end(cause)
        self._core.close()

    def _take_messages(self) -> bool:
        """Act on what callers sent, waiting if nothing runs; False to stop."""
        waits = self._core.is_idle
        while True:
            try:
                message = self._inbox.get(block=waits)
            except queue.Empty:
                return True
            if not message():
                return False
            waits = False

    def _active(self) -> list[Request]:
        with self._lock:
            return list(self._calls)

    def _add(self, call: Call) -> bool:
        with self._lock:
            for request in call.requests:
                # It may have been aborted on its way here.
                if not request.is_finished:
                    self._core.add(request)
        return True

    def _abort(self, requests: list[Request], message: str) -> bool:
        left = [request for request in requests if not request.is_finished]
        with self._lock:
            for request in left:
                self._core.abort(request, message)
        self._wake(left)
        return True

    def _step(self) -> None:
        with self._lock:
            work = self._core.plan()
        try:
            results = self._core.run(work)
        except Exception as error:
            self._fail(work, error)
            return
        with self._lock:
            touched = self._core.advance(work, results)
        self._wake(touched)

    def _fail(self, work: list[Work], error: Exception) -> None:
        """Give up the requests of a step that failed; the others go on if the state is whole."""
        if not self._core.runner.is_whole():
            raise error
        _log.error("a step failed", exc_info=error)
        requests = [item.request for item in work]
        with self._lock:
            for request in requests:
                self._core.fail(request, error)
        self._wake(requests)

    def _wake(self, requests: list[Request]) -> None:
        """Tell the callers of requests that got on."""
        woken = set()
        for request in requests:
            call = self._calls.get(request)
            if call is None:
                continue
            if request.is_finished:
                with self._lock:
                    del self._calls[request]
                    self._rids.discard(request.rid)
                call.num_unfinished -= 1
            if call.each_token or request.is_finished:
                woken.add(call)
        for call in woken:
            try:
                call.wake()
            except RuntimeError:
                # Its event loop is closed: nobody will ever look.
                self.abandon(call)

    def _end(self, cause: BaseException | None) -> None:
        """Fail everything that is left, that of the inbox included."""
        with self._lock:
            self._is_open, self._cause = False, cause
            left = [request for request in self._calls if not request.is_finished]
        for request in left:
            request.error = self._ended()
            request.finish({"type": "abort", "message": str(request.error), "status_code": None})
            # What a dead thread left in the pools is in no known state.
            if cause is None:
                self._core.scheduler.release(request)
        self._wake(left)
