"""Prompt lookup against a search through the whole text."""

import pytest

from spec import PromptLookup


def searched(tokens: list[int], most: int) -> list[int]:
    """What followed the newest tokens when they last occurred before, the longest match first."""
    for size in (4, 3, 2):
        newest = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(newest) == size and tokens[start : start + size] == newest:
                text = list(tokens)
                for at in range(start + size, start + size + most):
                    text.append(text[at])
                return text[len(tokens) :]
    return []


def test_drafts_are_those_of_a_search(rng):
    num_found = 0
    for _ in range(200):
        tokens = rng.integers(0, 4, rng.integers(1, 60)).tolist()
        lookup, at = PromptLookup(), 0
        while at < len(tokens):
            step = int(rng.integers(1, 9))
            lookup.extend(tokens[at : at + step])
            at += step
            most = int(rng.integers(1, 9))
            known = tokens[:at]
            assert lookup.draft(most) == searched(known, most)
            assert len(lookup) == len(known)
            num_found += bool(lookup.draft(most))
    assert num_found > 500


@pytest.mark.parametrize("sizes", [{"max_ngram": 1}, {"min_ngram": 0}, {"min_ngram": 5}])
def test_lengths_of_ngrams_are_checked(sizes):
    with pytest.raises(ValueError, match="n-grams need 1 <="):
        PromptLookup(**sizes)
