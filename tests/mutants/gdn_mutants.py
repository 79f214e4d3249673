"""Deliberate bugs in Gated DeltaNet: its gates, its log, its seals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import bits
from pallas_kernels import rows as rows_module
from pallas_kernels.bits import from_bits, to_bits
from pallas_kernels.gated_delta_net import tiled
from pallas_kernels.rows import DECODE, PREFILL
from qwen_hybrid import gated_delta_net
from qwen_hybrid.state import StateConfig
from tests.mutants.mutant import Mutant, Patch
from tests.mutants.swap import Shim, swap, where_by_zero

GDN = "tests/pallas_kernels/gated_delta_net/test_tiled.py"
# Both programs, for few rows and for many.
SCHEDULES = (
    f"{GDN}::test_random_schedules_give_the_bits_of_one_piece_and_the_values_of_the_recurrence"
    "[float32-bfloat16]"
)
# One program, one call.
TWIN = f"{GDN}::test_outputs_and_seal_equal_those_of_the_twin"
SMALL_BLOCKS = f"{GDN}::test_random_schedules_over_small_blocks"
REJECTED = f"{GDN}::test_rejected_rows_full_of_nan_change_nothing[float32-float32]"
SHARED = f"{GDN}::test_sequences_go_on_from_a_seal_that_they_share[float32-float32]"
SHAPES = (
    "tests/qwen_hybrid/test_shapes.py"
    "::test_programs_for_few_and_for_many_rows_give_the_same_bits[q35_moe-bfloat16]"
)
WAITS = f"{GDN}::test_seal_waits_while_the_log_has_room[float32-float32]"
STATE = "tests/qwen_hybrid/test_state.py"
BITS = "tests/pallas_kernels/test_bits.py"


# Gates and pseudo-values.


def _beta_rounded_in_one_path(patch: Patch) -> None:
    is_prefill: list[bool] = []

    def mix(original: Any) -> Any:
        def changed(weights, projection, state, rows, config):
            is_prefill.append(rows.shape == PREFILL)
            try:
                return original(weights, projection, state, rows, config)
            finally:
                is_prefill.pop()

        return changed

    def gates(original: Any) -> Any:
        def changed(weights, projection):
            gate, beta = original(weights, projection)
            exact = jax.nn.sigmoid(projection.b.astype(jnp.float32))
            return gate, exact if is_prefill and is_prefill[-1] else beta

        return changed

    swap(patch, gated_delta_net, "mix_rows", mix)
    swap(patch, gated_delta_net, "_gates", gates)


def _u_unrounded_in_prefill(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(rhs, sixteen, beta, tile, dtype):
            kept = jnp.dtype("float32") if tile.size == PREFILL.segment else dtype
            return original(rhs, sixteen, beta, tile, kept)

        return changed

    swap(patch, tiled, "_solve", make)


def _u_unrounded_in_its_group(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(rhs, pairs, beta, logged, live, dtype):
            exact = original(rhs, pairs, beta, logged, live, jnp.dtype("float32"))
            return from_bits(to_bits(exact, dtype)).astype(jnp.float32)

        return changed

    swap(patch, tiled, "_solve_group", make)


def _truncated(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(x, storage):
            if jnp.dtype(storage) != jnp.uint16 or x.dtype != jnp.float32:
                return original(x, storage)
            return (lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16)

        return changed

    swap(patch, bits, "to_bits", make)


def _gates_restart(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(gate, log, live):
            first = jnp.argmax(live, axis=1)[:, None, None]
            new = live[:, None, :] & (first > 0)
            total = original(gate, log, live)
            return jnp.where(new, total - jnp.take_along_axis(log, first, axis=2), total)

        return changed

    swap(patch, tiled, "_running_gates", make)


# What is read of the log, and what is written.


def _zero_times_the_log(patch: Patch) -> None:
    patch.setattr(tiled, "jnp", Shim(jnp, where=where_by_zero))


def _bad_rows_of_the_group_stay(patch: Patch) -> None:
    def make(original: Any) -> Any:
        del original
        return lambda pairs, u: tiled._product("lhtj,lhjv->lhtv", pairs, u)

    swap(patch, tiled, "_own_group", make)


def _before_the_pending_write(patch: Patch, reader: str) -> None:
    """Let a function read the values of the log as they were before those of the last step."""
    before: list[Any] = []

    def write(original: Any) -> Any:
        def changed(log, rows, places, step, u):
            before[:] = [log.value]
            return original(log, rows, places, step, u)

        return changed

    def make(original: Any) -> Any:
        def changed(log, *rest):
            return original(dataclasses.replace(log, value=before[0]), *rest)

        return changed

    swap(patch, tiled, "_write_pending", write)
    swap(patch, tiled, reader, make)


def _tile_before_the_pending_write(patch: Patch) -> None:
    _before_the_pending_write(patch, "_pages")


def _fold_before_the_pending_write(patch: Patch) -> None:
    _before_the_pending_write(patch, "_running_states")


def _lanes_written_in_order(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda log, name, *lanes: original(log, name, *(x[::-1] for x in lanes))

    swap(patch, tiled, "_write_tile", make)


def _log_a_tile_short(patch: Patch) -> None:
    patch.setattr(StateConfig, "log_rows", property(lambda sc: 2 * sc.block_size - 16))


# Seals.


def _seal_a_row_early(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(state, pages):
            value = pages.value.at[:, -1].set(0.0)
            gate = pages.gate.at[:, -1].set(pages.gate[:, -2])
            return original(state, dataclasses.replace(pages, value=value, gate=gate))

        return changed

    swap(patch, tiled, "_seal", make)


def _seal_in_another_order(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(log, carried, rows, step, places):
            with pytest.MonkeyPatch.context() as inner:
                if rows.shape == DECODE:
                    descending = lambda *bounds: reversed(range(*bounds))  # noqa: E731
                    inner.setattr(tiled, "range", descending, raising=False)
                return original(log, carried, rows, step, places)

        return changed

    swap(patch, tiled, "_running_states", make)


def _fold_of_the_other_block(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(log, carried, rows, step, places):
            rolled = {
                name: jnp.roll(getattr(log, name), rows.block_size, axis=axis)
                for name, axis in tiled._ROW_AXIS.items()
            }
            return original(dataclasses.replace(log, **rolled), carried, rows, step, places)

        return changed

    swap(patch, tiled, "_running_states", make)


def _folded_up_to(state: Any, pages: Any, inside: Any, stands_at: Any) -> Any:
    """Each lane's state with the rows `inside` of its block, whose gates end at `stands_at`."""
    kept = dataclasses.replace(
        pages,
        key=jnp.where(inside[:, None, None, :], pages.key, 0.0),
        key_scale=jnp.where(inside[:, None, :], pages.key_scale, 0.0),
        value=jnp.where(inside[:, None, :, None], pages.value, 0.0),
        gate=jnp.where(inside[:, None, :], pages.gate, stands_at),
    )
    return tiled._seal(state, kept)


def _seal_where_the_call_starts(patch: Patch) -> None:
    """Exact in real numbers: only the roundings move with the schedule."""
    block: list[Any] = []

    def before(tile: Any) -> tuple[Any, Any]:
        """Whether a lane's call starts inside its tile, and the block's rows before the tile."""
        starts_inside = tile.known[:, 0] & ~tile.live[:, 0]
        inside = jnp.arange(block[0].gate.shape[2])[None, :] < tile.place[:, None]
        return starts_inside, inside

    def states(original: Any) -> Any:
        def changed(log, carried, rows, step, places):
            block[:] = [tiled._pages(log, places.block, rows.block_size)]
            return original(log, carried, rows, step, places)

        return changed

    def apply(original: Any) -> Any:
        def changed(state, tile):
            starts_inside, inside = before(tile)
            last = jnp.maximum(tile.place - 1, 0)[:, None, None]
            stands_at = jnp.take_along_axis(block[0].gate, last, axis=2)
            moves = (starts_inside & (tile.place > 0))[:, None, None]
            folded = _folded_up_to(state, block[0], inside, stands_at)
            state = jnp.where(moves[..., None], folded, state)
            gate = jnp.where(moves, tile.gate - stands_at, tile.gate)
            return original(state, dataclasses.replace(tile, gate=gate))

        return changed

    def scores(original: Any) -> Any:
        def changed(tile, pages):
            starts_inside, inside = before(tile)
            folded = (starts_inside[:, None] & inside)[:, None, None, :]
            return jnp.where(folded, 0.0, original(tile, pages))

        return changed

    swap(patch, tiled, "_running_states", states)
    swap(patch, tiled, "_apply_state", apply)
    swap(patch, tiled, "_weighted_scores", scores)


def _seal_of_rejected_rows(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda **how: original(**(how | {"certain": how["count"]}))

    swap(patch, rows_module, "plan_rows", make)


def _seal_in_place(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(**how):
            rows, seals = original(**how)
            old = how["sealed_slot"][rows.segments.slot]
            store = jnp.where(rows.lane_store < how["num_state_slots"], old, rows.lane_store)
            return dataclasses.replace(rows, lane_store=store), seals

        return changed

    swap(patch, rows_module, "plan_rows", make)


GDN_MUTANTS = (
    Mutant(
        "beta rounded in one path",
        "beta stays float32 in programs for many rows",
        _beta_rounded_in_one_path,
        (SHAPES,),
    ),
    Mutant(
        "u unrounded in prefill",
        "programs for many rows read pseudo-values before they are rounded",
        _u_unrounded_in_prefill,
        (SCHEDULES,),
    ),
    Mutant(
        "u unrounded in its group",
        "rows of one group of 4 read each other's pseudo-values before they are rounded",
        _u_unrounded_in_its_group,
        (SCHEDULES,),
    ),
    Mutant(
        "bits truncated",
        "bfloat16 entries are cut off instead of rounded",
        _truncated,
        (BITS,),
    ),
    Mutant(
        "gate sum restarted",
        "the sum of log-gates starts again where a call starts",
        _gates_restart,
        (SMALL_BLOCKS,),
    ),
    Mutant(
        "NaN-unsafe mask, log",
        "rows of the log that are not there are multiplied by zero",
        _zero_times_the_log,
        (TWIN,),
    ),
    Mutant(
        "NaN of a later row, log",
        "queries weigh the later rows of their group by zero",
        _bad_rows_of_the_group_stay,
        (REJECTED,),
    ),
    Mutant(
        "tile reads before the write",
        "a tile reads its block before the pseudo-values of the tile before are written",
        _tile_before_the_pending_write,
        (TWIN,),
    ),
    Mutant(
        "empty lane writes",
        "an empty lane writes back what slot 0 held before the step",
        _lanes_written_in_order,
        (SHAPES,),
    ),
    Mutant(
        "log a tile short",
        "the log has no room for a seal that waits",
        _log_a_tile_short,
        (f"{STATE}::test_log_holds_the_block_that_runs_and_a_window_past_its_end",),
    ),
    Mutant(
        "seal a row early",
        "a seal leaves out the last row of its block",
        _seal_a_row_early,
        (TWIN,),
    ),
    Mutant(
        "seal in another order",
        "programs for few rows add the tiles of a block in descending order",
        _seal_in_another_order,
        (SCHEDULES,),
    ),
    Mutant(
        "fold reads before the write",
        "a fold reads its block before the pseudo-values of the last tile are written",
        _fold_before_the_pending_write,
        (TWIN,),
    ),
    Mutant(
        "fold of the other block",
        "a fold reads the half of the log that the new block is written to",
        _fold_of_the_other_block,
        (TWIN,),
    ),
    Mutant(
        "seal at a schedule's row",
        "the state moves on to the tile where a call starts",
        _seal_where_the_call_starts,
        (WAITS,),
    ),
    Mutant(
        "seal of rejected rows",
        "a boundary beyond the certain rows is stored",
        _seal_of_rejected_rows,
        (SMALL_BLOCKS,),
    ),
    Mutant(
        "stale sealed slot, device",
        "a seal is written over the old one, and the new slot is read",
        _seal_in_place,
        (SHARED,),
    ),
)
