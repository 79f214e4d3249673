"""Decode state: what is carried from call to call, declared once.

Every entry is addressed so that nothing is overwritten while it may still be read: keys and values
by block, the log and the rings by absolute position, sealed states by slots written once. Rejecting
rows is not counting them.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.bits import storage_dtype
from pallas_kernels.gated_delta_net import GdnLog, StateDtype
from pallas_kernels.rows import TILE_ROWS, Rows, Seals, plan_rows
from pallas_kernels.struct import build, struct
from qwen_hybrid.config import HybridConfig, LayerKind

EMPTY_STATE_SLOT = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateConfig:
    """Capacities of a state.

    Attributes:
      num_slots: sequences that run side by side.
      num_blocks: blocks of keys and values.
      num_state_slots: sealed states; slot 0 is the empty sequence's and never written.
      blocks_per_slot: blocks one sequence can have.
      block_size: tokens of a block.
      max_window: rows of the widest verify window.
      dtype: activation dtype; keys, values, rings and log share it.
      state_dtype: storage of sealed states.
      with_mtp: hold the state of the MTP layer too; only who drafts with it has a use for it.
    """

    num_slots: int
    num_blocks: int
    num_state_slots: int
    blocks_per_slot: int
    block_size: int = 64
    max_window: int = 1
    dtype: str = "bfloat16"
    state_dtype: StateDtype = StateDtype.FLOAT32
    with_mtp: bool = False

    def __post_init__(self) -> None:
        if self.block_size % TILE_ROWS:
            raise ValueError(f"block_size must be a multiple of {TILE_ROWS}, got {self.block_size}")
        if not 1 <= self.max_window <= TILE_ROWS + 1:
            raise ValueError(f"max_window must be in [1, 17], got {self.max_window}")
        if self.num_state_slots < 2:
            raise ValueError(f"num_state_slots must be at least 2, got {self.num_state_slots}")
        for name in ("num_slots", "num_blocks", "blocks_per_slot"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def log_rows(self) -> int:
        """Rows of a log: the block that runs and the one before it, each in one piece.

        A due seal may wait while the rows since the last one, and two windows, fit.
        """
        return 2 * self.block_size

    def ring_rows(self, window: int) -> int:
        """Rows of a ring whose reader looks `window` rows back."""
        return window + 2 * self.max_window - 1


@struct
class GdnState:
    """Gated DeltaNet layer.

    Attributes:
      conv: ring of convolution inputs.
      log: rows since the last seal, and the pool of sealed states.
    """

    conv: Shaped[Array, "B N C"]
    log: GdnLog


@struct
class AttentionState:
    """Attention layer: keys after norm and rotation, values, by block and head."""

    key_pages: Shaped[Array, "P K H block"]
    value_pages: Shaped[Array, "P K block H"]


@struct
class QsaState:
    """Sparse attention layer.

    Attributes:
      attention: keys and values.
      pooled: index keys of complete groups, by block, normed and rotated.
      raw: ring of raw index keys.
    """

    attention: AttentionState
    pooled: Shaped[Array, "P groups D"]
    raw: Shaped[Array, "B N D"]


@struct
class LayerState:
    """State of one decoder layer; `ple` is the ring of its n-gram convolution, or None."""

    mixer: GdnState | AttentionState | QsaState
    ple: Shaped[Array, "B N ND"] | None


@struct
class Sequences:
    """Where each slot stands.

    Attributes:
      committed_len: tokens whose rows are final.
      sealed_len: block boundary of the state in `sealed_slot`.
      sealed_slot: state slot the log continues from.
      next_slot: state slot for the next seal, or -1 to let it wait: possible while all rows since
        `sealed_len` fit the log and none lies beyond the block after the unsealed one.
      block_table: physical block of each logical block.
    """

    committed_len: Int[Array, " B"]
    sealed_len: Int[Array, " B"]
    sealed_slot: Int[Array, " B"]
    next_slot: Int[Array, " B"]
    block_table: Int[Array, "B P"]


@struct
class ModelState:
    """All decode state of a model.

    Attributes:
      sequences: where each slot stands.
      layers: one entry a layer.
      mtp: state of the MTP layer, or None without `with_mtp`.
      ids: ring of token ids for the n-gram hash, or None.
    """

    sequences: Sequences
    layers: tuple[LayerState, ...]
    mtp: LayerState | None
    ids: Int[Array, "B N"] | None


def _mixer_spec(config: HybridConfig, sc: StateConfig, kind: LayerKind) -> Any:
    act = storage_dtype(sc.dtype)

    def array(*shape: int, dtype=act) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    if kind is LayerKind.GDN:
        gdn, slots, n = config.gdn, sc.num_slots, sc.log_rows
        state = (gdn.num_value_heads, gdn.key_dim, gdn.value_dim)
        planes = (sc.num_state_slots, sc.state_dtype.planes)
        log = build(
            GdnLog,
            key=array(slots, gdn.num_key_heads, gdn.key_dim, n),
            key_scale=array(slots, gdn.num_key_heads, n, dtype=jnp.float32),
            value=array(slots, gdn.num_value_heads, n, gdn.value_dim),
            gate=array(slots, gdn.num_value_heads, n, dtype=jnp.float32),
            sealed=array(*planes, *state, dtype=sc.state_dtype.dtype),
            state_dtype=sc.state_dtype,
        )
        window = sc.ring_rows(gdn.conv_width - 1)
        return build(GdnState, conv=array(sc.num_slots, window, gdn.conv_channels), log=log)
    attention = config.attention
    blocks, heads, size = sc.num_blocks, attention.num_kv_heads, sc.block_size
    kv = build(
        AttentionState,
        key_pages=array(blocks, heads, attention.head_dim, size),
        value_pages=array(blocks, heads, size, attention.head_dim),
    )
    if kind is LayerKind.ATTENTION:
        return kv
    qsa = config.qsa
    assert qsa is not None
    if sc.block_size % qsa.ratio:
        raise ValueError(
            f"block_size must be a multiple of indexer_compress_ratio {qsa.ratio}, "
            f"got {sc.block_size}"
        )
    return build(
        QsaState,
        attention=kv,
        pooled=array(sc.num_blocks, sc.block_size // qsa.ratio, qsa.head_dim),
        raw=array(sc.num_slots, sc.ring_rows(qsa.ratio - 1), qsa.head_dim),
    )


def state_spec(config: HybridConfig, sc: StateConfig) -> ModelState:
    """Shapes and types of a state, without allocating it.

    Raises:
      ValueError: a block cannot hold whole groups of the indexer, or there is no MTP layer to hold
        the state of.
    """
    ple, layers = config.ple, []
    ids: Any = None
    for index, kind in enumerate(config.layer_kinds):
        ring: Any = None
        if ple is not None and index in ple.layers:
            assert config.hyper_connection is not None
            width = config.hyper_connection.count * config.hidden_size
            shape = (sc.num_slots, sc.ring_rows(ple.conv_window), width)
            ring = jax.ShapeDtypeStruct(shape, storage_dtype(sc.dtype))
        layers.append(build(LayerState, mixer=_mixer_spec(config, sc, kind), ple=ring))
    if ple is not None:
        ids = jax.ShapeDtypeStruct((sc.num_slots, sc.ring_rows(ple.ngram_size - 1)), jnp.int32)
    mtp = None
    if sc.with_mtp:
        if config.num_mtp_layers == 0:
            raise ValueError("with_mtp needs a model with an MTP layer")
        kind = LayerKind.QSA if config.hyper_connection else LayerKind.ATTENTION
        mtp = build(LayerState, mixer=_mixer_spec(config, sc, kind), ple=None)
    per_slot: Any = jax.ShapeDtypeStruct((sc.num_slots,), jnp.int32)
    table: Any = jax.ShapeDtypeStruct((sc.num_slots, sc.blocks_per_slot), jnp.int32)
    numbers = ("committed_len", "sealed_len", "sealed_slot", "next_slot")
    sequences = build(Sequences, **dict.fromkeys(numbers, per_slot), block_table=table)
    return build(ModelState, sequences=sequences, layers=tuple(layers), mtp=mtp, ids=ids)


def init_state(config: HybridConfig, sc: StateConfig) -> ModelState:
    """An empty state; state slot 0 holds the zeros every sequence starts from."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state_spec(config, sc))


@dataclasses.dataclass(frozen=True)
class InventoryEntry:
    """One array of the state.

    Attributes:
      path: where it sits in the tree.
      kind: kv, index_keys, raw_index_keys, recurrent_state, log, conv_state, ple_conv_state, ids,
        draft or sequences.
      per: what its first axis counts: block, state_slot or slot.
      num_bytes: its size.
    """

    path: str
    kind: str
    per: str
    num_bytes: int


# The first mark that a path holds decides.
_KINDS = (
    (".sequences", "sequences", "slot"),
    (".sealed", "recurrent_state", "state_slot"),
    (".log", "log", "slot"),
    ("_pages", "kv", "block"),
    (".pooled", "index_keys", "block"),
    (".raw", "raw_index_keys", "slot"),
    (".conv", "conv_state", "slot"),
    (".ple", "ple_conv_state", "slot"),
    (".ids", "ids", "slot"),
    (".first", "draft", "slot"),
    (".hidden", "draft", "slot"),
)


def inventory(spec: Any) -> list[InventoryEntry]:
    """List every array of a state, the target's or a drafter's, with its kind and size.

    Raises:
      ValueError: an array no kind is declared for; it could be neither budgeted nor cached.
    """
    entries = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        name = jax.tree_util.keystr(path)
        declared = next(((kind, per) for mark, kind, per in _KINDS if mark in name), None)
        if declared is None:
            raise ValueError(f"state array {name} has no declared kind")
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        entries.append(InventoryEntry(name, *declared, size))
    return entries


@struct
class Call:
    """The rows of one call, packed slot after slot.

    Attributes:
      ids: token of each packed row.
      count: new rows of each slot.
      certain: leading new rows that will be committed whatever comes: all rows of a prefill, the
        first row of a decode or verify step.
      seal_only: slots without rows whose due seal is to be stored.
    """

    ids: Int[Array, " R"]
    count: Int[Array, " B"]
    certain: Int[Array, " B"]
    seal_only: Array


def plan(call: Call, sequences: Sequences, sc: StateConfig) -> tuple[Rows, Seals]:
    """Lay out a call over the slots as they stand."""
    return plan_rows(
        start=sequences.committed_len,
        count=call.count,
        certain=call.certain,
        seal_only=call.seal_only,
        sealed_len=sequences.sealed_len,
        sealed_slot=sequences.sealed_slot,
        next_slot=sequences.next_slot,
        block_table=sequences.block_table,
        max_rows=call.ids.shape[0],
        num_state_slots=sc.num_state_slots,
        block_size=sc.block_size,
    )


def apply_seals(sequences: Sequences, seals: Seals) -> Sequences:
    """Move each slot on to the seal that a call stored."""
    return dataclasses.replace(
        sequences,
        sealed_len=jnp.where(seals.stored, seals.boundary, sequences.sealed_len),
        sealed_slot=jnp.where(seals.stored, sequences.next_slot, sequences.sealed_slot),
        next_slot=jnp.where(seals.stored, -1, sequences.next_slot),
    )


def commit(state: ModelState, num_committed: Int[Array, " B"]) -> ModelState:
    """Count the first `num_committed` new rows of each slot; rows beyond are forgotten."""
    sequences = dataclasses.replace(
        state.sequences, committed_len=state.sequences.committed_len + num_committed
    )
    return dataclasses.replace(state, sequences=sequences)
