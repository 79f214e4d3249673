"""Rounding error of the log form over a long sequence, in each type of state and log.

    python -m benchmarks.gdn_error

writes `benchmarks/results/gdn_error.csv`: the relative rms error of the outputs against float64,
for the tiled operator, beside the errors that docs/design.md states. beta stays in float32, as in
the stated table; a bfloat16 model rounds it too, which adds about 1.2e-3.
"""

import argparse
import csv
import functools
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.bits import storage_dtype
from pallas_kernels.gated_delta_net import GdnLog, LogInputs, StateDtype, log_step
from pallas_kernels.rows import map_row_tiles, plan_rows
from qwen_hybrid.step import COMPILER_OPTIONS
from tests.oracles.gdn_error import (
    HEAD_DIM,
    NUM_HEADS,
    STATED_ERRORS,
    GdnInputs,
    exact_output,
    gdn_inputs,
    relative_rms_error,
)

BLOCK_SIZE = 64
# Rows of one call; one program serves every call.
CHUNK = 1024
LOG_ROWS = 2 * BLOCK_SIZE

# (sealed state, log)
FORMS = (
    (StateDtype.BFLOAT16, "bfloat16"),
    (StateDtype.BFLOAT16_PAIR, "bfloat16"),
    (StateDtype.FLOAT32, "bfloat16"),
    (StateDtype.FLOAT32, "float32"),
)
RESULTS = Path(__file__).parent / "results" / "gdn_error.csv"


def _empty_log(state_dtype: StateDtype, log_dtype: str) -> GdnLog:
    """A log of one slot; state slot 0 is empty, 1 and 2 take turns."""
    planes = (3, state_dtype.planes)
    stored, heads = storage_dtype(log_dtype), (1, NUM_HEADS)
    return GdnLog(
        key=jnp.zeros((*heads, HEAD_DIM, LOG_ROWS), stored),
        key_scale=jnp.zeros((*heads, LOG_ROWS), jnp.float32),
        value=jnp.zeros((*heads, LOG_ROWS, HEAD_DIM), stored),
        gate=jnp.zeros((*heads, LOG_ROWS), jnp.float32),
        sealed=jnp.zeros((*planes, NUM_HEADS, HEAD_DIM, HEAD_DIM), state_dtype.dtype),
        state_dtype=state_dtype,
    )


@functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS, donate_argnums=1)
def _chunk(inputs: dict[str, Array], log: GdnLog, start: Array, seal: Array):
    """Feed one chunk from `start`; `seal` = (sealed length, its slot, slot of the next)."""
    rows, seals = plan_rows(
        start=start[None],
        count=jnp.full(1, CHUNK, jnp.int32),
        certain=jnp.full(1, CHUNK, jnp.int32),
        seal_only=jnp.zeros(1, bool),
        sealed_len=seal[:1],
        sealed_slot=seal[1:2],
        next_slot=seal[2:],
        block_table=jnp.zeros((1, 1), jnp.int32),
        max_rows=CHUNK,
        num_state_slots=log.sealed.shape[0],
        block_size=BLOCK_SIZE,
    )
    made = map_row_tiles(lambda one: LogInputs.of(**one), rows, inputs)
    return *log_step(made, log, rows), seals.boundary[0]


def tiled_output(
    inputs: GdnInputs, state_dtype: StateDtype, log_dtype: str
) -> Float[np.ndarray, "T N H"]:
    """Outputs of the tiled operator over one sequence, prefilled in chunks."""
    arrays = {
        "query": jnp.asarray(inputs.q, log_dtype),
        "key": jnp.asarray(inputs.k, log_dtype),
        "value": jnp.asarray(inputs.v, log_dtype),
        "gate": jnp.asarray(inputs.g()),
        "beta": jnp.asarray(inputs.beta()),
    }
    log, outs = _empty_log(state_dtype, log_dtype), []
    sealed_len, slot = 0, 0
    for start in range(0, len(inputs.q), CHUNK):
        piece = {name: array[start : start + CHUNK] for name, array in arrays.items()}
        free = 2 if slot == 1 else 1
        seal = jnp.array([sealed_len, slot, free], jnp.int32)
        out, log, boundary = _chunk(piece, log, jnp.array(start, jnp.int32), seal)
        sealed_len, slot = int(boundary), free
        outs.append(np.asarray(out))
    return np.concatenate(outs)


def measured_errors(
    num_tokens: int, forms: Sequence[tuple[StateDtype, str]] = FORMS
) -> dict[tuple[str, str], float]:
    """Relative rms error of each form after `num_tokens`, a multiple of the chunk."""
    inputs = gdn_inputs(num_tokens)
    exact, _ = exact_output(inputs)
    errors = {}
    for state_dtype, log_dtype in forms:
        out = tiled_output(inputs, state_dtype, log_dtype)
        error = relative_rms_error(out, exact, num_tokens=num_tokens)
        errors[state_dtype.value, log_dtype] = error
    return errors


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description="Rounding error of the gated delta rule's log.")
    parser.add_argument("--num-tokens", type=int, default=16_384)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    errors = measured_errors(arguments.num_tokens)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["sealed_state", "log", "num_tokens", "error", "stated", "jax", "machine"])
        for form, error in errors.items():
            stated = STATED_ERRORS.get(form, {}).get(arguments.num_tokens, "")
            place = (jax.__version__, f"{jax.default_backend()} {platform.machine()}")
            writer.writerow([*form, arguments.num_tokens, f"{error:.3e}", stated, *place])
    print(arguments.output.read_text(), end="")


if __name__ == "__main__":
    main()
