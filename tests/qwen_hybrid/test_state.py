"""Sizes of the decode state: published numbers of real models, formulas, budgets, no allocation."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_net import StateDtype
from pallas_kernels.rows import write_ring
from pallas_kernels.struct import build
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.memory import memory_report
from qwen_hybrid.state import (
    EMPTY_STATE_SLOT,
    Call,
    ModelState,
    Sequences,
    StateConfig,
    apply_seals,
    commit,
    init_state,
    inventory,
    plan,
    state_spec,
)
from serve.engine_config import EngineConfig, longest_text, resolve
from tests.vector_configs import REAL_TEXT, TINY, hf_config

ONE = StateConfig(num_slots=1, num_blocks=1, num_state_slots=2, blocks_per_slot=1)


def config_of(name: str) -> HybridConfig:
    """A config from tests/vectors."""
    return HybridConfig.from_hf(hf_config(name))


def sizes(config: HybridConfig, sc: StateConfig) -> dict[str, int]:
    """Bytes by kind, "mtp" before what belongs to the MTP layer, which is held if it exists."""
    out: dict[str, int] = {}
    sc = dataclasses.replace(sc, with_mtp=config.num_mtp_layers > 0)
    for entry in inventory(state_spec(config, sc)):
        kind = "mtp " + entry.kind if ".mtp" in entry.path else entry.kind
        out[kind] = out.get(kind, 0) + entry.num_bytes
    return out


@dataclasses.dataclass(frozen=True)
class Published:
    """Bytes as published: keys and values of a token, sealed state, convolution columns.

    Source: parameter shapes of the published configs; the 27B and 35B sizes are also stated by
    other engines for these models.
    """

    kv: int
    state: int
    conv: int
    mtp_kv: int


MIB = 1 << 20
PUBLISHED = {
    "Qwen3.5-0.8B": Published(12_288, 18 * MIB, 663_552, 2_048),
    "Qwen3.5-2B": Published(12_288, 18 * MIB, 663_552, 2_048),
    "Qwen3.5-4B": Published(32_768, 48 * MIB, 1_179_648, 4_096),
    "Qwen3.5-9B": Published(32_768, 48 * MIB, 1_179_648, 4_096),
    "Qwen3.5-27B": Published(65_536, 144 * MIB, 2_949_120, 4_096),
    "Qwen3.8-27B": Published(65_536, 144 * MIB, 2_949_120, 4_096),
    "Qwen3.5-35B-A3B": Published(20_480, 60 * MIB, 1_474_560, 2_048),
    "Qwen3.6-35B-A3B": Published(20_480, 60 * MIB, 1_474_560, 2_048),
    "Qwen3.8-Flash-Next": Published(24_576, 108 * MIB, 2_211_840, 2_048),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_of_real_models(name):
    config, published = config_of(name), PUBLISHED[name]
    found = sizes(config, ONE)
    assert found["kv"] == published.kv * 64
    # Two state slots: the empty one and one of the sequence's.
    assert found["recurrent_state"] == 2 * published.state
    # The window of a convolution is 3 rows, that of an n-gram embedding 9; a ring without verify
    # rows has one more.
    assert found["conv_state"] == published.conv // 3 * 4
    assert found.get("ple_conv_state", 0) == (10 * 20_480 if config.ple else 0)
    assert found["mtp kv"] == published.mtp_kv * 64


def test_bytes_of_index_keys_and_ids():
    found = sizes(config_of("Qwen3.8-Flash-Next"), ONE)
    # 768 bytes a token, and a ring of as many raw keys as a group has tokens.
    assert (found["index_keys"], found["raw_index_keys"]) == (768 * 64, 12_288)
    assert (found["mtp index_keys"], found["mtp raw_index_keys"]) == (64 * 64, 1_024)
    assert found["ids"] == 3 * 4


def test_bytes_of_the_log():
    """The 27B's log is 98 MiB a sequence at two blocks, against 144 MiB of state."""
    found = sizes(config_of("Qwen3.8-27B"), ONE)
    assert found["log"] == 48 * 128 * (16 * 128 * 2 + 16 * 4 + 48 * 128 * 2 + 48 * 4)
    assert round(found["log"] / MIB) == 98


def test_bytes_by_type():
    config = config_of("Qwen3.8-27B")
    for state_dtype, factor in (
        (StateDtype.FLOAT32, 1.0),
        (StateDtype.BFLOAT16, 0.5),
        (StateDtype.BFLOAT16_PAIR, 1.0),
    ):
        found = sizes(config, dataclasses.replace(ONE, state_dtype=state_dtype))
        assert found["recurrent_state"] == 2 * 144 * MIB * factor
    wide = sizes(config, dataclasses.replace(ONE, dtype="float32"))
    narrow = sizes(config, ONE)
    for kind in ("kv", "conv_state"):
        assert wide[kind] == 2 * narrow[kind]
    assert wide["recurrent_state"] == narrow["recurrent_state"]


@pytest.mark.parametrize("name", [*TINY, *REAL_TEXT])
def test_every_array_is_declared_and_counted(name):
    config = config_of(name)
    sc = StateConfig(num_slots=3, num_blocks=5, num_state_slots=6, blocks_per_slot=4)
    spec = state_spec(config, sc)
    entries = inventory(spec)
    leaves = jax.tree.leaves(spec)
    assert len(entries) == len(leaves)
    assert sum(e.num_bytes for e in entries) == sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves
    )
    counts = {"slot": 3, "block": 5, "state_slot": 6}
    for entry, leaf in zip(entries, leaves, strict=True):
        assert leaf.shape[0] == counts[entry.per], entry.path
    kinds = {entry.kind for entry in entries}
    assert ("index_keys" in kinds) == ("ids" in kinds or config.qsa is not None)
    assert kinds >= {"sequences", "kv"}


@pytest.mark.parametrize("name", ["q35_dense_mtp", "q4_qsa", "Qwen3.8-Flash-Next"])
def test_the_mtp_layer_is_counted_only_if_used(name):
    config, used = config_of(name), dataclasses.replace(ONE, with_mtp=True)
    entries = inventory(state_spec(config, ONE))
    assert not [entry for entry in entries if ".mtp" in entry.path]
    if config.num_mtp_layers == 0:
        with pytest.raises(ValueError, match="with_mtp needs a model with an MTP layer"):
            state_spec(config, used)
        return
    more = [e for e in inventory(state_spec(config, used)) if ".mtp" in e.path]
    assert {e.kind for e in more} >= {"kv"}
    assert total(config, used) == total(config, ONE) + sum(e.num_bytes for e in more)


def test_an_undeclared_array_is_refused():
    spec = state_spec(config_of("q35_dense"), ONE)
    surplus = (*spec.layers, jax.ShapeDtypeStruct((2,), jnp.float32))
    odd = build(ModelState, sequences=spec.sequences, layers=surplus, mtp=None, ids=None)
    with pytest.raises(ValueError, match=r"layers\[4\] has no declared kind"):
        inventory(odd)


def test_a_spec_allocates_nothing():
    """A petabyte of state is fine as long as nobody asks for it."""
    huge = StateConfig(
        num_slots=1 << 16, num_blocks=1 << 24, num_state_slots=1 << 20, blocks_per_slot=4096
    )
    spec = state_spec(config_of("Qwen3.8-Flash-Next"), huge)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(spec))
    assert sum(e.num_bytes for e in inventory(spec)) > 1e14


@pytest.mark.parametrize("name", ["q4_all", "q35_dense_mtp"])
def test_an_empty_state_is_the_spec_filled_with_zeros(name):
    sc = StateConfig(
        num_slots=2,
        num_blocks=3,
        num_state_slots=3,
        blocks_per_slot=2,
        with_mtp=name.endswith("mtp"),
    )
    spec, state = state_spec(config_of(name), sc), init_state(config_of(name), sc)
    assert jax.tree.structure(spec) == jax.tree.structure(state)
    for want, got in zip(jax.tree.leaves(spec), jax.tree.leaves(state), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        assert not np.any(np.asarray(got))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [1, 2, 5, 17])
def test_log_holds_the_block_that_runs_and_a_window_past_its_end(block_size, window):
    sc = dataclasses.replace(ONE, block_size=block_size, max_window=window)
    assert sc.log_rows == 2 * block_size
    # The window that begins with a block's last row still finds the block's first.
    assert sc.log_rows >= block_size - 1 + window


@pytest.mark.parametrize(("past", "window"), [(3, 1), (3, 4), (9, 8), (2, 17)])
def test_a_late_seal_finds_the_tails_of_every_ring(past, window):
    """The window that passes a boundary and the next one leave the rows before it alone."""
    sc = dataclasses.replace(ONE, max_window=window, blocks_per_slot=2)

    def write(ring, start, count):
        numbers = dict.fromkeys(("committed_len", "sealed_len", "sealed_slot"), start)
        table = jnp.zeros((1, 2), jnp.int32)
        sequences = Sequences(**numbers, next_slot=start * 0 - 1, block_table=table)
        call = Call(jnp.zeros(96, jnp.int32), count, count, jnp.zeros(1, bool))
        rows, _ = plan(call, sequences, sc)
        return write_ring(ring, rows.position, rows)

    ring, boundary = jnp.full((1, sc.ring_rows(past)), -1, jnp.int32), sc.block_size
    for start, count in (
        (0, boundary - 1),
        (boundary - 1, window),
        (boundary + window - 1, window),
    ):
        ring = jax.jit(write)(ring, jnp.asarray([start]), jnp.asarray([count]))
    kept = set(np.asarray(ring)[0].tolist())
    assert kept.issuperset(range(boundary - past, boundary))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 24}, "block_size must be a multiple of 16, got 24"),
        ({"max_window": 0}, r"max_window must be in \[1, 17\], got 0"),
        ({"max_window": 18}, r"max_window must be in \[1, 17\], got 18"),
        ({"num_state_slots": 1}, "num_state_slots must be at least 2, got 1"),
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"blocks_per_slot": 0}, "blocks_per_slot must be at least 1, got 0"),
    ],
)
def test_bad_capacities(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ONE, **changes)


def test_a_block_holds_whole_groups():
    config = config_of("Qwen3.8-Flash-Next")
    qsa = dataclasses.replace(config.qsa, ratio=24, budget=24 * 16)
    with pytest.raises(ValueError, match="multiple of indexer_compress_ratio 24, got 64"):
        state_spec(dataclasses.replace(config, qsa=qsa), ONE)


# The budget.


def total(config: HybridConfig, sc: StateConfig) -> int:
    """Bytes of a state, and of what the sampler remembers."""
    return memory_report(config, sc).num_state_bytes


@pytest.mark.parametrize(("name", "slots"), [("Qwen3.8-27B", 8), ("q4_all", 64), ("q35_dense", 1)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999, 1.0, 5.0])
def test_pools_fill_the_budget_and_never_exceed_it(name, slots, share):
    config = config_of(name)
    engine = EngineConfig(max_running_requests=slots, context_length=1000)
    full = resolve(engine, config, "bfloat16")
    full = dataclasses.replace(full, num_blocks=full.blocks_per_slot * slots)
    least = dataclasses.replace(full, num_blocks=full.blocks_per_slot)
    low, high = total(config, least), total(config, full)
    budget = int(low + share * (high - low))
    engine = dataclasses.replace(engine, memory_bytes=budget)
    found = resolve(engine, config, "bfloat16")
    assert total(config, found) <= budget
    assert full.blocks_per_slot <= found.num_blocks <= full.num_blocks
    if found.num_blocks < full.num_blocks:
        more = dataclasses.replace(found, num_blocks=found.num_blocks + 1)
        assert total(config, more) > budget
    # Every sequence has a state slot, and at least one spare lets a seal be stored.
    assert found.num_state_slots >= 1 + slots + max(1, slots // 8)


def test_a_budget_for_less_than_one_sequence_is_refused():
    config = config_of("Qwen3.8-27B")
    engine = EngineConfig(max_running_requests=2, context_length=1000)
    enough = total(config, dataclasses.replace(resolve(engine, config, "bfloat16"), num_blocks=16))
    resolve(dataclasses.replace(engine, memory_bytes=enough), config, "bfloat16")
    with pytest.raises(ValueError, match=f"memory_bytes {enough - 1} is too small: 2 sequences"):
        resolve(dataclasses.replace(engine, memory_bytes=enough - 1), config, "bfloat16")


def test_the_context_is_the_models_or_what_was_asked_for():
    config = config_of("q35_dense")
    assert longest_text(EngineConfig(), config) == 4096
    assert longest_text(EngineConfig(context_length=100), config) == 100
    short = dataclasses.replace(config, max_position_embeddings=70)
    assert longest_text(EngineConfig(), short) == 70
    with pytest.raises(ValueError, match="at most the model's 70 positions, got 71"):
        longest_text(EngineConfig(context_length=71), short)


# Commit and seals.


def test_commit_moves_the_length_and_nothing_else():
    sc = StateConfig(num_slots=3, num_blocks=3, num_state_slots=3, blocks_per_slot=2)
    state = init_state(config_of("q35_dense"), sc)
    after = commit(commit(state, jnp.asarray([4, 0, 1])), jnp.asarray([1, 0, 1]))
    assert after.sequences.committed_len.tolist() == [5, 0, 2]
    for before, now in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert now is before or now is after.sequences.committed_len


def test_seals_are_taken_over_where_one_was_stored():
    sc = StateConfig(num_slots=3, num_blocks=9, num_state_slots=6, blocks_per_slot=3)
    state = init_state(config_of("q35_dense"), sc)
    sequences = dataclasses.replace(
        state.sequences,
        committed_len=jnp.asarray([60, 64, 64]),
        next_slot=jnp.asarray([3, 4, -1]),
    )
    count = jnp.asarray([4, 1, 1])
    call = Call(jnp.zeros(16, jnp.int32), count, count, jnp.zeros(3, bool))
    _, seals = jax.jit(functools.partial(plan, sc=sc))(call, sequences)
    after = apply_seals(sequences, seals)
    # Row 63 completes a block, and only a row beyond needs its state; without a slot it waits.
    assert after.sealed_len.tolist() == [0, 64, 0]
    assert after.sealed_slot.tolist() == [EMPTY_STATE_SLOT, 4, EMPTY_STATE_SLOT]
    assert after.next_slot.tolist() == [3, -1, -1]
