"""What a model takes in memory, by kind, worked out from declarations without allocating."""

import dataclasses
import math

import jax

from pallas_kernels.sampling import history_spec
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.params import leaves, model_specs
from qwen_hybrid.state import StateConfig, inventory, state_spec

KINDS = {
    "kv": "keys and values",
    "index_keys": "pooled index keys",
    "recurrent_state": "sealed states",
    "log": "log since the last seal",
    "conv_state": "convolution rings",
    "ple_conv_state": "n-gram embedding rings",
    "raw_index_keys": "raw index keys",
    "ids": "token ids",
    "sequences": "bookkeeping",
    "history": "penalties and biases of sampling",
}


@dataclasses.dataclass(frozen=True)
class MemoryItem:
    """One kind of decode state.

    Attributes:
        kind: one of KINDS.
        unit: what it is counted by: "token", "state slot" or "sequence".
        count: how many of them there are.
        num_bytes: bytes of all of them, all layers together.
    """

    kind: str
    unit: str
    count: int
    num_bytes: int

    @property
    def unit_bytes(self) -> float:
        """Bytes of one of them; a fraction where several tokens share a key."""
        return self.num_bytes / self.count


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What a model with a state takes.

    Attributes:
        weight_bytes: bytes of the parameters, by dtype.
        items: the decode state, every array of it.
        conv_window_bytes: what a sequence's convolutions look back at, which the rings hold with
            room to spare.
        ple_window_bytes: the same of the n-gram embeddings.
        num_spare_slots: state slots beyond one for each sequence and the empty one, so that a
            seal finds a place.
    """

    weight_bytes: dict[str, int]
    items: tuple[MemoryItem, ...]
    conv_window_bytes: int
    ple_window_bytes: int
    num_spare_slots: int

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(self.weight_bytes.values())

    @property
    def num_state_bytes(self) -> int:
        """Bytes of the decode state."""
        return sum(item.num_bytes for item in self.items)

    def unit_bytes(self, kind: str) -> float:
        """Bytes of one unit of a kind; 0 if the model has none of it."""
        return sum(item.unit_bytes for item in self.items if item.kind == kind)


def memory_report(config: HybridConfig, state_config: StateConfig) -> MemoryReport:
    """Work out what a model takes in memory with a state of these capacities.

    The activation dtype of the state is also that of the weights. Working memory of a step and
    compiled programs are not counted.
    """
    weights: dict[str, int] = {}
    for _, spec in leaves(model_specs(config)):
        dtype = spec.resolved_dtype(state_config.dtype)
        weights[dtype] = weights.get(dtype, 0) + spec.num_bytes(state_config.dtype)
    items = _items(config, state_config)
    per_sequence = {item.kind: item.num_bytes // item.count for item in items}

    def window(kind: str, rows: int) -> int:
        return per_sequence.get(kind, 0) * rows // state_config.ring_rows(rows)

    return MemoryReport(
        weight_bytes=weights,
        items=items,
        conv_window_bytes=window("conv_state", config.gdn.conv_width - 1),
        ple_window_bytes=window("ple_conv_state", config.ple.conv_window if config.ple else 0),
        num_spare_slots=state_config.num_state_slots - state_config.num_slots - 1,
    )


def _items(config: HybridConfig, sc: StateConfig) -> tuple[MemoryItem, ...]:
    """Return the state's arrays by kind, in the order of KINDS."""
    units = {
        "block": ("token", sc.num_blocks * sc.block_size),
        "state_slot": ("state slot", sc.num_state_slots),
        "slot": ("sequence", sc.num_slots),
    }
    totals: dict[tuple[str, str], int] = {}
    for entry in inventory(state_spec(config, sc)):
        key = (entry.kind, entry.per)
        totals[key] = totals.get(key, 0) + entry.num_bytes
    history = jax.tree.leaves(history_spec(sc.num_slots, config.vocab_size))
    totals["history", "slot"] = sum(math.prod(a.shape) * a.dtype.itemsize for a in history)
    return tuple(
        MemoryItem(kind, *units[per], totals[kind, per])
        for kind in KINDS
        for per in units
        if (kind, per) in totals
    )
