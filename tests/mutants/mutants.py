"""Deliberate bugs, each with the tests that must fail because of it.

The list follows docs/design.md. A mutant is a change of functions while the tests run, so nothing
of it is in the packages; `swap` raises once the function that it changes is gone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import masked
from pallas_kernels import rows as rows_module
from pallas_kernels.attention import online
from pallas_kernels.attention import tiled as attention_tiled
from pallas_kernels.causal_conv import tiled as conv_tiled
from pallas_kernels.dense import api as dense_api
from pallas_kernels.gated_delta_net import tiled as gdn_tiled
from pallas_kernels.qsa import tiled as qsa_tiled
from pallas_kernels.sampling import api as sampling_api
from qwen_hybrid import attention, digest, gated_delta_net
from qwen_hybrid import state as state_module
from qwen_hybrid.state import StateConfig
from serve import runner as runner_module
from serve.scheduler import Scheduler
from tests.mutants.mutant import Mutant, Patch
from tests.mutants.sampling_mutants import SAMPLING_MUTANTS
from tests.mutants.serve_mutants import SERVE_MUTANTS
from tests.mutants.swap import Shim, swap

OPS = "tests/pallas_kernels"
CONV = f"{OPS}/causal_conv/test_tiled.py"
GDN = f"{OPS}/gated_delta_net/test_tiled.py"
ATTENTION = f"{OPS}/attention/test_tiled.py"
QSA = f"{OPS}/qsa/test_tiled.py"
SAMPLING = f"{OPS}/sampling/test_tiled.py"
ROWS = f"{OPS}/test_row_invariance.py"
LAWS = "tests/laws/test_laws.py::test_neighbours_slots_chunks_and_preemption_change_no_bit"
ENGINE = "tests/serve/test_engine.py"
STATE = "tests/qwen_hybrid/test_state.py"
DIGEST = "tests/qwen_hybrid/test_digest.py"
SCHEDULER = "tests/serve/test_scheduler.py"

GDN_SCHEDULES = (
    f"{GDN}::test_random_schedules_give_the_bits_of_one_piece_and_the_values_of_the_recurrence"
)
LAW_DENSE = f"{LAWS}[tiny-dense-bfloat16]"


# Gated DeltaNet.


def _beta_rounded_in_one_path(patch: Patch) -> None:
    is_prefill: list[Any] = []

    def mix(original: Any) -> Any:
        def changed(weights, projection, state, rows, config):
            is_prefill.append(rows.num_rows > 16)
            try:
                return original(weights, projection, state, rows, config)
            finally:
                is_prefill.pop()

        return changed

    def gates(original: Any) -> Any:
        def changed(weights, projection):
            gate, beta = original(weights, projection)
            exact = jax.nn.sigmoid(projection.b.astype(jnp.float32))
            return gate, jnp.where(is_prefill[-1], exact, beta) if is_prefill else beta

        return changed

    swap(patch, gated_delta_net, "mix_rows", mix)
    swap(patch, gated_delta_net, "_gates", gates)


def _u_unrounded_in_prefill(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(rhs, pairs, beta, logged, seg, dtype):
            exact = original(rhs, pairs, beta, logged, seg, jnp.dtype("float32"))
            rounded = original(rhs, pairs, beta, logged, seg, dtype)
            return jnp.where(jnp.sum(seg.live) > 1, exact, rounded)

        return changed

    swap(patch, gdn_tiled, "_solve", make)


def _gates_restart(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(gate, log, before, seg):
            first = jnp.argmax(seg.live)
            starts_inside = seg.live & (jnp.arange(16) >= first) & (first > 0)
            stands_at = log[jnp.maximum(first - 1, 0)]
            total = original(gate, log, before, seg)
            return jnp.where(starts_inside[:, None], total - stands_at[None, :], total)

        return changed

    swap(patch, gdn_tiled, "_running_gates", make)


def _seal_a_row_early(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(state, pages):
            value, gate = pages.value.at[-1].set(0.0), pages.gate.at[-1].set(pages.gate[-2])
            return original(state, dataclasses.replace(pages, value=value, gate=gate))

        return changed

    swap(patch, gdn_tiled, "_seal", make)


def _seal_where_the_call_starts(patch: Patch) -> None:
    """Exact in real numbers: only the roundings move with the schedule."""

    def make(original: Any) -> Any:
        def changed(tile, pages, state, value, beta, seg, dtype):
            width = pages.key.shape[0]
            before = seg.tile % (width // 16) * 16
            folds = seg.known[0] & ~seg.live[0] & (before > 0)
            stands_at = pages.gate[jnp.maximum(before - 1, 0)]
            inside = (jnp.arange(width) < before)[:, None, None]
            folded = dataclasses.replace(
                pages,
                key=jnp.where(inside, pages.key, 0.0),
                value=jnp.where(inside, pages.value, 0.0),
                key_scale=jnp.where(inside[:, :, 0], pages.key_scale, 0.0),
                gate=jnp.where(inside[:, :, 0], pages.gate, stands_at[None, :]),
            )
            rest = dataclasses.replace(
                pages,
                value=jnp.where(folds, 0.0, pages.value),
                key=jnp.where(folds, 0.0, pages.key),
                gate=jnp.where(folds, 0.0, pages.gate),
            )
            moved = jnp.where(folds, tile.gate - stands_at[None, :], tile.gate)
            state = jnp.where(folds, gdn_tiled._seal(state, folded), state)
            tile = dataclasses.replace(tile, gate=moved)
            return original(tile, rest, state, value, beta, seg, dtype)

        return changed

    swap(patch, gdn_tiled, "_tile_values", make)


def _seal_of_rejected_rows(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda **how: original(**(how | {"certain": how["count"]}))

    swap(patch, rows_module, "plan_rows", make)


def _seal_in_place(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(**how):
            rows, seals = original(**how)
            old = how["sealed_slot"][rows.segment_slot]
            store = jnp.where(rows.segment_store < how["num_state_slots"], old, rows.segment_store)
            return dataclasses.replace(rows, segment_store=store), seals

        return changed

    swap(patch, rows_module, "plan_rows", make)


def _log_a_tile_short(patch: Patch) -> None:
    rows = property(lambda sc: -(-(sc.block_size - 1 + 2 * sc.max_window) // 16) * 16 - 16)
    patch.setattr(StateConfig, "log_rows", rows)


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


# Attention.


def _where_by_zero(mask: Any, x: Any, y: Any) -> Any:
    """`jnp.where`, but what is to be zero is multiplied by it."""
    is_zero = isinstance(y, float) and y == 0.0
    return x * mask.astype(x.dtype) if is_zero else jnp.where(mask, x, y)


def _zero_times_values(patch: Patch) -> None:
    for module in (attention_tiled, masked):
        patch.setattr(module, "jnp", Shim(jnp, where=_where_by_zero))


def _zero_times_the_log(patch: Patch) -> None:
    patch.setattr(gdn_tiled, "jnp", Shim(jnp, where=_where_by_zero))


def _maximum_over_the_tile(patch: Patch) -> None:
    def make(original: Any) -> Any:
        del original

        def changed(scores, mask, weigh_values):
            seen = mask[:, None, None, :]
            peak = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=(0, 3), keepdims=True)[..., 0]
            peak = jnp.broadcast_to(peak, scores.shape[:3])
            base = jnp.where(peak == -jnp.inf, 0.0, peak)
            shifted = jnp.where(seen, scores - base[..., None], 0.0)
            weight = jnp.where(seen, jnp.exp(shifted), 0.0)
            return online.Partial(peak, jnp.sum(weight, axis=-1), weigh_values(weight))

        return changed

    swap(patch, online, "span_partial", make)


def _positions_from_the_tile(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(weights, x, position, config):
            return original(weights, x, position - position[0], config)

        return changed

    swap(patch, attention, "project", make)


def _ties_to_the_higher_group(patch: Patch) -> None:
    def top_k(x: Any, k: int) -> Any:
        value, index = lax.top_k(x[:, ::-1], k)
        return value, x.shape[1] - 1 - index

    patch.setattr(qsa_tiled, "lax", Shim(lax, top_k=top_k))


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
        half = x.shape[1] // 2
        whole = lax.dot_general(x, w, dimensions, **how)
        parts = [
            lax.dot_general(x[:, cut], w[:, cut], dimensions, **how)
            for cut in (slice(half), slice(half, None))
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
    Mutant(
        "beta rounded in one path",
        "beta stays float32 in steps of more than 16 rows",
        _beta_rounded_in_one_path,
        (LAW_DENSE,),
    ),
    Mutant(
        "u unrounded in prefill",
        "pseudo-values of one call are read before they are rounded",
        _u_unrounded_in_prefill,
        (f"{GDN_SCHEDULES}[float32-bfloat16]",),
    ),
    Mutant(
        "gate sum restarted",
        "the sum of log-gates starts again where a call starts",
        _gates_restart,
        (f"{GDN_SCHEDULES}[float32-float32]",),
    ),
    Mutant(
        "seal a row early",
        "a seal leaves out the last row of its block",
        _seal_a_row_early,
        (f"{GDN_SCHEDULES}[float32-float32]",),
    ),
    Mutant(
        "seal at a schedule's row",
        "the state moves on to the tile where a call starts",
        _seal_where_the_call_starts,
        (f"{GDN_SCHEDULES}[float32-float32]",),
    ),
    Mutant(
        "seal of rejected rows",
        "a boundary beyond the certain rows is stored",
        _seal_of_rejected_rows,
        (f"{GDN_SCHEDULES}[float32-float32]",),
    ),
    Mutant(
        "stale sealed slot, device",
        "a seal is written over the old one, and the new slot is read",
        _seal_in_place,
        (f"{GDN}::test_sequences_go_on_from_a_seal_that_they_share[float32-float32]",),
    ),
    Mutant(
        "stale sealed slot, host",
        "a request keeps its old slot after a seal",
        _stale_sealed_slot,
        (SCHEDULER, LAW_DENSE),
    ),
    Mutant(
        "log a tile short",
        "the log has no room for a seal that waits",
        _log_a_tile_short,
        (f"{STATE}::test_log_and_rings_hold_what_is_needed",),
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
        "NaN-unsafe mask, attention",
        "values that a row may not see are multiplied by zero",
        _zero_times_values,
        (ATTENTION,),
    ),
    Mutant(
        "NaN-unsafe mask, log",
        "rows of the log that are not there are multiplied by zero",
        _zero_times_the_log,
        (f"{GDN_SCHEDULES}[float32-float32]",),
    ),
    Mutant(
        "neighbour leak",
        "softmax subtracts the maximum of the tile",
        _maximum_over_the_tile,
        (ATTENTION,),
    ),
    Mutant(
        "positions from the tile",
        "rotary positions count from the first row of the tile",
        _positions_from_the_tile,
        (LAW_DENSE,),
    ),
    Mutant(
        "ties to the higher group",
        "the indexer keeps the higher of two equal groups",
        _ties_to_the_higher_group,
        (f"{QSA}::test_negative_zero_ties_with_zero",),
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
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
