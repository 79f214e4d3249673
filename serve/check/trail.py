"""The committed state of a request while it runs, row by row, and where two such states part."""

import contextlib
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from serve.check.device import committed_state
from serve.core import EngineCore
from serve.request import Request
from serve.runner import Runner

# Tensors whose rows are the last ones before the depth.
_TAILS = ("conv_state", "ple_conv_state", "pending_index_keys", "ids")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True)
class StateDifference:
    """The first row of the state in which two runs of a request differ.

    Attributes:
      layer: index of the decoder layer; None for what belongs to no layer.
      tensor: its name in the canonical form.
      position: of the row; for a sealed state, of the last row in it.
    """

    layer: int | None
    tensor: str
    position: int

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer} "
        return f"{layer}{self.tensor} at position {self.position}"


def split_name(name: str) -> tuple[int | None, str]:
    """Layer and tensor of a part of the canonical form."""
    found = _LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Digests of the rows of a committed state.

    Attributes:
      depth: rows that are in it.
      rows: by part of the canonical form: digest by position.
    """

    depth: int
    rows: dict[str, dict[int, str]]

    @classmethod
    def of(cls, runner: Runner, request: Request, depth: int) -> "Snapshot":
        """The state of a request at `depth` rows, as `committed_state` gives it."""
        size, qsa = runner.state_config.block_size, runner.config.qsa
        parts = committed_state(runner, request, depth)
        rows = {
            name: _digests(array, _positions(name, len(array), depth, size, qsa and qsa.ratio))
            for name, array in parts.items()
        }
        return cls(depth, rows)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Snapshot":
        """What `dataclasses.asdict` made, once it was JSON."""
        rows = {
            name: {int(position): text for position, text in part.items()}
            for name, part in data["rows"].items()
        }
        return cls(data["depth"], rows)

    def first_difference(self, other: "Snapshot", rows: float = math.inf) -> StateDifference | None:
        """The earliest row that both have and that differs; the lowest layer's of several.

        Args:
          rows: look at so many rows of the sequence.
        """
        found = []
        for order, (name, mine) in enumerate(self.rows.items()):
            theirs = other.rows.get(name, {})
            at = [p for p in mine if p < rows and p in theirs and mine[p] != theirs[p]]
            if at:
                layer, tensor = split_name(name)
                key = (min(at), -1 if layer is None else layer, order)
                found.append((key, StateDifference(layer, tensor, min(at))))
        return min(found)[1] if found else None


def _positions(name: str, count: int, depth: int, size: int, ratio: int | None) -> list[int]:
    """Positions of a part's entries along its first axis; one for a sealed state."""
    _, tensor = split_name(name)
    boundary = depth // size * size
    if tensor == "recurrent_state":
        return [boundary - 1]
    if tensor.startswith("log_"):
        return list(range(boundary, depth))
    if tensor in ("key", "value"):
        return list(range(depth))
    if tensor == "pooled_index_keys":
        assert ratio is not None
        return [(group + 1) * ratio - 1 for group in range(count)]
    if tensor in _TAILS:
        return list(range(depth - count, depth))
    raise ValueError(f"it is not known which rows {name} has")


def _digests(array: np.ndarray, positions: list[int]) -> dict[int, str]:
    """Digest by position: of every row, or of the whole array if it has one position."""
    rows = [array] if len(positions) == 1 else list(array)
    head = f"{array.dtype} {array.shape[1:]}".encode()
    digests = [
        hashlib.blake2b(head + np.ascontiguousarray(row).tobytes(), digest_size=8).hexdigest()
        for row in rows
    ]
    return dict(zip(positions, digests, strict=True))


class Trail:
    """States of some requests, noted after every step in which they get on.

    Attributes:
      snapshots: by request, in the order in which they were taken.
    """

    def __init__(self, core: EngineCore, requests: list[Request]):
        """Nothing has run yet."""
        self.snapshots: dict[Request, list[Snapshot]] = {request: [] for request in requests}
        self._runner = core.runner

    def after_step(self, requests: list[Request]) -> None:
        """Note the states of those that took part and go on.

        Where a seal is due, the next step's state says the same.
        """
        size = self._runner.state_config.block_size
        for request in requests:
            depth = request.committed_len
            is_sealed = request.sealed_len == depth // size * size
            if request in self.snapshots and request.slot >= 0 and depth and is_sealed:
                self._note(request, depth)

    def _note(self, request: Request, depth: int) -> None:
        self.snapshots[request].append(Snapshot.of(self._runner, request, depth))

    @contextlib.contextmanager
    def with_ends(self) -> Iterator[None]:
        """Note the last state of each request as well, when the engine makes its digest."""
        runner, make = self._runner, self._runner.state_digests

        def noted(request: Request, depth: int) -> dict[str, str]:
            digests = make(request, depth)
            if request in self.snapshots:
                self._note(request, depth)
            return digests

        runner.state_digests = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            runner.state_digests = make  # type: ignore[method-assign]
