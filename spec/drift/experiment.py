"""Plain decoding beside verify rounds: the states at four points of every round, bit for bit.

Both go on from one prefill. Every round starts from the token of plain decoding, so that what is
seen is the drift of the state; a token that the verify path would have given in another way is
reported, not followed.
"""

import dataclasses
import enum
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec.drift.compare import Difference, difference
from spec.drift.faults import AFTER_STEP, Fault
from spec.drift.parts import MODEL, Snapshot, Where
from spec.drift.program import Drafted, Program
from spec.state import SpecState

Parts = dict[Where, np.ndarray]
LENGTH = "committed_len"


class Point(enum.Enum):
    """Two states that must be the same; with depth d of plain decoding, L rows before a round, a
    committed by it."""

    CARRIED = "the state a round starts from = what the round before left"
    VERIFY_IN = "the state a round starts from = plain decoding's at L"
    ROW = "the state after row j of a window = plain decoding's at L + j + 1, for j < a"
    STORED = "the state after a commit = that after row a - 1"
    COMMIT = "the state after a commit = plain decoding's at L + a"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One comparison that did not come out zero.

    Attributes:
      round, row: which round, and of `Point.ROW` which row.
      where: layer and kind of state.
    """

    round: int
    point: Point
    row: int
    where: Where
    difference: Difference


@dataclasses.dataclass(frozen=True)
class Token:
    """A token that the verify path would have given instead of plain decoding's.

    Attributes:
      index: of the output's tokens, counted from 0.
    """

    round: int
    index: int
    plain: int
    verified: int


@dataclasses.dataclass
class Report:
    """What an experiment found.

    Attributes:
      wheres: every layer and kind that was compared.
      num_cells: comparisons.
      cells: those that are not zero, in the order in which they were made.
      accepted: drafts accepted by each round.
      tokens: those that differ.
    """

    wheres: tuple[Where, ...] = ()
    num_cells: int = 0
    cells: list[Cell] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    tokens: list[Token] = dataclasses.field(default_factory=list)

    @property
    def is_zero(self) -> bool:
        """No state and no token differs."""
        return not self.cells and not self.tokens


@dataclasses.dataclass(frozen=True)
class Rounds:
    """What the rounds accept.

    Attributes:
      count: how many.
      pattern: `reject`, `accept`, `random`, or how many drafts each accepts at most.
      seed: of `random`.
    """

    count: int
    pattern: str = "reject"
    seed: int = 0

    def accepted(self, width: int) -> list[int]:
        """Drafts that each round accepts.

        Raises:
          ValueError: a pattern that there is not.
        """
        most = width - 1
        fixed = {"reject": 0, "accept": most}
        if self.pattern == "random":
            draw = random.Random(self.seed)
            return [draw.randint(0, most) for _ in range(self.count)]
        if self.pattern.isdecimal():
            return [min(int(self.pattern), most)] * self.count
        if self.pattern not in fixed:
            raise ValueError(
                f"an accept pattern is reject, accept, random or a number, got {self.pattern!r}"
            )
        return [fixed[self.pattern]] * self.count


def tokens_needed(num_ids: int, rounds: Rounds, width: int) -> int:
    """Rows that an experiment may write, with every fault: each round at most a whole window."""
    return num_ids + (rounds.count + 2) * width


class _Plain:
    """Plain decoding, ahead of the rounds by a window.

    Attributes:
      tokens: the prompt, and what came after it.
      state: of the sequence as far as it is.
    """

    def __init__(self, program: Program, params: Any, ids: list[int]):
        self._program, self._params, self.tokens = program, params, list(ids)
        self._snapshots: dict[int, Snapshot] = {}
        self._seals: dict[int, Mapping[int, Any]] = {}
        self.state = program.start()
        for at in range(0, len(ids), program.num_rows):
            piece = ids[at : at + program.num_rows]
            self._feed(Drafted(piece, is_read=at + len(piece) == len(ids)))
        self._keep()

    def _feed(self, drafted: Drafted) -> None:
        output, self.state = self._program.plain(self._params, self.state, drafted)
        if drafted.is_read:
            self.tokens.append(int(output.accepted.tokens[0, 0]))

    def _keep(self) -> None:
        snapshot = self._program.reader.snapshot(self.state.model)
        self._snapshots[snapshot.committed_len] = snapshot
        self._seals[snapshot.sealed_len] = snapshot.sealed

    def run_to(self, depth: int) -> None:
        """Decode up to a depth."""
        while max(self._snapshots) < depth:
            self._feed(Drafted([self.tokens[-1]]))
            self._keep()

    def forget(self, depth: int) -> None:
        """Drop the states below a depth."""
        self._snapshots = {d: s for d, s in self._snapshots.items() if d >= depth}

    def parts(self, depth: int, boundary: int) -> Parts:
        """The state before decoding at a depth, its log from a boundary if that is known."""
        snapshot = self._snapshots[depth]
        is_known = boundary in self._seals and boundary <= depth
        seal = (boundary, self._seals[boundary]) if is_known else None
        return self._program.reader.parts(snapshot, depth, seal) | _length(depth)


def _length(value: int) -> Parts:
    return {(MODEL, LENGTH): np.asarray([value], np.int32)}


class _Experiment:
    """Verify rounds beside plain decoding."""

    def __init__(self, program: Program, params: Any, ids: list[int], fault: Fault | None):
        self._program, self._params, self._fault = program, params, fault
        self._plain = _Plain(program, params, ids)
        self._depth, self._num_ids = len(ids), len(ids)
        self._state: SpecState = self._plain.state
        self._left: Parts | None = None
        self.report = Report()

    def round(self, num_accepted: int) -> None:
        """Run one round and compare."""
        program, depth = self._program, self._depth
        self._plain.forget(depth)
        self._plain.run_to(depth + program.width)
        before = program.reader.snapshot(self._state.model)
        start = before.committed_len
        entered = self._own(before, start)
        if self._left is not None:
            self._compare(Point.CARRIED, entered, self._left)
        self._beside(Point.VERIFY_IN, before, entered, depth)
        self._check_tokens(self._verify(num_accepted))
        after, stored = program.reader.snapshot(self._state.model), entered
        for row in range(num_accepted + 1):
            stored = self._own(after, start + row + 1)
            self._beside(Point.ROW, after, stored, depth + row + 1, row=row)
        if self._fault in AFTER_STEP:
            last = start + program.width - 1
            self._state = program.after_commit(self._state, last, self._fault)
            after = program.reader.snapshot(self._state.model)
        self._left = self._own(after, after.committed_len)
        self._depth = depth + num_accepted + 1
        self._compare(Point.STORED, self._left, stored)
        self._beside(Point.COMMIT, after, self._left, self._depth)
        self.report.accepted.append(num_accepted)

    def _verify(self, num_accepted: int) -> list[int]:
        """Run the window; return what the target samples after its rows up to the last accepted."""
        program, at = self._program, self._depth
        drafts = self._plain.tokens[at + 1 : at + program.width]
        # The first one to reject is not plain decoding's, nor are those behind it.
        size = program.config.vocab_size
        drafts[num_accepted:] = [(token + 1) % size for token in drafts[num_accepted:]]
        drafted = Drafted([self._plain.tokens[at]], drafts, num_accepted)
        if self._fault is None:
            output, self._state = program.plain(self._params, self._state, drafted)
        else:
            output, self._state = program.faulty(
                self._params, self._state, drafted, fault=self._fault
            )
        return np.asarray(output.chosen.token[: num_accepted + 1]).tolist()

    def _check_tokens(self, sampled: list[int]) -> None:
        for row, token in enumerate(sampled):
            plain = self._plain.tokens[self._depth + row + 1]
            if token != plain:
                index = self._depth + row + 1 - self._num_ids
                number = len(self.report.accepted)
                self.report.tokens.append(Token(number, index, plain, token))
                return

    def _own(self, snapshot: Snapshot, depth: int) -> Parts:
        return self._program.reader.parts(snapshot, depth) | _length(depth)

    def _beside(
        self, point: Point, snapshot: Snapshot, own: Parts, depth: int, *, row: int = 0
    ) -> None:
        """Compare with plain decoding, which may have sealed at another time."""
        self._compare(point, own, self._plain.parts(depth, snapshot.sealed_len), row=row)

    def _compare(self, point: Point, own: Parts, other: Parts, *, row: int = 0) -> None:
        report = self.report
        report.wheres = tuple(sorted(own))
        for where in report.wheres:
            found = difference(own[where], other[where])
            report.num_cells += 1
            if not found.is_zero:
                report.cells.append(Cell(len(report.accepted), point, row, where, found))


def run(
    program: Program,
    params: Any,
    *,
    input_ids: list[int],
    rounds: Rounds,
    fault: Fault | None = None,
) -> Report:
    """Run plain decoding and verify rounds from one prompt.

    Args:
      params: prepared.
      fault: what the verify path does wrong; the program must know it.

    Raises:
      ValueError: no ids, ids that the model has not, more tokens than the model or the program has
        room for, or a fault that the program does not know.
    """
    config, size = program.config, program.config.vocab_size
    if not input_ids or not all(0 <= token < size for token in input_ids):
        raise ValueError(f"input ids must be one or more in [0, {size - 1}]")
    needed = tokens_needed(len(input_ids), rounds, program.width)
    longest = min(program.max_tokens, config.max_position_embeddings)
    if needed > longest:
        raise ValueError(
            f"{len(input_ids)} ids and {rounds.count} rounds of {program.width} rows may need "
            f"{needed} positions; there are {longest}"
        )
    if fault is not None and fault not in program.faults:
        raise ValueError(f"the program does not know the fault {fault.value}")
    experiment = _Experiment(program, params, input_ids, fault)
    for num_accepted in rounds.accepted(program.width):
        experiment.round(num_accepted)
    return experiment.report
