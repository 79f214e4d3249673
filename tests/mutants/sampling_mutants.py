"""Deliberate bugs in what happens between logits and text."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling import ENDS_OUTPUT, IN_PROMPT, penalties
from pallas_kernels.sampling import api as sampling_api
from serve import output_text, runner, sampling_slots
from serve.request import Request
from serve.stop_regex import PatternMatcher
from tests.mutants.mutant import Mutant, Patch
from tests.mutants.swap import swap

PENALTIES = "tests/pallas_kernels/sampling/test_penalties.py"
ENGINE = "tests/serve/test_engine_sampling.py"
TEXT = "tests/serve/test_output_text.py"
PATTERNS = "tests/serve/test_stop_regex.py"


def _with_marks(patch: Patch, change: Any) -> None:
    def make(original: Any) -> Any:
        def changed(logits, marks, bias, penalties, position):
            return original(logits, change(marks), bias, penalties, position)

        return changed

    swap(patch, penalties, "penalized", make)


def _prompt_counts_as_output(patch: Patch) -> None:
    _with_marks(patch, lambda marks: marks + 4 * (marks & IN_PROMPT))


def _repetition_forgets_the_prompt(patch: Patch) -> None:
    _with_marks(patch, lambda marks: marks & ~IN_PROMPT)


def _an_end_counts_as_seen(patch: Patch) -> None:
    _with_marks(patch, lambda marks: marks | (marks & ENDS_OUTPUT) // 2)


def _rows_without_penalties_take_them(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(logits, marks, bias, penalties, position):
            in_use = jnp.broadcast_to(jnp.any(penalties.in_use), penalties.in_use.shape)
            penalties = dataclasses.replace(penalties, in_use=in_use)
            return original(logits, marks, bias, penalties, position)

        return changed

    swap(patch, penalties, "penalized", make)


def _end_allowed_a_token_early(patch: Patch) -> None:
    def make(original: Any) -> Any:
        return lambda logits, marks, bias, penalties, position: original(
            logits, marks, bias, penalties, position + 1
        )

    swap(patch, penalties, "penalized", make)


def _tokens_not_counted(patch: Patch) -> None:
    swap(patch, penalties, "count_tokens", lambda _: lambda marks, *_: marks)


def _counts_lost_when_resumed(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(request, vocab_size):
            return original(dataclasses.replace(request, output_ids=[]), vocab_size)

        return changed

    swap(patch, sampling_slots, "marks_row", make)


def _top_ties_to_the_higher_id(patch: Patch) -> None:
    def changed(logits: Any, count: int) -> Any:
        return logits.shape[1] - 1 - lax.top_k(logits[:, ::-1], count)[1]

    swap(patch, sampling_api, "top_tokens", lambda _: changed)


def _prompt_scored_again_when_resumed(patch: Patch) -> None:
    patch.setattr(Request, "num_scored", 0)


def _prompt_scored_a_row_late(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def changed(item, first_row):
            return original(item, first_row)[item.request.input_start == 0 :]

        return changed

    swap(patch, runner, "_reads", make)


def _stop_found_from_its_start_only(patch: Patch) -> None:
    swap(patch, output_text, "_borders", lambda _: lambda string: [0] * (len(string) + 1))


def _nothing_held_back(patch: Patch) -> None:
    original = output_text.OutputText._take

    def changed(self, piece):
        stop = original(self, piece)
        self._num_settled = len(self.text)
        return stop

    patch.setattr(output_text.OutputText, "_take", changed)


def _pattern_from_its_latest_start(patch: Patch) -> None:
    original = PatternMatcher.push

    def changed(self, char):
        self._threads.reverse()
        return original(self, char)

    patch.setattr(PatternMatcher, "push", changed)


SAMPLING_MUTANTS = (
    Mutant(
        "prompt counts as output",
        "frequency and presence penalties count the prompt's tokens",
        _prompt_counts_as_output,
        (f"{PENALTIES}::test_prompt_counts_for_repetition_only",),
    ),
    Mutant(
        "repetition forgets the prompt",
        "the repetition penalty looks at the output only",
        _repetition_forgets_the_prompt,
        (f"{PENALTIES}::test_prompt_counts_for_repetition_only",),
    ),
    Mutant(
        "an end counts as seen",
        "tokens that may end the output are penalised as if they had occurred",
        _an_end_counts_as_seen,
        (f"{PENALTIES}::test_prompt_counts_for_repetition_only",),
    ),
    Mutant(
        "neighbour's penalties",
        "one row with penalties in a tile changes all of them",
        _rows_without_penalties_take_them,
        (f"{PENALTIES}::test_rows_do_not_depend_on_their_neighbours",),
    ),
    Mutant(
        "end allowed a token early",
        "the mask of early ends ends before its position",
        _end_allowed_a_token_early,
        (f"{PENALTIES}::test_the_end_is_masked_up_to_its_position",),
    ),
    Mutant(
        "tokens not counted",
        "a step does not count what it samples",
        _tokens_not_counted,
        (f"{PENALTIES}::test_greedy_with_penalties_follows_a_numpy_loop",),
    ),
    Mutant(
        "counts lost when resumed",
        "a resumed request's output does not count",
        _counts_lost_when_resumed,
        (f"{ENGINE}::test_a_resumed_request_gives_what_it_would_have_given",),
    ),
    Mutant(
        "top ties to the higher id",
        "of equally likely tokens the higher id comes first",
        _top_ties_to_the_higher_id,
        (f"{PENALTIES}::test_top_tokens_are_sorted_and_ties_go_to_the_lower_id",),
    ),
    Mutant(
        "prompt scored again",
        "a resumed prefill gives the prompt's log-probabilities twice",
        _prompt_scored_again_when_resumed,
        (f"{ENGINE}::test_a_resumed_request_gives_what_it_would_have_given",),
    ),
    Mutant(
        "prompt scored a row late",
        "the first log-probability of every piece is missing",
        _prompt_scored_a_row_late,
        (f"{ENGINE}::test_log_probabilities_of_the_prompt_from_any_position",),
    ),
    Mutant(
        "stop found from its start only",
        "a false start hides a stop string that begins inside it",
        _stop_found_from_its_start_only,
        (f"{TEXT}::test_every_string_is_found_where_it_first_ends",),
    ),
    Mutant(
        "nothing held back",
        "a stream shows what becomes part of a stop",
        _nothing_held_back,
        (f"{TEXT}::test_only_what_may_become_a_stop_is_held_back",),
    ),
    Mutant(
        "pattern from its latest start",
        "a match is cut at its latest start instead of its first",
        _pattern_from_its_latest_start,
        (f"{PATTERNS}::test_first_match_equals_that_of_re",),
    ),
)
