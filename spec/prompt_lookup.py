"""Prompt lookup: drafts are what followed the newest tokens when they last occurred."""

from collections.abc import Iterable

MAX_NGRAM = 4
MIN_NGRAM = 2


class PromptLookup:
    """Tokens of one sequence, indexed by their n-grams.

    Each token costs a few dictionary entries, once; a draft costs a few lookups.
    """

    def __init__(self, *, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM):
        """Start empty.

        Args:
          max_ngram, min_ngram: lengths of the newest tokens to look for, the longest first.

        Raises:
          ValueError: no such lengths.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-grams need 1 <= {min_ngram} <= {max_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        # Where the token after the last occurrence of each n-gram stands.
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add the next tokens of the sequence."""
        for token in tokens:
            end = len(self._tokens)
            for size in self._sizes:
                # The n-gram that ends the sequence is indexed once something follows it.
                if end >= size:
                    self._after[tuple(self._tokens[end - size : end])] = end
            self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """`most` tokens that may come next, or none.

        What followed may run into the newest tokens and beyond: a text that repeats itself goes on
        repeating itself.
        """
        end = len(self._tokens)
        for size in self._sizes:
            at = self._after.get(tuple(self._tokens[end - size : end])) if end >= size else None
            if at is not None:
                period = end - at
                return [self._tokens[at + i % period] for i in range(most)]
        return []
