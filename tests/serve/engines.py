"""The engine that the tests of `serve` share, and what they ask of it."""

import threading
import time
from typing import Any

from serve import Engine

SLOTS = 3
CONTEXT = 200
TEXTS = ["def quicksort(xs):\n", "naïve façade", "日本語のテキスト"]


def greedy(count: int, **more) -> dict:
    """Parameters of a run whose length is known."""
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **more}


def sampled(count: int, **more) -> dict:
    """Parameters of a drawn run whose length is known."""
    return {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True, **more}


def start(directory, **arguments) -> Any:
    """An engine whose every step is one program of 16 rows; the second start finds it compiled."""
    return Engine(
        directory,
        compilation_cache_dir=directory / "compiled",
        load_format="dummy",
        dtype="float32",
        max_running_requests=SLOTS,
        chunked_prefill_size=13,
        context_length=CONTEXT,
        **arguments,
    )


def settle(engine: Engine) -> None:
    """Wait for what was given up to be gone, which takes a step; nothing may stay behind."""
    deadline_s = time.monotonic() + 10
    while not engine.core.is_idle:
        assert time.monotonic() < deadline_s, "a request stayed behind"
        time.sleep(0.001)
    with engine.loop.between_steps():
        engine.core.scheduler.check_integrity()


class Gate:
    """Lets the steps of an engine through one by one, or all."""

    def __init__(self, engine, monkeypatch):
        self._run = engine.core.runner.run
        self._steps = threading.Semaphore(0)
        self._is_open = threading.Event()
        # The work of every step that has begun.
        self.seen: list = []
        monkeypatch.setattr(engine.core.runner, "run", self._wait_and_run)

    def _wait_and_run(self, work):
        self.seen.append([item.request.rid for item in work])
        if not self._is_open.is_set():
            assert self._steps.acquire(timeout=20), "the gate was left shut"
        return self._run(work)

    def wait_for_step(self, number: int) -> None:
        """Wait until the step of that number, counted from 1, is at the gate."""
        deadline_s = time.monotonic() + 20
        while len(self.seen) < number:
            assert time.monotonic() < deadline_s, "no step"
            time.sleep(0.001)

    def let(self, count: int) -> None:
        """Let some steps through."""
        self._steps.release(count)

    def open(self) -> None:
        """Let everything through from now on."""
        self._is_open.set()
        self._steps.release(100)
