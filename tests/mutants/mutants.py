"""Deliberate bugs, each with the tests that must fail because of it.

The list follows docs/design.md. A mutant is a change of functions while the tests run, so nothing
of it is in the packages; `swap` raises once the function that it changes is gone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rows as rows_module
from pallas_kernels.causal_conv import tiled as conv_tiled
from pallas_kernels.dense import api as dense_api
from pallas_kernels.sampling import api as sampling_api
from qwen_hybrid import digest
from qwen_hybrid import state as state_module
from qwen_hybrid.state import StateConfig
from serve import runner as runner_module
from serve.scheduler import Scheduler
from tests.mutants.attention_mutants import ATTENTION_MUTANTS
from tests.mutants.gdn_mutants import GDN_MUTANTS
from tests.mutants.mutant import Mutant, Patch
from tests.mutants.sampling_mutants import SAMPLING_MUTANTS
from tests.mutants.serve_mutants import SERVE_MUTANTS
from tests.mutants.spec_mutants import SPEC_MUTANTS
from tests.mutants.swap import Shim, swap

OPS = "tests/pallas_kernels"
CONV = f"{OPS}/causal_conv/test_tiled.py"
SAMPLING = f"{OPS}/sampling/test_tiled.py"
ROWS = f"{OPS}/test_row_invariance.py"
ENGINE = "tests/serve/test_engine.py"
STATE = "tests/qwen_hybrid/test_state.py"
DIGEST = "tests/qwen_hybrid/test_digest.py"
SCHEDULER = "tests/serve/test_scheduler.py"


# Windows.


def _taps_reversed(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(x, ring, weight, rows, row, *, dilation=1):
            return original(x, ring, weight[:, ::-1], rows, row, dilation=dilation)

        return changed

    swap(patch, conv_tiled, "conv_rows", make)


def _ring_a_row_short(patch: Patch) -> None:
    patch.setattr(StateConfig, "ring_rows", lambda sc, window: window + 2 * sc.max_window - 2)


def _ring_without_room_for_windows(patch: Patch) -> None:
    patch.setattr(StateConfig, "ring_rows", lambda sc, window: window + sc.max_window - 2)


def _rows_before_from_the_neighbour(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(x, ring, rows, row, offset):
            here = dataclasses.replace(rows, start=jnp.zeros_like(rows.start))
            return original(x, ring, here, row, offset)

        return changed

    swap(patch, rows_module, "previous_rows", make)


# Row-wise work.


def _one_row_in_its_natural_shape(patch: Patch) -> None:
    """XLA multiplies a matrix by one row in another order than by several."""

    def make(original: Any) -> Any:
        def changed(fn, num_rows, *trees):
            tiled = original(fn, num_rows, *trees)
            alone = fn(*jax.tree.map(lambda a: a[:1], trees))

            def choose(many: Any, one: Any) -> Any:
                return jnp.where(num_rows == 1, many.at[:1].set(one), many)

            return jax.tree.map(choose, tiled, alone)

        return changed

    swap(patch, rows_module, "map_tiles", make)


def _split_k_by_row_count(patch: Patch) -> None:
    is_few: list[Any] = []

    def make(original: Any) -> Any:
        def changed(fn, num_rows, *trees):
            is_few.append(num_rows <= 16)
            try:
                return original(fn, num_rows, *trees)
            finally:
                is_few.pop()

        return changed

    def dot_general(x: Any, w: Any, dimensions: Any, **how: Any) -> Any:
        width, axis = x.shape[1], dimensions[0][1][0]
        whole = lax.dot_general(x, w, dimensions, **how)
        parts = [
            lax.dot_general(
                x[:, low:high], lax.slice_in_dim(w, low, high, axis=axis), dimensions, **how
            )
            for low, high in ((0, width // 2), (width // 2, width))
        ]
        return jnp.where(is_few[-1], parts[0] + parts[1], whole) if is_few else whole

    swap(patch, rows_module, "map_tiles", make)
    patch.setattr(dense_api, "lax", Shim(lax, dot_general=dot_general))


def _noise_by_place_in_the_batch(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(seed, position, size):
            place = jnp.arange(seed.shape[0], dtype=seed.dtype)
            return original(jnp.stack([jnp.zeros_like(place), place], axis=1), position, size)

        return changed

    swap(patch, sampling_api, "_noise", make)


def _noise_without_the_position(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda seed, position, size: original(seed, jnp.zeros_like(position), size)

    swap(patch, sampling_api, "_noise", make)


# The host's side.


def _commit_without_the_bonus(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda state, count: original(state, jnp.maximum(count - 1, 0))

    swap(patch, state_module, "commit", make)


def _prompt_counted_a_row_short(patch: Patch) -> None:
    original = Scheduler.commit

    def changed(self, item):
        original(self, dataclasses.replace(item, ids=item.ids[: max(len(item.ids) - 1, 1)]))

    patch.setattr(Scheduler, "commit", changed)


def _stale_sealed_slot(patch: Patch) -> None:
    def changed(self, request, boundary):
        self.state_slots.give([request.next_slot])
        request.next_slot, request.sealed_len = -1, boundary

    patch.setattr(Scheduler, "stored", changed)


def _next_slot_leaks(patch: Patch) -> None:
    original = Scheduler._give_back

    def changed(self, request):
        request.next_slot = -1
        original(self, request)

    patch.setattr(Scheduler, "_give_back", changed)


def _score_of_the_wrong_token(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(item, first_row):
            reads = original(item, first_row)
            return [(row, max(target - 1, -1)) for row, target in reads]

        return changed

    swap(patch, runner_module, "_reads", make)


def _digest_misses_a_ring_row(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda ring, depth, window: original(ring, depth, max(window - 1, 0))

    swap(patch, digest, "_tail", make)


def _digest_covers_a_rejected_row(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda state, depth: original(state, depth + 1)

    swap(patch, digest, "_attention", make)


MUTANTS = (
    *GDN_MUTANTS,
    *ATTENTION_MUTANTS,
    Mutant(
        "stale sealed slot, host",
        "a request keeps its old slot after a seal",
        _stale_sealed_slot,
        (SCHEDULER,),
    ),
    Mutant("taps reversed", "the convolution reads its taps backwards", _taps_reversed, (CONV,)),
    Mutant(
        "ring a row short",
        "the tails of a boundary are gone when its seal comes late",
        _ring_a_row_short,
        (f"{STATE}::test_a_late_seal_finds_the_tails_of_every_ring",),
    ),
    Mutant(
        "ring short of a window",
        "rejected rows overwrite rows that are still needed",
        _ring_without_room_for_windows,
        (CONV,),
    ),
    Mutant(
        "rows before from the neighbour",
        "the first rows of a call look back into the neighbour's",
        _rows_before_from_the_neighbour,
        (CONV,),
    ),
    Mutant(
        "product tiled by row count",
        "a call of one row multiplies a matrix by a vector",
        _one_row_in_its_natural_shape,
        (ROWS,),
    ),
    Mutant(
        "split K by row count",
        "products of up to 16 rows are sums of two halves",
        _split_k_by_row_count,
        (ROWS,),
    ),
    Mutant(
        "noise by place in the batch",
        "sampling noise is keyed by the row of the tile",
        _noise_by_place_in_the_batch,
        (SAMPLING,),
    ),
    Mutant(
        "noise without the position",
        "sampling noise is the same at every position",
        _noise_without_the_position,
        (SAMPLING,),
    ),
    Mutant(
        "commit off by one, device",
        "the last row of a commit is not counted",
        _commit_without_the_bonus,
        (f"{STATE}::test_commit_moves_the_length_and_nothing_else",),
    ),
    Mutant(
        "commit off by one, host",
        "the last row of a prompt's piece is not counted",
        _prompt_counted_a_row_short,
        (f"{ENGINE}::test_a_digest_tells_what_was_committed",),
    ),
    Mutant(
        "next slot leaks",
        "a released request keeps the slot of its next seal",
        _next_slot_leaks,
        (SCHEDULER,),
    ),
    Mutant(
        "score of the wrong token",
        "scores are those of the next lower id",
        _score_of_the_wrong_token,
        (f"{ENGINE}::test_score_agrees_with_generation",),
    ),
    Mutant(
        "digest misses a ring row",
        "the oldest row of a ring's tail is left out",
        _digest_misses_a_ring_row,
        (DIGEST,),
    ),
    Mutant(
        "digest covers a rejected row",
        "keys and values one row beyond the depth count",
        _digest_covers_a_rejected_row,
        (DIGEST,),
    ),
    *SAMPLING_MUTANTS,
    *SERVE_MUTANTS,
    *SPEC_MUTANTS,
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
