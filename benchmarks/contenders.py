"""Programs that generate from the same checkpoint, each in a process of its own.

A contender answers ("prefill", tokens) and ("decode", batch) with seconds, and ("quit",) with
nothing. The first request of each kind warms it up: compilation and allocation are not timed.
"""

import importlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import numpy as np

PROMPT_LEN = 64
NUM_STEPS = 64
MAX_BATCH = 16
CONTEXT = 2304
# Below the special ids of both demos.
NUM_IDS = 4000


def prompts_of(batch: int, length: int) -> list[list[int]]:
    """Random prompts, always the same."""
    return np.random.default_rng(0).integers(0, NUM_IDS, (batch, length)).tolist()


class Contender(Protocol):
    """One program with a loaded model."""

    def prefill(self, num_tokens: int) -> float:
        """Seconds from a prompt to its first new token."""
        ...

    def decode(self, batch: int) -> float:
        """Seconds of one step that gives every sequence of a batch a token, greedily."""
        ...


# Modules are imported by the contender's own process alone.
CONTENDERS = {
    "engine": "benchmarks.contender_engine:OurEngine",
    "transformers": "benchmarks.contender_transformers:Transformers",
    "engine, whole products": "benchmarks.contender_engine:OurEngineWholeProducts",
}


def _serve(connection: Connection, name: str, directory: Path, dtype: str) -> None:
    start = time.perf_counter()
    module, kind = CONTENDERS[name].split(":")
    contender: Contender = getattr(importlib.import_module(module), kind)(directory, dtype)
    connection.send(time.perf_counter() - start)
    while True:
        what, *arguments = connection.recv()
        if what == "quit":
            return
        connection.send(getattr(contender, what)(*arguments))


class Process:
    """A contender in its own process; the parent asks one of them at a time."""

    def __init__(self, name: str, directory: Path, dtype: str):
        """Start it and wait until its model is loaded.

        Attributes:
          start_s: seconds that took, compilation included.
        """
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        arguments = (there, name, directory, dtype)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        there.close()
        self.start_s: float = self._connection.recv()

    def ask(self, what: str, argument: int) -> float:
        """Seconds of one measurement.

        Raises:
          EOFError: the contender died; its own error is on the terminal.
        """
        self._connection.send((what, argument))
        return self._connection.recv()

    def quit(self) -> None:
        """End the process."""
        self._connection.send(("quit",))
        self._process.join()
