"""The text of an output while it grows: detokenised, searched for stops, cut at the first."""

from collections.abc import Iterable

from serve.sampling_params import SamplingParams
from serve.stop_regex import PatternMatcher
from serve.tokenizer import Tokenizer


class StringMatcher:
    """Looks for one string in a text, character by character.

    Attributes:
      num_pending: characters at the end of the text that may be the beginning of a match.
    """

    def __init__(self, string: str):
        """Prepare for a string that is not empty."""
        self._string = string
        self._shorter = _borders(string)
        self.num_pending = 0

    def push(self, char: str) -> int:
        """Take the next character; return the length of the match it ends, or 0."""
        length = self.num_pending
        while length and self._string[length] != char:
            length = self._shorter[length]
        length += self._string[length] == char
        if length == len(self._string):
            self.num_pending = self._shorter[length]
            return length
        self.num_pending = length
        return 0


def _borders(string: str) -> list[int]:
    """For each length, that of the longest proper prefix which ends the prefix of that length."""
    borders = [0, 0]
    for char in string[1:]:
        length = borders[-1]
        while length and string[length] != char:
            length = borders[length]
        borders.append(length + (string[length] == char))
    return borders


class OutputText:
    """What a request's output reads as.

    The text ends with the first character at which a stop string or pattern is complete; of
    several that this character completes, the longest counts. So the text does not depend on
    where tokens begin and end.

    Attributes:
      text: all of it, without the stop unless that is to be kept.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        """Start with no output."""
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._keeps_stop = params.no_stop_trim
        self._matchers: list[StringMatcher | PatternMatcher] = [
            StringMatcher(stop) for stop in params.stop or ()
        ]
        if params.stop_regex:
            self._matchers.append(PatternMatcher(tuple(params.stop_regex)))
        self.text = ""
        # Never shrinks, and the text never becomes shorter than that.
        self._num_settled = 0
        self._is_finished = False

    @property
    def shown(self) -> str:
        """What no later token can take back: all but what may become part of a stop.

        Another thread than the one that pushes may ask.
        """
        return self.text[: self._num_settled]

    def push(self, ids: Iterable[int]) -> str | None:
        """Take the next tokens; return the stop that they complete, which ends the text."""
        for token in ids:
            stop = self._take(self._detokenizer.push([token]))
            if stop is not None:
                return stop
        return None

    def push_stop_id(self, token: int) -> None:
        """End the text with a token that stops the output, shown only if stops are kept."""
        if self._keeps_stop:
            self.text += self._detokenizer.push([token])
        self.finish()

    def finish(self) -> None:
        """End the text: an unfinished character becomes U+FFFD. May be called twice."""
        if not self._is_finished:
            self._end(self.text + self._detokenizer.flush())

    def _end(self, text: str) -> None:
        self.text, self._is_finished = text, True
        self._num_settled = len(text)

    def _take(self, piece: str) -> str | None:
        for at, char in enumerate(piece if self._matchers else ""):
            length = max(matcher.push(char) for matcher in self._matchers)
            if length:
                text = self.text + piece[: at + 1]
                self._end(text if self._keeps_stop else text[:-length])
                return text[-length:]
        self.text += piece
        pending = max((matcher.num_pending for matcher in self._matchers), default=0)
        # Nothing is trimmed where stops are kept.
        self._num_settled = len(self.text) - (0 if self._keeps_stop else pending)
        return None
