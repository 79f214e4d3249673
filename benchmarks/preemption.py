"""Memory under preemption: thousands of requests through pools that are too small for them.

    python -m benchmarks.preemption [--requests 2000]

A model of two layers with random weights, eight slots, twelve blocks. At every step: no pool owns
more than it has, and the arrays of the decode state fit the byte budget. Over the run: at least one
preemption in ten requests, no growth of host memory, no array that stays behind. At the end some
requests that were preempted run again alone, and must give the same tokens. Prints a table and
writes benchmarks/results/preemption.csv; the exit code is 1 if one of these does not hold.
"""

import argparse
import concurrent.futures
import dataclasses
import gc
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.record import RESULTS, provenance, write_csv
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.state import inventory, state_spec
from serve.engine import Engine
from serve.engine_config import EngineConfig, resolve
from tests import tiny_models

SLOTS = 8
CONTEXT = 320
NUM_BLOCKS = 12
CALLERS = 24
NUM_ROWS = 20
NUM_CHECKED = 40
# What one fifth of the run and its end may differ by: a leak of 8 KiB a request would show.
MAX_GROWTH_MIB = 12
CAPACITIES: dict[str, Any] = {
    "max_running_requests": SLOTS,
    "chunked_prefill_size": 120,
    "context_length": CONTEXT,
    "dtype": "float32",
}


def budget(config: HybridConfig) -> int:
    """Bytes that hold `NUM_BLOCKS` blocks beside what every slot needs."""
    engine_config = EngineConfig(**CAPACITIES)
    spec = resolve(engine_config, config, "float32")
    block = sum(e.num_bytes for e in inventory(state_spec(config, spec)) if e.per == "block")
    block //= spec.num_blocks
    low, high = 1, 1 << 40
    # The smallest budget that gives so many: what else is in it is the engine's to say.
    while low < high:
        middle = (low + high) // 2
        try:
            given = resolve(
                dataclasses.replace(engine_config, memory_bytes=middle), config, "float32"
            ).num_blocks
        except ValueError:
            given = 0
        low, high = (middle + 1, high) if given < NUM_BLOCKS else (low, middle)
    return low + block // 2


def resident_mib() -> float:
    """Memory of this process that is in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this system does not say how much memory a process uses")


class Watch:
    """Looks at the pools in every step, and keeps the extremes.

    Attributes:
      num_steps: steps so far.
      max_blocks, max_states: most that were ever owned.
      state_bytes: most bytes that the decode state's arrays ever had.
      problems: what did not hold.
    """

    def __init__(self, engine: Engine):
        self.num_steps = self.max_blocks = self.max_states = self.state_bytes = 0
        self.problems: list[str] = []
        self._core, self._budget = engine.core, engine.engine_config.memory_bytes or 0
        self._run = engine.core.runner.run
        engine.core.runner.run = self._watched  # type: ignore[method-assign]

    def _watched(self, work: Any) -> Any:
        results = self._run(work)
        scheduler, runner = self._core.scheduler, self._core.runner
        self.num_steps += 1
        self.max_blocks = max(self.max_blocks, scheduler.blocks.num_taken)
        self.max_states = max(self.max_states, scheduler.state_slots.num_taken)
        held = jax.tree.leaves((runner._state, runner._sampling.history))
        self.state_bytes = max(self.state_bytes, sum(a.nbytes for a in held))
        try:
            scheduler.check_integrity()
        except AssertionError as error:
            self.problems.append(f"step {self.num_steps}: {error}")
        if self.max_blocks > scheduler.capacities.num_blocks or self.state_bytes > self._budget:
            self.problems.append(f"step {self.num_steps}: beyond the budget")
        return results


@dataclasses.dataclass
class Tally:
    """What came back, counted by the threads that call.

    Attributes:
      num_finished, num_tokens: requests and their tokens.
      preempted: (prompt, parameters, tokens) of some requests that were preempted.
      rows: of the table.
    """

    watch: Watch
    engine: Engine
    every: int
    num_finished: int = 0
    num_tokens: int = 0
    preempted: list[tuple[list[int], dict[str, Any], list[int]]] = dataclasses.field(
        default_factory=list
    )
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    start_s: float = dataclasses.field(default_factory=time.monotonic)

    def call(self, prompt: list[int], params: dict[str, Any]) -> None:
        """Run a request and count it."""
        result: Any = self.engine.generate(input_ids=prompt, sampling_params=params)
        with self.lock:
            self.num_finished += 1
            self.num_tokens += len(result["output_ids"])
            if result["meta_info"]["num_retractions"] and len(self.preempted) < NUM_CHECKED:
                self.preempted.append((prompt, params, result["output_ids"]))
            if self.num_finished % self.every == 0:
                self._note()

    def _note(self) -> None:
        gc.collect()
        row = {
            "finished": self.num_finished,
            "tokens": self.num_tokens,
            "steps": self.watch.num_steps,
            "preemptions": self.engine.core.scheduler.num_retractions,
            "max_used_blocks": self.watch.max_blocks,
            "max_used_states": self.watch.max_states,
            "state_bytes": self.watch.state_bytes,
            "resident_mib": round(resident_mib(), 1),
            "live_arrays": len(jax.live_arrays()),
            "seconds": round(time.monotonic() - self.start_s, 1),
        }
        if not self.rows:
            print("  ".join(row))
        print("  ".join(str(value).rjust(len(name)) for name, value in row.items()), flush=True)
        self.rows.append(row)


def run(engine: Engine, num_requests: int) -> Tally:
    """Send the requests from several threads, each waiting for its own."""
    rng = np.random.default_rng(0)
    tally = Tally(Watch(engine), engine, max(num_requests // NUM_ROWS, 1))
    with concurrent.futures.ThreadPoolExecutor(CALLERS) as pool:
        calls = []
        for index in range(num_requests):
            prompt = rng.integers(0, engine.model_config.vocab_size, rng.integers(1, 150)).tolist()
            params = {
                "max_new_tokens": int(rng.integers(1, 150)),
                "sampling_seed": index,
                "ignore_eos": True,
                "frequency_penalty": 0.5 if index % 4 == 0 else 0.0,
            }
            calls.append(pool.submit(tally.call, prompt, params))
        while calls:
            calls.pop(0).result()
    return tally


def problems(tally: Tally, num_requests: int) -> list[str]:
    """What did not hold."""
    found = list(tally.watch.problems[:3])
    rows = tally.rows
    early, last = rows[len(rows) // 5], rows[-1]
    growth = last["resident_mib"] - early["resident_mib"]
    if growth > MAX_GROWTH_MIB:
        found.append(f"host memory grew by {growth:.1f} MiB")
    fifth = max(len(rows) // 5, 1)
    before, after = (max(r["live_arrays"] for r in part) for part in (rows[:fifth], rows[-fifth:]))
    if after > before:
        found.append(f"arrays stayed behind: {before}, then {after}")
    if last["preemptions"] < num_requests / 10:
        found.append(f"only {last['preemptions']} preemptions")
    for prompt, params, tokens in tally.preempted:
        again: Any = tally.engine.generate(input_ids=prompt, sampling_params=params)
        if again["output_ids"] != tokens:
            found.append(f"another output alone, seed {params['sampling_seed']}")
    return found


def main() -> int:
    """Run, record, and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=RESULTS / "preemption.csv")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = tiny_models.write(Path(folder), tiny_models.two_layers("q4_all"))
        config = HybridConfig.from_directory(directory)
        with Engine(
            directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            memory_bytes=budget(config),
            **CAPACITIES,
        ) as engine:
            tally = run(engine, arguments.requests)
            found = problems(tally, arguments.requests)
            limits = {
                "num_blocks": engine.core.scheduler.capacities.num_blocks,
                "budget_bytes": engine.engine_config.memory_bytes,
            }
    common = limits | provenance()
    write_csv(arguments.output, [row | common for row in tally.rows])
    print(common)
    for problem in found:
        print("FAILED:", problem)
    print(f"{len(tally.preempted)} preempted requests ran again alone")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
