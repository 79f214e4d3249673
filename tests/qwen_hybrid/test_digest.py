"""A digest covers every committed byte and nothing else.

A sequence's content is made by absolute position, then laid out in a state of NaN the way the
state's docstrings say; the digest is asked what it sees.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_hybrid import digest
from qwen_hybrid.config import HybridConfig, LayerKind
from qwen_hybrid.state import (
    AttentionState,
    GdnState,
    ModelState,
    QsaState,
    StateConfig,
    init_state,
)
from tests.tiny_models import two_layers

BLOCK = 64
MAX_LEN = 256
DEPTHS = (1, 2, 63, 64, 65, 130, 191)
CONFIGS = {"q4_all": "bfloat16", "q35_dense_mtp": "float32"}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a sequence lies.

    Attributes:
      slot: batch slot.
      blocks: physical block of each logical one.
      sealed_slot: state slot.
      garbage: what everything else holds.
    """

    slot: int
    blocks: tuple[int, ...]
    sealed_slot: int
    garbage: float


HERE = Placement(0, (0, 1, 2, 3), 1, np.nan)
THERE = Placement(2, (6, 1, 7, 3), 4, -3.0)


def capacities(config: HybridConfig, dtype: str) -> StateConfig:
    """Room for more than one sequence, and for the MTP layer if there is one."""
    return StateConfig(
        num_slots=3,
        num_blocks=8,
        num_state_slots=5,
        blocks_per_slot=4,
        dtype=dtype,
        with_mtp=config.num_mtp_layers > 0,
    )


def empty(config: HybridConfig, sc: StateConfig, garbage: float) -> ModelState:
    """A state that holds one value everywhere; NumPy arrays, to be written."""

    def fill(array: Any) -> Any:
        value = garbage if jnp.issubdtype(array.dtype, jnp.floating) else 99
        return np.full(array.shape, value, array.dtype)

    return jax.tree.map(fill, init_state(config, sc))


class Sequence:
    """Content of a sequence by absolute position, and how to lay it out.

    Attributes:
      parts: arrays by the names that digests use, each with what it covers at a depth.
    """

    def __init__(self, config: HybridConfig, sc: StateConfig, seed: int = 0):
        self.config, self.sc = config, sc
        rng = np.random.default_rng(seed)
        state = empty(config, sc, 0.0)
        self.rows: dict[str, np.ndarray] = {}
        for name, array, per in _parts(state, config):
            length = {"row": MAX_LEN, "group": MAX_LEN // _ratio(config), "state": 1}[per]
            tail = array.shape[1:] if per == "state" else array.shape[2:]
            if array.dtype in (np.int32, np.uint16):
                values = rng.integers(0, 300, (length, *tail))
            else:
                values = rng.standard_normal((length, *tail))
            self.rows[name] = values.astype(array.dtype)

    def lay_out(self, depth: int, at: Placement) -> ModelState:
        """The state of the sequence at a depth: rows at or beyond it are garbage."""
        state = empty(self.config, self.sc, at.garbage)
        for name, array, per in _parts(state, self.config):
            rows = self.rows[name]
            if per == "state":
                array[at.sealed_slot] = rows[0]
            elif "pooled" in name or name.endswith((".key", ".value")):
                size = array.shape[1]
                for i in range(depth // _ratio(self.config) if "pooled" in name else depth):
                    array[at.blocks[i // size], i % size] = rows[i]
            else:
                ring = array.shape[1]
                for i in range(max(0, depth - ring), depth):
                    array[at.slot, i % ring] = rows[i]
        sequences = state.sequences
        sequences.committed_len[at.slot] = depth
        sequences.sealed_len[at.slot] = depth // BLOCK * BLOCK
        sequences.sealed_slot[at.slot] = at.sealed_slot
        sequences.block_table[at.slot] = at.blocks
        return state

    def digests(self, depth: int, at: Placement = HERE) -> dict[str, str]:
        """What the digest says of it."""
        return digests_of(self.lay_out(depth, at), depth, at.slot, self.config, self.sc)


def digests_of(
    state: ModelState, depth: int, slot: int, config: HybridConfig, sc: StateConfig
) -> dict[str, str]:
    """Digests of the sequence in a slot of a state of NumPy arrays."""
    part = digest.extract(jax.tree.map(jnp.asarray, state), jnp.asarray(slot))
    return digest.digests(digest.canonical(jax.device_get(part), depth, config, sc))


def _ratio(config: HybridConfig) -> int:
    return config.qsa.ratio if config.qsa else 1


def _parts(state: ModelState, config: HybridConfig) -> list[tuple[str, Any, str]]:
    """(name, array, what its rows are) of everything a digest covers; rows on the second axis."""
    parts: list[tuple[str, Any, str]] = []

    def attention(prefix: str, kv: AttentionState) -> None:
        parts.append((f"{prefix}.key", np.moveaxis(kv.key_pages, 3, 1), "row"))
        parts.append((f"{prefix}.value", np.moveaxis(kv.value_pages, 2, 1), "row"))

    for index, layer in enumerate(state.layers):
        prefix, mixer = f"layers.{index}", layer.mixer
        if isinstance(mixer, GdnState):
            parts.append((f"{prefix}.conv_state", mixer.conv, "row"))
            parts.append((f"{prefix}.recurrent_state", mixer.log.sealed, "state"))
            for name, axis in (("key", 3), ("key_scale", 2), ("value", 2), ("gate", 2)):
                by_row = np.moveaxis(getattr(mixer.log, name), axis, 1)
                parts.append((f"{prefix}.log_{name}", by_row, "row"))
        elif isinstance(mixer, QsaState):
            attention(prefix, mixer.attention)
            parts.append((f"{prefix}.pooled_index_keys", mixer.pooled, "group"))
            parts.append((f"{prefix}.pending_index_keys", mixer.raw, "row"))
        else:
            attention(prefix, mixer)
        if layer.ple is not None:
            parts.append((f"{prefix}.ple_conv_state", layer.ple, "row"))
    if state.ids is not None:
        parts.append(("ids", state.ids, "row"))
    return parts


def covered(name: str, depth: int, config: HybridConfig) -> range:
    """Rows of a part that the next row may read, as docs/design.md lists them."""
    kind = name.rpartition(".")[2]
    if kind in ("key", "value"):
        return range(depth)
    if kind == "recurrent_state":
        return range(1)
    if kind.startswith("log_"):
        return range(depth // BLOCK * BLOCK, depth)
    if kind == "pooled_index_keys":
        return range(depth // _ratio(config))
    back = {
        "conv_state": config.gdn.conv_width - 1,
        "pending_index_keys": depth % _ratio(config),
        "ple_conv_state": config.ple.conv_window if config.ple else 0,
        "ids": config.ple.ngram_size - 1 if config.ple else 0,
    }[kind]
    return range(max(0, depth - back), depth)


@pytest.fixture(params=CONFIGS)
def sequence(request) -> Sequence:
    """A sequence of a model with every mechanism, or of a dense one with an MTP layer."""
    config = HybridConfig.from_hf(two_layers(request.param))
    return Sequence(config, capacities(config, CONFIGS[request.param]))


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Names whose digests differ."""
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def test_every_layer_and_kind_has_a_digest(sequence):
    names = set(sequence.digests(130))
    assert names == set(sequence.rows)
    kinds = sequence.config.layer_kinds
    assert LayerKind.GDN in kinds and len(set(kinds)) == 2
    assert not any("mtp" in name for name in names)


@pytest.mark.parametrize("depth", DEPTHS)
def test_places_and_what_is_not_committed_do_not_count(sequence, depth):
    assert sequence.digests(depth, HERE) == sequence.digests(depth, THERE)


@pytest.mark.parametrize("depth", (63, 64, 130))
def test_a_changed_byte_changes_its_own_digest_and_no_other(sequence, depth):
    before = sequence.digests(depth)
    for name, rows in sequence.rows.items():
        inside = covered(name, depth, sequence.config)
        for row in {inside[0], inside[-1]} if inside else set():
            flat = rows[row : row + 1].reshape(-1).view(np.uint8)
            flat[-1] ^= 1
            assert differing(before, sequence.digests(depth)) == {name}, f"{name} {row}"
            flat[-1] ^= 1
    assert sequence.digests(depth) == before


@pytest.mark.parametrize("depth", (63, 64, 130))
def test_rows_that_nobody_reads_again_do_not_count(sequence, depth):
    """Ring and log rows before the tail are dead, though still in memory."""
    before = sequence.digests(depth)
    for name, rows in sequence.rows.items():
        inside = covered(name, depth, sequence.config)
        outside = [i for i in range(len(rows)) if i not in inside]
        rows[outside] += 1
    assert sequence.digests(depth) == before


def test_the_depth_counts_even_where_all_bytes_are_zero(sequence):
    for rows in sequence.rows.values():
        rows[:] = 0
    seen = [digest.combined(sequence.digests(depth)) for depth in range(1, 40)]
    assert len(set(seen)) == len(seen)


def test_the_state_of_the_mtp_layer_is_not_target_state(sequence):
    state = sequence.lay_out(70, HERE)
    if state.mtp is None:
        pytest.skip("no MTP layer")
    before = digests_of(state, 70, 0, sequence.config, sequence.sc)
    state.mtp.mixer.key_pages[:] = 1
    assert digests_of(state, 70, 0, sequence.config, sequence.sc) == before


def test_names_types_and_shapes_count():
    array = np.arange(6, dtype=np.float32)
    seen = [
        digest.digests({name: value})[name]
        for name, value in (
            ("a", array),
            ("b", array),
            ("a", array.reshape(2, 3)),
            ("a", array.view(np.int32)),
        )
    ]
    assert len(set(seen)) == 4
    strided = np.stack([array, array], axis=1)[:, 0]
    assert digest.digests({"a": strided}) == digest.digests({"a": array})


def test_the_combined_digest_depends_on_every_part_and_not_on_their_order():
    parts = {"a": "1", "b": "2", "c": "3"}
    whole = digest.combined(parts)
    assert digest.combined(dict(reversed(parts.items()))) == whole
    for name in parts:
        assert digest.combined(parts | {name: "4"}) != whole
        assert digest.combined({k: v for k, v in parts.items() if k != name}) != whole


@pytest.mark.parametrize(
    ("depth", "message"),
    [(131, "130 rows"), (64, "needs the seal at 64"), (127, "needs the seal at 64")],
)
def test_a_depth_that_is_not_there_is_refused(sequence, depth, message):
    state = sequence.lay_out(130, HERE)
    with pytest.raises(ValueError, match=message):
        digests_of(state, depth, 0, sequence.config, sequence.sc)


def test_a_shorter_depth_in_the_same_block_may_be_asked_for(sequence):
    """The last rows may belong to drafts that were rejected."""
    state = sequence.lay_out(130, HERE)
    found = digests_of(state, 129, 0, sequence.config, sequence.sc)
    kept = {n for n in found if not n.endswith(("conv_state", "index_keys", "ids"))}
    assert {n: found[n] for n in kept} == {n: sequence.digests(129)[n] for n in kept}
