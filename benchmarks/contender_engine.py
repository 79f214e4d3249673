"""This engine as a contender."""

import dataclasses
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.contenders import CONTEXT, MAX_BATCH, NUM_STEPS, PROMPT_LEN, prompts_of
from pallas_kernels import rows as rows_module
from serve.engine import Engine


class OurEngine:
    """This engine, as a user calls it."""

    def __init__(self, directory: Path, dtype: str):
        self._engine = Engine(
            directory, dtype=dtype, max_running_requests=MAX_BATCH, context_length=CONTEXT
        )

    def _seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        params: Any = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        start = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - start

    def prefill(self, num_tokens: int) -> float:
        """Seconds from a prompt to its first new token."""
        return self._seconds(prompts_of(1, num_tokens), 1)

    def decode(self, batch: int) -> float:
        """A run of many tokens less one of a single token, a step."""
        prompts = prompts_of(batch, PROMPT_LEN)
        first = self._seconds(prompts, 1)
        return (self._seconds(prompts, NUM_STEPS + 1) - first) / NUM_STEPS


class OurEngineWholeProducts(OurEngine):
    """This engine with every product over all rows of a program at once, as XLA would have it.

    It breaks the law and computes the padding: what it shows is the price of fixed tiles.
    """

    def __init__(self, directory: Path, dtype: str):
        shape_of = rows_module.shape_of
        whole = lambda n: dataclasses.replace(shape_of(n), rows=n)  # noqa: E731
        with mock.patch.object(rows_module, "shape_of", whole):
            super().__init__(directory, dtype)
