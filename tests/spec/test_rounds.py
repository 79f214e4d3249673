"""Layout, acceptance and what comes after each row, against loops over lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rows import plan_rows
from pallas_kernels.sampling import ENDS_OUTPUT, GENERATED, IN_PROMPT, SlotHistory, with_tokens
from pallas_kernels.struct import build
from qwen_hybrid.step import Chosen, Reads
from spec import Proposal, SpecCall, accept, with_drafts
from spec.accept import next_tokens, row_tokens

SLOTS, WIDTH, ROWS, VOCAB = 5, 4, 64, 9


class Round:
    """A random call: some slots prefill, some verify drafts, some have no rows."""

    def __init__(self, seed: int):
        rng = self.rng = np.random.default_rng(seed)
        self.certain = [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(0, 8, SLOTS)]
        self.samples = [bool(ids) and bool(rng.integers(0, 4)) for ids in self.certain]
        self.drafts = rng.integers(0, VOCAB, (SLOTS, WIDTH))
        self.num_drafts = [int(rng.integers(0, WIDTH + 1)) if s else 0 for s in self.samples]
        self.most = rng.integers(0, WIDTH + 1, SLOTS) if seed % 3 == 0 else np.full(SLOTS, WIDTH)
        self.ends = [set(rng.integers(0, VOCAB, seed % 3).tolist()) for _ in range(SLOTS)]
        # What the target samples after each row; mostly the draft that follows.
        self.own: list[list[int]] = []
        for slot in range(SLOTS):
            ids = [*self.certain[slot], *self.drafts[slot, : self.num_drafts[slot]]]
            own = [t if rng.random() < 0.75 else int(rng.integers(0, VOCAB)) for t in ids[1:]]
            self.own.append([*own, int(rng.integers(0, VOCAB))][: len(ids)])

    def call(self) -> SpecCall:
        ids = np.zeros(ROWS, np.int32)
        flat = [i for ids in self.certain for i in ids]
        ids[: len(flat)] = flat
        next_id = [-1 if s else 7 for s in self.samples]
        return build(
            SpecCall,
            ids=jnp.asarray(ids),
            count=jnp.asarray([len(ids) for ids in self.certain], jnp.int32),
            seal_only=jnp.zeros(SLOTS, bool),
            next_id=jnp.asarray(next_id, jnp.int32),
            max_drafts=jnp.asarray(self.num_drafts, jnp.int32),
            drafts=jnp.asarray(self.drafts, jnp.int32),
            num_drafts=jnp.asarray(self.num_drafts, jnp.int32),
            max_accepted=jnp.asarray(self.most, jnp.int32),
            min_accepted=jnp.zeros(SLOTS, jnp.int32),
        )

    def reads(self) -> Reads:
        """The last row of every slot that samples, and a scored one of every other."""
        rows, targets, at = [], [], 0
        for slot, ids in enumerate(self.certain):
            if len(ids) > 1:
                rows, targets = [*rows, at], [*targets, ids[1]]
            at += len(ids)
            if self.samples[slot]:
                rows, targets = [*rows, at - 1], [*targets, -1]
        self.num_reads = len(rows)
        fill = [0] * (ROWS - len(rows))
        return Reads(
            row=jnp.asarray(rows + fill, jnp.int32),
            target=jnp.asarray(targets + fill, jnp.int32),
            count=jnp.asarray(len(rows), jnp.int32),
        )

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(slot, index in the slot) of every row."""
        return [
            (slot, i)
            for slot, ids in enumerate(self.certain)
            for i in range(len(ids) + self.num_drafts[slot])
        ]

    def token(self, slot: int, i: int) -> int:
        certain = self.certain[slot]
        return certain[i] if i < len(certain) else int(self.drafts[slot, i - len(certain)])

    def accepted(self, slot: int) -> list[int]:
        """Tokens that steps without drafts would give, as many as the drafts allow."""
        emitted, at = [], len(self.certain[slot]) - 1
        while True:
            emitted.append(self.own[slot][at])
            nth = len(emitted) - 1
            right = nth < self.num_drafts[slot] and self.drafts[slot, nth] == emitted[-1]
            if emitted[-1] in self.ends[slot] or not right or nth >= self.most[slot]:
                return emitted
            at += 1


@pytest.fixture(scope="module")
def run():
    def of(call, reads, proposal, own_by_row, marks):
        layout = with_drafts(call, reads, proposal)
        chosen = Chosen(
            token=own_by_row[layout.reads.row],
            top=jnp.zeros((ROWS, 1), jnp.int32),
            log_probability=jnp.zeros((ROWS, 1), jnp.float32),
        )
        tokens = row_tokens(chosen, layout.reads, ROWS)
        history = SlotHistory(marks, jnp.zeros(marks.shape, jnp.float32))
        accepted = accept(call, proposal, layout.window, tokens, history)
        none = jnp.zeros(SLOTS, jnp.int32)
        rows, _ = plan_rows(
            start=none,
            count=layout.call.count,
            certain=layout.call.certain,
            seal_only=none.astype(bool),
            sealed_len=none,
            sealed_slot=none,
            next_slot=none - 1,
            block_table=jnp.zeros((SLOTS, 2), jnp.int32),
            max_rows=ROWS,
            num_state_slots=2,
            block_size=64,
        )
        return layout, tokens, accepted, next_tokens(call, rows, layout.call.ids, tokens)

    return jax.jit(of)


@pytest.mark.parametrize("seed", range(40))
def test_a_round_is_what_loops_over_lists_say(run, seed):
    a = Round(seed)
    call, reads = a.call(), a.reads()
    own = np.zeros(ROWS, np.int32)
    own[: len(a.rows)] = [a.own[slot][i] for slot, i in a.rows]
    marks = np.full((SLOTS, VOCAB), GENERATED | IN_PROMPT, np.int32)
    for slot, ends in enumerate(a.ends):
        marks[slot, list(ends)] |= ENDS_OUTPUT
    proposal = Proposal(call.drafts, call.num_drafts)
    layout, tokens, accepted, following = jax.device_get(
        run(call, reads, proposal, jnp.asarray(own), jnp.asarray(marks))
    )
    assert layout.call.ids[: len(a.rows)].tolist() == [a.token(*row) for row in a.rows]
    # The host's reads keep their order; each draft's row is read after them.
    places = {row: at for at, row in enumerate(a.rows)}
    count = int(layout.reads.count)
    assert count == a.num_reads + sum(a.num_drafts)
    columns = (layout.reads.row[:count].tolist(), layout.reads.target[:count].tolist())
    found = list(zip(*columns, strict=True))
    of_drafts = [
        (places[slot, len(a.certain[slot]) + i], -1)
        for slot in range(SLOTS)
        for i in range(a.num_drafts[slot])
    ]
    assert found[a.num_reads :] == of_drafts
    expected = []
    for slot, ids in enumerate(a.certain):
        expected += [(places[slot, 0], ids[1])] if len(ids) > 1 else []
        expected += [(places[slot, len(ids) - 1], -1)] if a.samples[slot] else []
    assert found[: a.num_reads] == expected
    assert [int(t) >= 0 for t in tokens[: len(a.rows)]] == [
        a.samples[slot] and i >= len(a.certain[slot]) - 1 for slot, i in a.rows
    ]
    for slot, ids in enumerate(a.certain):
        given = a.accepted(slot) if a.samples[slot] else []
        num_accepted = int(accepted.num_accepted[slot])
        assert num_accepted == max(len(given) - 1, 0)
        assert accepted.num_committed[slot] == len(ids) + num_accepted
        if a.samples[slot]:
            assert accepted.tokens[slot, : len(given)].tolist() == given
        # The token after each committed row is the one the sequence goes on with.
        text = [*ids, *(given or [7])]
        for i in range(len(ids) + num_accepted):
            assert following[places[slot, i]] == text[i + 1]


def test_forced_acceptance_emits_what_the_rows_were_computed_from(run):
    a = Round(3)
    a.samples = [bool(ids) for ids in a.certain]
    a.num_drafts, a.ends = [WIDTH * s for s in a.samples], [set() for _ in range(SLOTS)]
    call = a.call()
    two = jnp.full(SLOTS, 2, jnp.int32)
    call = build(SpecCall, **{**vars(call), "min_accepted": two, "max_accepted": two})
    own = jnp.zeros(ROWS, jnp.int32)
    marks = jnp.zeros((SLOTS, VOCAB), jnp.int32)
    proposal = Proposal(call.drafts, call.num_drafts)
    _, _, accepted, _ = jax.device_get(run(call, a.reads(), proposal, own, marks))
    for slot in np.flatnonzero(a.samples):
        assert accepted.num_accepted[slot] == 2
        assert accepted.tokens[slot, :2].tolist() == a.drafts[slot, :2].tolist()
        assert accepted.tokens[slot, 2] == 0


def test_tokens_before_a_row_count_as_generated(rng):
    marks = rng.integers(0, 50, (6, VOCAB)).astype(np.int32)
    tokens = rng.integers(0, VOCAB, (6, WIDTH)).astype(np.int32)
    count = np.array([0, 1, 2, 3, 4, 0], np.int32)
    found = with_tokens(jnp.asarray(marks), jnp.asarray(tokens), jnp.asarray(count))
    for row in range(6):
        for token in tokens[row, : count[row]]:
            marks[row, token] += GENERATED
    np.testing.assert_array_equal(found, marks)
