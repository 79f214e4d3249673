"""Deliberate bugs in attention, full and sparse."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels.attention import online, tiled
from pallas_kernels.qsa import tiled as qsa_tiled
from pallas_kernels.rows import DECODE
from qwen_hybrid import attention
from tests.mutants.mutant import Mutant, Patch
from tests.mutants.swap import Shim, swap, where_by_zero

ATTENTION = "tests/pallas_kernels/attention/test_tiled.py"
# Both programs, for few rows and for many.
SCHEDULES = (
    f"{ATTENTION}::test_random_schedules_give_the_bits_of_one_piece_and_the_values_of_the_oracle"
    "[4-64-float32]"
)
REJECTED = f"{ATTENTION}::test_rejected_rows_full_of_nan_change_nothing"
QSA = "tests/pallas_kernels/qsa/test_tiled.py"
SHAPES = (
    "tests/qwen_hybrid/test_shapes.py"
    "::test_programs_for_few_and_for_many_rows_give_the_same_bits[q35_moe-bfloat16]"
)


def _zero_times_values(patch: Patch) -> None:
    patch.setattr(tiled, "jnp", Shim(jnp, where=where_by_zero))


def _bad_rows_of_the_tile_stay(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(packed, value_pages, rows, segs, shape):
            tile = original(packed, value_pages, rows, segs, shape)
            fine = jnp.ones_like(tile.value_is_finite)
            return dataclasses.replace(tile, value_is_finite=fine)

        return changed

    swap(patch, tiled, "_queries", make)


def _maximum_over_the_tile(patch: Patch) -> None:
    def make(original: Any) -> Any:
        del original

        def changed(scores, mask, weigh_values):
            peak = jnp.max(jnp.where(mask, scores, -jnp.inf))
            base = jnp.where(peak == -jnp.inf, 0.0, peak)
            weight = jnp.where(mask, jnp.exp(jnp.where(mask, scores - base, 0.0)), 0.0)
            peaks = jnp.full(scores.shape[:-1], peak)
            return online.Partial(peaks, jnp.sum(weight, axis=-1), weigh_values(weight))

        return changed

    swap(patch, online, "span_partial", make)


def _shorter_spans_for_few_rows(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(query, key_pages, value_pages, rows, *, scale):
            with pytest.MonkeyPatch.context() as inner:
                if rows.shape == DECODE:
                    inner.setattr(tiled, "SPAN", tiled.SPAN // 2)
                return original(query, key_pages, value_pages, rows, scale=scale)

        return changed

    swap(patch, tiled, "paged_attention", make)


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


ATTENTION_MUTANTS = (
    Mutant(
        "NaN-unsafe mask, attention",
        "values that a row may not see are multiplied by zero",
        _zero_times_values,
        (ATTENTION,),
    ),
    Mutant(
        "NaN of a later row, attention",
        "earlier rows of a tile weigh the values of its later ones by zero",
        _bad_rows_of_the_tile_stay,
        (REJECTED,),
    ),
    Mutant(
        "neighbour leak",
        "softmax subtracts the maximum of the tile",
        _maximum_over_the_tile,
        (SCHEDULES,),
    ),
    Mutant(
        "spans by program",
        "programs for few rows merge spans of half the length",
        _shorter_spans_for_few_rows,
        (SCHEDULES,),
    ),
    Mutant(
        "positions from the tile",
        "rotary positions count from the first row of the tile",
        _positions_from_the_tile,
        (SHAPES,),
    ),
    Mutant(
        "ties to the higher group",
        "the indexer keeps the higher of two equal groups",
        _ties_to_the_higher_group,
        (f"{QSA}::test_negative_zero_ties_with_zero",),
    ),
)
