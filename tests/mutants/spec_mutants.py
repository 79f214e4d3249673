"""Deliberate bugs in drafting, accepting and committing."""

import dataclasses
import importlib
from typing import Any

import jax.numpy as jnp

from qwen_hybrid import step as step_module
from serve.scheduler import Scheduler
from spec.mtp import MtpDrafter
from spec.prompt_lookup import PromptLookup
from tests.mutants.mutant import Mutant, Patch
from tests.mutants.swap import swap

ACCEPT: Any = importlib.import_module("spec.accept")
STEP: Any = importlib.import_module("spec.step")
ROUNDS = "tests/spec/test_rounds.py"
ENGINE = "tests/spec/test_engine_drafts.py"
MTP = "tests/spec/test_mtp.py"
LOOKUP = "tests/spec/test_prompt_lookup.py"


def _bonus_of_the_natural_count(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(call, proposal, *more):
            capped = original(call, proposal, *more)
            most = jnp.full_like(call.max_accepted, proposal.tokens.shape[1])
            natural = original(dataclasses.replace(call, max_accepted=most), proposal, *more)
            slot = jnp.arange(capped.num_accepted.shape[0])
            bonus = natural.tokens[slot, natural.num_accepted]
            tokens = capped.tokens.at[slot, capped.num_accepted].set(bonus)
            return dataclasses.replace(capped, tokens=tokens)

        return changed

    swap(patch, ACCEPT, "accept", make)


def _drafts_past_the_end(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(call, proposal, window, tokens, history):
            none = dataclasses.replace(history, marks=jnp.zeros_like(history.marks))
            return original(call, proposal, window, tokens, none)

        return changed

    swap(patch, ACCEPT, "accept", make)


def _a_rejected_row_is_committed(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(call, proposal, *more):
            accepted = original(call, proposal, *more)
            more_rows = (accepted.num_accepted < proposal.count).astype(jnp.int32)
            return dataclasses.replace(accepted, num_committed=accepted.num_committed + more_rows)

        return changed

    swap(patch, ACCEPT, "accept", make)


def _penalties_forget_the_window(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda marks, tokens, count: marks

    swap(patch, importlib.import_module("pallas_kernels.sampling.penalties"), "with_tokens", make)


def _only_the_first_token_counts(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(history, accepted, rows, parameters):
            none = jnp.zeros_like(accepted.num_accepted)
            one = dataclasses.replace(accepted, num_accepted=none)
            return original(history, one, rows, parameters)

        return changed

    swap(patch, STEP, "_counted", make)


def _noise_of_the_first_row(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(*args, position, before, **more):
            return original(*args, position=position - before[1], before=before, **more)

        return changed

    swap(patch, step_module, "sampled", make)


def _the_host_counts_the_drafts(patch: Patch) -> None:
    original = Scheduler.commit

    def changed(self, item, num_committed, sealed_len):
        original(self, item, item.num_rows, sealed_len)

    patch.setattr(Scheduler, "commit", changed)


def _draft_rows_a_position_late(patch: Patch) -> None:
    original = MtpDrafter._rows

    def changed(self, sc, sequences, i, count):
        return original(self, sc, sequences, i + 1, count + 1)

    patch.setattr(MtpDrafter, "_rows", changed)


def _the_chain_begins_at_the_windows_end(patch: Patch) -> None:
    original = MtpDrafter.observe

    def changed(self, target, state, observed, parameters):
        accepted = dataclasses.replace(observed.accepted, num_committed=observed.rows.count)
        seen = dataclasses.replace(observed, accepted=accepted)
        return original(self, target, state, seen, parameters)

    patch.setattr(MtpDrafter, "observe", changed)


def _the_first_occurrence_counts(patch: Patch) -> None:
    def changed(self, tokens):
        for token in tokens:
            end = len(self._tokens)
            for size in self._sizes:
                if end >= size:
                    self._after.setdefault(tuple(self._tokens[end - size : end]), end)
            self._tokens.append(token)

    patch.setattr(PromptLookup, "extend", changed)


SPEC_MUTANTS = (
    Mutant(
        "bonus of the natural count",
        "after a cap the token of the last matching row is emitted, not of the last accepted one",
        _bonus_of_the_natural_count,
        (f"{ENGINE}::test_t03_every_number_of_accepted_drafts_over_every_boundary",),
    ),
    Mutant(
        "drafts past the end",
        "drafts are accepted beyond a token that ends the output",
        _drafts_past_the_end,
        (f"{ROUNDS}::test_a_round_is_what_loops_over_lists_say",),
    ),
    Mutant(
        "a rejected row is committed",
        "one row more than is accepted becomes final",
        _a_rejected_row_is_committed,
        # An engine would not even start: its check at the start sees it.
        (f"{ROUNDS}::test_a_round_is_what_loops_over_lists_say",),
    ),
    Mutant(
        "penalties forget the window",
        "a row of a window does not count the drafts before it",
        _penalties_forget_the_window,
        (f"{ROUNDS}::test_tokens_before_a_row_count_as_generated",),
    ),
    Mutant(
        "only the first token counts",
        "of several tokens of a round, penalties learn of one",
        _only_the_first_token_counts,
        (f"{ENGINE}::test_t31_t37_filters_penalties_and_bias",),
    ),
    Mutant(
        "noise of the first row",
        "all rows of a window draw with the noise of its first position",
        _noise_of_the_first_row,
        (f"{ENGINE}::test_t04_t23_t24_mixed_batch_with_rounds_of_any_width",),
    ),
    Mutant(
        "the host counts the drafts",
        "the host takes every verified row for committed",
        _the_host_counts_the_drafts,
        ("tests/serve/test_scheduler_random.py::test_random_runs_beside_a_model",),
    ),
    Mutant(
        "draft rows a position late",
        "a head that feeds itself writes each row one position too far",
        _draft_rows_a_position_late,
        (f"{MTP}::test_a_chain_is_that_of_the_float64_head",),
    ),
    Mutant(
        "the chain begins at the window's end",
        "the first draft comes from the last verified row, not from the last committed one",
        _the_chain_begins_at_the_windows_end,
        (f"{MTP}::test_a_chain_is_that_of_the_float64_head",),
    ),
    Mutant(
        "the first occurrence counts",
        "prompt lookup drafts what followed the oldest occurrence",
        _the_first_occurrence_counts,
        (f"{LOOKUP}::test_drafts_are_those_of_a_search",),
    ),
)
