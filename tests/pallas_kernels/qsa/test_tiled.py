"""Group pooling, selection and sparse attention over pages: float64 oracles, and bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bits import storage_dtype, to_bits
from pallas_kernels.qsa import pool_raw_keys, reference, select_tokens, sparse_attention
from pallas_kernels.qsa.tiled import _pack
from pallas_kernels.rows import map_row_tiles, write_pages, write_ring
from qwen_hybrid.state import StateConfig
from qwen_hybrid.step import COMPILER_OPTIONS
from tests.oracles import attention as attention_oracle
from tests.oracles import qsa as oracle
from tests.pallas_kernels.paged import (
    LARGE,
    SMALL,
    Feeder,
    Operator,
    Piece,
    check_schedules,
    cut,
    joined,
    page_rows,
    ring_rows,
    same_bits,
    unused,
)
from tests.tolerances import ATTENTION, FLOAT32_SUM

RATIO, BLOCK = 4, 64
HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.35
INDEX_HEADS, INDEX_DIM = 2, 16


def _write_pooled(pages: jax.Array, pooled: jax.Array, rows) -> jax.Array:
    """Store the key of each group that a new row completes."""
    ends = rows.live & ((rows.position + 1) % RATIO == 0)
    block = rows.block_table[rows.slot, rows.position // BLOCK]
    block = jnp.where(ends, block, pages.shape[0])
    group = rows.position % BLOCK // RATIO
    return pages.at[block, group].set(to_bits(pooled, pages.dtype), mode="drop")


def _step(inputs, state, rows, *, budget: int):
    raw = inputs["index_key"]

    def pool(row):
        return pool_raw_keys(raw, state["raw"], rows, row, ratio=RATIO)

    pooled = map_row_tiles(pool, rows, jnp.arange(raw.shape[0], dtype=jnp.int32))
    state = state | {
        "key": write_pages(state["key"], inputs["key"], rows, row_axis=3),
        "value": write_pages(state["value"], inputs["value"], rows, row_axis=2),
        "pooled": _write_pooled(state["pooled"], pooled, rows),
    }
    chosen = select_tokens(inputs["index_query"], state["pooled"], rows, ratio=RATIO, budget=budget)
    out = sparse_attention(inputs["query"], state["key"], state["value"], chosen, rows, scale=SCALE)
    seen = jnp.arange(chosen.position.shape[1])[None, :] < chosen.count[:, None]
    chosen = jnp.where(seen, chosen.position, -1)
    return {"out": out, "chosen": chosen}, state | {"raw": write_ring(state["raw"], raw, rows)}


def _draw(rng: np.random.Generator, length: int, dtype: str) -> dict[str, np.ndarray]:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((length, *shape)).astype(jnp.dtype(dtype))

    def integers(*shape: int) -> np.ndarray:
        return rng.integers(-2, 3, (length, *shape)).astype(jnp.dtype(dtype))

    # Small integers: scores are exact in float32 and many of them equal.
    return {
        "query": normal(HEADS, HEAD_DIM),
        "key": normal(KV_HEADS, HEAD_DIM),
        "value": normal(KV_HEADS, HEAD_DIM),
        "index_query": integers(INDEX_HEADS, INDEX_DIM),
        "index_key": np.asarray(4 * integers(INDEX_DIM), jnp.dtype(dtype)),
    }


def _observe(state, feeder: Feeder, slot: int) -> dict[str, np.ndarray]:
    memory = {
        name: page_rows(jnp.moveaxis(state[name], axis, 1), feeder, slot, BLOCK)
        for name, axis in (("key", 3), ("value", 2))
    }
    memory["pooled"] = page_rows(state["pooled"], feeder, slot, BLOCK // RATIO)
    pending = int(feeder.committed[slot]) % RATIO
    return memory | {"raw": ring_rows(state["raw"], feeder, slot, pending)}


@functools.cache
def _operator(budget: int, dtype: str) -> Operator:
    """Sparse attention with one budget; its programs are compiled once."""
    config = StateConfig(
        num_slots=4, num_blocks=17, num_state_slots=12, blocks_per_slot=4, max_window=17
    )
    act = storage_dtype(dtype)

    def init() -> dict[str, jax.Array]:
        blocks = (config.num_blocks, KV_HEADS)
        return {
            "key": unused((*blocks, HEAD_DIM, BLOCK), act),
            "value": unused((*blocks, BLOCK, HEAD_DIM), act),
            "pooled": unused((config.num_blocks, BLOCK // RATIO, INDEX_DIM), act),
            "raw": unused((config.num_slots, config.ring_rows(RATIO - 1), INDEX_DIM), act),
        }

    return Operator(
        step=functools.partial(_step, budget=budget),
        init=init,
        observe=_observe,
        draw=functools.partial(_draw, dtype=dtype),
        config=config,
        programs=(SMALL, LARGE) if budget == 8 else (LARGE,),
    )


def _chosen(inputs: dict[str, np.ndarray], budget: int) -> list[set[int]]:
    """Tokens that each row reads."""
    scores = oracle.score(inputs["index_query"], oracle.pool(inputs["index_key"], RATIO))
    return [
        oracle.tokens(oracle.choose(scores[t], t, RATIO, budget // RATIO), t, RATIO)
        for t in range(len(scores))
    ]


# A budget of two groups, of five, and one that keeps every group.
@pytest.mark.parametrize(("budget", "dtype"), [(8, "float32"), (20, "bfloat16"), (256, "float32")])
def test_random_schedules_give_the_bits_of_one_piece_and_the_choices_of_the_oracle(budget, dtype):
    op = _operator(budget, dtype)
    for inputs, out, memory in check_schedules(op, seeds=range(12)):
        expected = _chosen(inputs, budget)
        mask = np.zeros((len(expected), len(expected)), bool)
        for t, tokens in enumerate(expected):
            row = out["chosen"][t]
            # Ascending, nothing twice, then nothing.
            assert row[row >= 0].tolist() == sorted(tokens)
            assert (row[len(tokens) :] == -1).all()
            mask[t, sorted(tokens)] = True
        arrays = (inputs[name] for name in ("query", "key", "value"))
        exact = attention_oracle.attend(*arrays, mask, SCALE)
        np.testing.assert_allclose(out["out"], exact, rtol=0, atol=ATTENTION)
        pooled = oracle.pool(inputs["index_key"], RATIO)
        np.testing.assert_allclose(
            np.asarray(memory["pooled"], np.float64), pooled, rtol=0, atol=FLOAT32_SUM
        )
        same_bits(memory["key"], inputs["key"])


def test_choices_equal_those_of_the_twin():
    op = _operator(8, "float32")
    inputs = op.draw(np.random.default_rng(4), 130)
    out, _ = Feeder(op).whole_sequence(0, inputs)
    position = jnp.arange(130)
    pooled = reference.pooled_raw(jnp.asarray(inputs["index_key"]), RATIO)
    scores = reference.group_scores(jnp.asarray(inputs["index_query"]), pooled)
    groups = reference.selected_groups(scores, position, ratio=RATIO, budget_groups=2)
    mask = np.asarray(reference.token_mask(groups, position, 130, RATIO))
    for t, row in enumerate(out["chosen"]):
        assert row[row >= 0].tolist() == np.flatnonzero(mask[t]).tolist()


def test_negative_zero_ties_with_zero():
    # The bits of a product decide which zero it is; lax.top_k would rank one above the other.
    scores = np.zeros((16, 8), np.float32)
    scores[:, ::2] = -0.0
    pack = jax.jit(
        functools.partial(_pack, ratio=RATIO, budget=8), compiler_options=COMPILER_OPTIONS
    )
    chosen = pack(jnp.asarray(scores), jnp.full(16, 31, jnp.int32))
    assert (np.asarray(chosen.position[:, :8]) == np.arange(8)).all()


def test_own_group_may_lose():
    op = _operator(8, "float32")
    inputs = op.draw(np.random.default_rng(6), 12)
    inputs["index_query"][:], inputs["index_key"][:] = 1.0, 1.0
    inputs["index_key"][8:] = -1.0
    out, _ = Feeder(op).whole_sequence(0, inputs)
    row = out["chosen"][11]
    assert row[row >= 0].tolist() == list(range(8))


def test_neighbour_and_rejected_rows_full_of_nan_change_nothing():
    op = _operator(8, "float32")
    inputs = op.draw(np.random.default_rng(7), 75)
    expected, memory = Feeder(op).whole_sequence(0, inputs)
    bad = jax.tree.map(lambda a: np.full_like(a, np.nan), cut(inputs, 0, 9))
    feeder, outs = Feeder(op, seed=1), []
    for stop in (1, 2, 9, 10, 30, 60, 64, 75):
        piece = cut(inputs, int(feeder.committed[1]), stop)
        count = len(piece["query"])
        pieces = {0: Piece(bad, commit=0), 1: Piece(joined(piece, bad), commit=count)}
        outs.append(feeder.call(pieces)[1])
    same_bits(joined(*outs), expected)
    same_bits(feeder.finish(1), memory)
