"""Checkpoint names: from the spellings on disk to the declared parameters.

Every writer's prefix is reduced to one canonical name, relative to the text model; then each
declared parameter is matched with the tensors that fill it: one tensor as a rule, one per
expert and projection in the split form of experts, one per shard of an n-gram table.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from qwen_hybrid.checkpoint_files import (
    FLOAT_DTYPES,
    CheckpointError,
    TensorEntry,
    some_names,
)
from qwen_hybrid.config import HybridConfig, NgramTable
from qwen_hybrid.params import ParamSpec, ParamTree, leaves

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
MTP_PREFIX = "mtp."
# Longest first: the first prefix that matches is removed.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
VISION_PREFIXES = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
# Tables that some writers keep beside the weights and that follow from the config.
SKIPPED = re.compile(r"rotary_emb\.inv_freq$|ple_embedding\.(hashstats_|token_lookup)")
QUANTIZED = re.compile(
    r"\.(weight_scale(_inv|_2)?|input_scale|pre_quant_scale|weight_packed|weight_global_scale"
    r"|input_global_scale|k_scale|v_scale)$"
)
# Dtypes of weights that need a scale, or of several values packed in one.
QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "I32")
BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
TABLE_NAME = "ngram_embedding.weight"


class QuantizedCheckpointError(CheckpointError, NotImplementedError):
    """A checkpoint with quantised weights, which the engine cannot load yet."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor on disk and the place of its first element in the flat parameter."""

    entry: TensorEntry
    offset: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to read for a model.

    Attributes:
        pieces: for each parameter, by its path in the tree, the tensors that fill it.
        buffers: integer buffers on disk and the values they must have.
        tied_head: a head stored beside a tied embedding, which it must equal; None if absent.
        skipped: names on disk that are not part of the text model.
        notes: facts that the user should hear.
    """

    pieces: dict[tuple[str, ...], list[Piece]]
    buffers: list[tuple[TensorEntry, tuple[int, ...]]]
    tied_head: tuple[TensorEntry, TensorEntry] | None
    skipped: tuple[str, ...]
    notes: tuple[str, ...]


def canonical_name(name: str) -> str | None:
    """Return a name relative to the text model; None for tensors that are not part of it."""
    if name.startswith(VISION_PREFIXES) or SKIPPED.search(name):
        return None
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    return name[len(prefix) :]


def canonical_tensors(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the text model's tensors by canonical name.

    Raises:
        CheckpointError: two tensors on disk have one canonical name.
    """
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        canonical = canonical_name(name)
        if canonical is None:
            continue
        if canonical in found:
            raise CheckpointError(f"{entry} duplicates {found[canonical]}")
        found[canonical] = entry
    return found


def refuse_quantized(config: HybridConfig, tensors: Mapping[str, TensorEntry]) -> None:
    """Raise an error that names the scheme and tensors if a checkpoint is quantised."""
    record = config.quantization
    scheme = f"quantization_config {record.method} {record.algorithm}" if record else ""
    scales = [str(entry) for name, entry in tensors.items() if QUANTIZED.search(name)]
    packed = [
        str(entry)
        for name, entry in tensors.items()
        if entry.dtype in QUANTIZED_DTYPES and not name.endswith(BUFFERS)
    ]
    if record or scales or packed:
        found = some_names(packed + scales) or "no quantised tensors"
        raise QuantizedCheckpointError(
            f"quantised weights cannot be loaded yet: {scheme or 'no quantization_config'}; {found}"
        )


class Planner:
    """Matches declared parameters with tensors, and collects what does not fit."""

    def __init__(self, listing: Path, tensors: Mapping[str, TensorEntry], prefix: str) -> None:
        self._listing = listing
        self._left = dict(tensors)
        self._prefix = prefix
        self._missing: list[str] = []
        self._misshaped: list[str] = []

    def take(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOAT_DTYPES
    ) -> TensorEntry | None:
        """Return a tensor and mark it as used; None, with the fault noted, if it does not fit."""
        entry = self._left.pop(name, None)
        if entry is None:
            self._miss(name)
        elif entry.shape != shape or entry.dtype not in dtypes:
            self._misshaped.append(f"{entry}, expected {'/'.join(dtypes)}{list(shape)}")
        else:
            return entry
        return None

    def _miss(self, name: str) -> None:
        """Note a missing tensor under the name that this checkpoint would give it."""
        is_outside = name.startswith((HEAD, MTP_PREFIX))
        self._missing.append(name if is_outside else self._prefix + name)

    def pieces(self, spec: ParamSpec) -> list[Piece]:
        """Return the tensors that fill a parameter."""
        if spec.name.endswith(TABLE_NAME) and spec.name not in self._left:
            return self._table_shards(spec)
        if ".experts." in spec.name and spec.name not in self._left:
            return self._split_experts(spec)
        entry = self.take(spec.name, disk_shape(spec))
        return [] if entry is None else [Piece(entry, 0)]

    def _split_experts(self, spec: ParamSpec) -> list[Piece]:
        """Return one tensor per expert and projection."""
        module, projection = spec.name.rsplit(".", 1)
        experts, rows, columns = spec.shape
        names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        shape = (rows // len(names), columns)
        # One absent fused tensor is better reported than two absent ones per expert.
        if not any(name.startswith(f"{module}.0.") for name in self._left):
            self._miss(spec.name)
            return []
        found = [
            (self.take(f"{module}.{expert}.{name}.weight", shape), expert * len(names) + part)
            for expert in range(experts)
            for part, name in enumerate(names)
        ]
        return [Piece(entry, place * shape[0] * columns) for entry, place in found if entry]

    def _table_shards(self, spec: ParamSpec) -> list[Piece]:
        """Return the shards of a table, which follow one another in numeric order."""
        rows, width = spec.shape
        stem = spec.name.removesuffix("weight")
        pattern = re.compile(re.escape(stem) + r"shard_(\d+)\.weight")
        numbers = {int(match[1]) for name in self._left if (match := pattern.fullmatch(name))}
        if not numbers:
            self._miss(f"{stem}shard_*.weight")
            return []
        pieces, row = [], 0
        for number in range(max(numbers) + 1):
            name = f"{stem}shard_{number}.weight"
            shard_rows = self._left[name].size // width if number in numbers else 0
            entry = self.take(name, (shard_rows, width))
            if entry is not None:
                pieces.append(Piece(entry, row * width))
            row += shard_rows
        if row != rows and max(numbers) + 1 == len(numbers):
            self._misshaped.append(
                f"{stem}shard_0..{max(numbers)} of {self._listing} hold {row} rows, expected {rows}"
            )
        return pieces

    def finish(self) -> None:
        """Raise an error that lists what is missing, surplus or misshaped, if anything is."""
        faults = []
        if self._missing:
            faults.append(
                f"{len(self._missing)} tensors are missing from {self._listing}: "
                f"{some_names(self._missing)}"
            )
        if self._left:
            faults.append(
                f"{len(self._left)} tensors are not part of the model: "
                f"{some_names(map(str, self._left.values()))}"
            )
        if self._misshaped:
            faults.append(f"wrong shapes: {some_names(self._misshaped)}")
        if faults:
            raise CheckpointError("; ".join(faults))


def disk_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of a parameter's tensor on disk."""
    if spec.name.endswith("conv1d.weight"):
        return (spec.shape[0], 1, spec.shape[1])
    return spec.shape


def table_buffers(table: NgramTable) -> dict[str, tuple[int, ...]]:
    """Return the integer buffers that checkpoints store beside an n-gram table."""
    return dict(zip(BUFFERS, (table.multipliers, table.moduli, table.offsets), strict=True))


def ple_modules(config: HybridConfig) -> dict[str, NgramTable]:
    """Return the table constants of each n-gram embedding, by its checkpoint module."""
    layers = config.ple.layers if config.ple is not None else ()
    return {
        f"layers.{layer}.ple.ple_embedding": config.ple.table(rank, config.vocab_size)
        for rank, layer in enumerate(layers)
        if config.ple is not None
    }


def make_plan(
    config: HybridConfig,
    specs: ParamTree,
    *,
    listing: Path,
    tensors: Mapping[str, TensorEntry],
) -> Plan:
    """Match a model's declarations with the tensors of a checkpoint.

    Args:
        config: the model.
        specs: its declarations.
        listing: the file that lists the tensors, for messages.
        tensors: every tensor by its name on disk.

    Raises:
        QuantizedCheckpointError: quantised weights.
        CheckpointError: missing, surplus or misshaped tensors.
    """
    known = canonical_tensors(tensors)
    refuse_quantized(config, known)
    notes: list[str] = []
    if config.num_mtp_layers == 0:
        kept = {name: e for name, e in known.items() if not name.startswith(MTP_PREFIX)}
        if len(kept) < len(known):
            unused = len(known) - len(kept)
            notes.append(f"ignored {unused} {MTP_PREFIX}* tensors: the config has no MTP head")
        known = kept
    head = known.pop(HEAD, None) if config.tie_word_embeddings else None
    planner = Planner(listing, known, text_prefix(tensors))
    pieces = {path: planner.pieces(spec) for path, spec in leaves(specs)}
    buffers = []
    for module, table in ple_modules(config).items():
        for name, values in table_buffers(table).items():
            entry = planner.take(f"{module}.{name}", (len(values),), ("I64",))
            if entry is not None:
                buffers.append((entry, values))
    planner.finish()
    used = {entry.name for entry in known.values()}
    return Plan(
        pieces=pieces,
        buffers=buffers,
        tied_head=(head, known[EMBEDDING]) if head else None,
        skipped=tuple(name for name in tensors if name not in used),
        notes=tuple(notes),
    )


def text_prefix(tensors: Iterable[str]) -> str:
    """Return the prefix that a checkpoint gives the text model's tensors."""
    for name in tensors:
        canonical = canonical_name(name)
        if canonical is not None and not canonical.startswith((HEAD, MTP_PREFIX)):
            return name.removesuffix(canonical)
    return TEXT_PREFIXES[0]
