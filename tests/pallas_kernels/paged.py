"""Sequences fed to one operator in calls of any shape.

A `Feeder` plays the engine's part for a single operator: it hands out blocks and state slots in
random order, feeds chunks and verify windows of several sequences at once, and counts only the
rows it commits. All memory starts as NaN but the empty state, and what a sequence leaves behind is
never cleared. Table entries that were not handed out lead to a block that is never written.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bits import from_bits
from pallas_kernels.rows import Rows
from qwen_hybrid.state import EMPTY_STATE_SLOT, Call, Sequences, StateConfig, apply_seals, plan
from qwen_hybrid.step import COMPILER_OPTIONS

# Two programs: schedules mix them, since a row's bits must not depend on which one ran. Compiling
# them is what these tests cost, so only one case of an operator has both.
SMALL, LARGE = 48, 160
# Lengths around those of tiles and blocks.
LENGTHS = (1, 15, 17, 63, 64, 65, 130)

Step = Callable[[Any, Any, Rows], tuple[Any, Any]]
Inputs = Any


def unused(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Memory that nothing was written to: NaN, or the largest integer."""
    return jnp.asarray(_unused(shape, dtype))


def _unused(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return np.full(shape, np.nan if is_float else jnp.iinfo(dtype).max, dtype)


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator along sequences.

    Attributes:
      step: (packed inputs, state, rows) -> (packed outputs, state).
      init: makes a state whose unused memory is NaN.
      observe: (state, feeder, slot) -> what later calls of the slot may read, in an order that
        does not depend on where it lies.
      draw: (generator, length) -> inputs of one sequence.
      config: capacities.
      programs: rows of the compiled programs.
    """

    step: Step
    init: Callable[[], Any]
    observe: Callable[[Any, "Feeder", int], Any]
    draw: Callable[[np.random.Generator, int], Inputs]
    config: StateConfig
    programs: tuple[int, ...] = (LARGE,)

    @functools.cached_property
    def program(self) -> Callable:
        """The jitted call."""

        def run(inputs: Inputs, state: Any, call: Call, sequences: Sequences):
            rows, seals = plan(call, sequences, self.config)
            out, state = self.step(inputs, state, rows)
            return out, state, apply_seals(sequences, seals)

        return jax.jit(run, compiler_options=COMPILER_OPTIONS)


@dataclasses.dataclass(frozen=True)
class Piece:
    """New rows of one sequence in one call.

    Attributes:
      inputs: `[n, ...]` arrays.
      commit: rows that count; the others are rejected.
      certain: leading rows that will count whatever comes; all where None.
      may_seal: a seal that is due need not wait.
    """

    inputs: Inputs
    commit: int
    certain: int | None = None
    may_seal: bool = True

    @property
    def count(self) -> int:
        """Rows of the piece."""
        return len(jax.tree.leaves(self.inputs)[0])


def cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Rows [start, stop) of a sequence's inputs."""
    return jax.tree.map(lambda a: a[start:stop], inputs)


class Feeder:
    """Several sequences in one state."""

    def __init__(self, op: Operator, *, seed: int = 0) -> None:
        self.op, self.config = op, op.config
        self.rng = np.random.default_rng(seed)
        self.state = op.init()
        sc = self.config
        # The last block stays out of use: entries of the table that nobody owns lead there.
        self._free_blocks = list(self.rng.permutation(sc.num_blocks - 1))
        self._free_states = list(self.rng.permutation(np.arange(1, sc.num_state_slots)))
        self.table = np.full((sc.num_slots, sc.blocks_per_slot), sc.num_blocks - 1, np.int32)
        self.committed = np.zeros(sc.num_slots, np.int32)
        self.sealed_len = np.zeros(sc.num_slots, np.int32)
        self.sealed_slot = np.full(sc.num_slots, EMPTY_STATE_SLOT, np.int32)

    def open(self, slot: int) -> None:
        """Start an empty sequence."""
        self.table[slot] = self.config.num_blocks - 1
        self.committed[slot] = self.sealed_len[slot] = 0
        self.sealed_slot[slot] = EMPTY_STATE_SLOT

    def fork(self, slot: int, source: int) -> None:
        """Start a sequence at another's seal, sharing its state slot and blocks below."""
        self.open(slot)
        boundary = self.sealed_len[source]
        blocks = boundary // self.config.block_size
        self.table[slot, :blocks] = self.table[source, :blocks]
        self.committed[slot] = self.sealed_len[slot] = boundary
        self.sealed_slot[slot] = self.sealed_slot[source]

    def close(self, slot: int) -> None:
        """Give back what a sequence holds; the memory keeps its contents."""
        held = self.table[slot][self.table[slot] != self.config.num_blocks - 1]
        self._free_blocks.extend(held)
        self._release_state(self.sealed_slot[slot])
        self.open(slot)

    def _release_state(self, index: int) -> None:
        if index != EMPTY_STATE_SLOT:
            self._free_states.append(index)

    def _own_blocks(self, slot: int, length: int) -> None:
        for block in range(-(-length // self.config.block_size)):
            if self.table[slot, block] == self.config.num_blocks - 1:
                self.table[slot, block] = self._free_blocks.pop(0)

    def must_seal(self, slot: int, count: int) -> bool:
        """Whether `count` more rows leave a waiting seal no room, or two blocks to fold."""
        end = self.committed[slot] + count
        most = min(self.config.log_rows, 2 * self.config.block_size - 1)
        return bool(end > self.sealed_len[slot] + most)

    def is_due(self, slot: int) -> bool:
        """Whether the rows committed so far have passed a boundary that is not sealed."""
        return bool(self.committed[slot] >= self.sealed_len[slot] + self.config.block_size)

    def _packed(self, pieces: Mapping[int, Piece]) -> Inputs:
        """Inputs of all pieces in slot order; rows beyond are NaN or absurd."""
        some = cut(next(iter(pieces.values())).inputs, 0, 0) if pieces else None
        some = cut(self.op.draw(self.rng, 1), 0, 0) if some is None else some
        total = sum(p.count for p in pieces.values())
        size = next(rows for rows in self.op.programs if rows >= total)

        def pack(empty: np.ndarray, *parts: np.ndarray) -> jax.Array:
            beyond = _unused((size - total, *empty.shape[1:]), empty.dtype)
            return jnp.asarray(np.concatenate([*parts, beyond]))

        return jax.tree.map(pack, some, *[pieces[slot].inputs for slot in sorted(pieces)])

    def call(self, pieces: Mapping[int, Piece], seal_only: Sequence[int] = ()) -> dict[int, Any]:
        """Feed the pieces in one call; outputs of the rows that were committed, by slot."""
        sc = self.config
        zeros = np.zeros(sc.num_slots, np.int32)
        count, certain, next_slot = zeros.copy(), zeros.copy(), zeros - 1
        for slot, piece in pieces.items():
            count[slot] = piece.count
            certain[slot] = piece.count if piece.certain is None else piece.certain
            self._own_blocks(slot, int(self.committed[slot]) + piece.count)
            assert piece.may_seal or not self.must_seal(slot, piece.count)
        for slot in [*seal_only, *(s for s, p in pieces.items() if p.may_seal)]:
            next_slot[slot] = self._free_states.pop(0)
        only = np.isin(np.arange(sc.num_slots), seal_only)
        inputs = self._packed(pieces)
        ids = jnp.zeros(jax.tree.leaves(inputs)[0].shape[0], jnp.int32)
        call = Call(ids, jnp.asarray(count), jnp.asarray(certain), jnp.asarray(only))
        out, self.state, after = self.op.program(inputs, self.state, call, self._stand(next_slot))
        self._record(np.asarray(after.sealed_len), next_slot)
        out, at, results = jax.tree.map(np.asarray, out), 0, {}
        for slot in sorted(pieces):
            results[slot] = cut(out, at, at + pieces[slot].commit)
            at += pieces[slot].count
            self.committed[slot] += pieces[slot].commit
        return results

    def _stand(self, next_slot: np.ndarray) -> Sequences:
        arrays = (self.committed, self.sealed_len, self.sealed_slot, next_slot, self.table)
        return Sequences(*(jnp.array(a) for a in arrays))

    def _record(self, sealed_len: np.ndarray, next_slot: np.ndarray) -> None:
        """Take over the seals that were stored; give back slots that were not needed."""
        for slot, spare in enumerate(next_slot):
            if sealed_len[slot] != self.sealed_len[slot]:
                self._release_state(self.sealed_slot[slot])
                self.sealed_slot[slot] = spare
            elif spare >= 0:
                self._free_states.append(spare)
        self.sealed_len = sealed_len.copy()

    def finish(self, slot: int) -> Any:
        """Store the seal that is due and return what the sequence's memory holds."""
        if self.is_due(slot):
            self.call({}, seal_only=[slot])
            assert not self.is_due(slot)
        return self.op.observe(self.state, self, slot)

    def whole_sequence(self, slot: int, inputs: Inputs) -> tuple[Any, Any]:
        """Feed a sequence in one piece: (outputs, what its memory holds)."""
        length = len(jax.tree.leaves(inputs)[0])
        self.open(slot)
        out = self.call({slot: Piece(inputs, commit=length)})[slot]
        return out, self.finish(slot)


def ring_rows(ring: jax.Array, feeder: Feeder, slot: int, window: int) -> np.ndarray:
    """The last `window` committed rows of a ring, oldest first."""
    end = int(feeder.committed[slot])
    position = np.arange(max(end - window, 0), end)
    return np.asarray(from_bits(ring))[slot, position % ring.shape[1]]


def page_rows(pages: jax.Array, feeder: Feeder, slot: int, per_block: int) -> np.ndarray:
    """Entries of committed rows in pages that hold `per_block` of them a block."""
    block_size = feeder.config.block_size
    position = np.arange(int(feeder.committed[slot]) // (block_size // per_block))
    block = feeder.table[slot, position // per_block]
    return np.asarray(from_bits(pages))[block, position % per_block]


def same_bits(actual: Any, expected: Any) -> None:
    """Fail unless two trees of arrays are equal in every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        word = np.dtype(f"u{a.dtype.itemsize}")
        np.testing.assert_array_equal(
            np.ascontiguousarray(a).view(word), np.ascontiguousarray(b).view(word)
        )


def is_finite(tree: Any) -> bool:
    """Whether no NaN and no infinity is in a tree."""
    return all(np.isfinite(a.astype(np.float32)).all() for a in jax.tree.leaves(tree))


def joined(*parts: Any) -> Any:
    """Rows of several trees, one after another."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


class Schedule:
    """Feeds sequences side by side in random pieces: chunks, windows with rejected rows, pauses."""

    def __init__(self, op: Operator, sequences: Sequence[Inputs], *, seed: int) -> None:
        self.feeder = Feeder(op, seed=seed)
        self.rng = np.random.default_rng(seed + 1000)
        self._waiting = list(enumerate(sequences))
        self._running: dict[int, tuple[int, Inputs]] = {}
        self._outputs: dict[int, list[Any]] = {i: [] for i in range(len(sequences))}
        self.results: dict[int, tuple[Any, Any]] = {}

    def run(self) -> dict[int, tuple[Any, Any]]:
        """Outputs and final memory of every sequence."""
        while self._waiting or self._running:
            self._admit()
            self._step()
        return self.results

    def _admit(self) -> None:
        free = [s for s in range(self.feeder.config.num_slots) if s not in self._running]
        self.rng.shuffle(free)
        while self._waiting and free and self.rng.random() < 0.8:
            slot = free.pop()
            self.feeder.open(slot)
            self._running[slot] = self._waiting.pop(0)

    def _step(self) -> None:
        budget, pieces, seal_only = SMALL, {}, []
        if self.rng.random() < 0.1:
            budget = LARGE
        for slot in self.rng.permutation(list(self._running)):
            piece = self._piece(int(slot), budget)
            if piece is not None:
                pieces[int(slot)] = piece
                budget -= piece.count
            elif self.feeder.is_due(slot) and self.rng.random() < 0.5:
                seal_only.append(int(slot))
        if not pieces and not seal_only:
            return
        for slot, out in self.feeder.call(pieces, seal_only).items():
            index, inputs = self._running[slot]
            self._outputs[index].append(out)
            if self.feeder.committed[slot] == len(jax.tree.leaves(inputs)[0]):
                self.results[index] = joined(*self._outputs[index]), self.feeder.finish(slot)
                self.feeder.close(slot)
                del self._running[slot]

    def _piece(self, slot: int, budget: int) -> Piece | None:
        """A random chunk or verify window, or nothing."""
        inputs, start = self._running[slot][1], int(self.feeder.committed[slot])
        remaining = len(jax.tree.leaves(inputs)[0]) - start
        kind = self.rng.choice(["chunk", "window", "pause"], p=[0.35, 0.5, 0.15])
        if kind == "pause" or budget < 1:
            return None
        may_seal = bool(self.rng.random() < 0.6)
        if kind == "chunk":
            count = min(int(self.rng.choice([1, 2, 16, 17, 31, 65, 130])), remaining, budget)
            may_seal = may_seal or self.feeder.must_seal(slot, count)
            piece = cut(inputs, start, start + count)
            return Piece(piece, commit=count, may_seal=may_seal)
        width = min(int(self.rng.integers(1, self.feeder.config.max_window + 1)), budget)
        commit = min(int(self.rng.integers(1, width + 1)), remaining)
        may_seal = may_seal or self.feeder.must_seal(slot, width)
        wrong = garbage(self.feeder.op.draw(self.rng, width - commit), self.rng)
        window = joined(cut(inputs, start, start + commit), wrong)
        return Piece(window, commit=commit, certain=1, may_seal=may_seal)


def garbage(inputs: Inputs, rng: np.random.Generator) -> Inputs:
    """Inputs of rows that will be rejected: NaN, or larger than any real row."""
    factor = rng.choice([np.nan, 30.0])

    def spoil(a: np.ndarray) -> np.ndarray:
        is_float = jnp.issubdtype(a.dtype, jnp.floating)
        return a * np.asarray(factor, a.dtype) if is_float else a

    return jax.tree.map(spoil, inputs)


def check_schedules(op: Operator, *, seeds: Sequence[int], lengths: Sequence[int] = LENGTHS):
    """Fail unless random schedules give every bit of one-piece runs alone.

    Returns:
      For each length: (inputs, outputs, memory) of the one-piece run.
    """
    rng = np.random.default_rng(17)
    rng = np.random.default_rng(17)
    sequences = [op.draw(rng, length) for length in lengths]
    golden = []
    for index, inputs in enumerate(sequences):
        out, memory = Feeder(op, seed=index).whole_sequence(index % op.config.num_slots, inputs)
        assert is_finite((out, memory))
        golden.append((inputs, out, memory))
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(len(sequences))
        results = Schedule(op, [sequences[i] for i in order], seed=seed).run()
        for place, index in enumerate(order):
            same_bits(results[place], golden[index][1:])
    return golden
