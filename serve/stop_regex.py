"""Patterns that end a text, matched in linear time while the text grows.

Backtracking matchers can take exponential time on a short pattern, and cannot say which part of a
text may still become part of a match. Here all patterns of a request become one nondeterministic
automaton that takes a character at a time: the cost of a character is bounded by the number of
states. Patterns are written as for Python's `re`, without what needs backtracking (references,
lookaround, atomic groups) or what comes after the match (`$`, word boundaries).
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

# Parts of all patterns of a request, repetitions written out.
MAX_PARTS = 2000

_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:0[0-7]{0,2}|[0-3][0-7]{2}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
    r"|N\{[^}]+\}|[^0-9])",
    re.DOTALL,
)
_REPEAT = re.compile(r"([*+?])|\{(?!\})(\d*)(?:(,)(\d*))?\}")
_FLAGS = re.compile(r"\(\?([aimsux]+)\)")
_FLAGGED_GROUP = re.compile(r"\(\?([aimsux]*)(?:-([imsx]+))?:")
_FLAG_OF = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}
_REFUSED_GROUPS = {
    "(?=": "lookahead",
    "(?!": "lookahead",
    "(?<=": "lookbehind",
    "(?<!": "lookbehind",
    "(?>": "an atomic group",
    "(?(": "a condition",
    "(?P=": "a reference",
}

TEXT_START, LINE_START = 1, 2


@dataclasses.dataclass(frozen=True)
class _Char:
    """One character that `accepts` takes."""

    accepts: Callable[[str], bool]


@dataclasses.dataclass(frozen=True)
class _Start:
    """Nothing, where the text or a line starts."""

    where: int


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """Parts one after another."""

    parts: list["_Node"]


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One of several."""

    parts: list["_Node"]


@dataclasses.dataclass(frozen=True)
class _Repeat:
    """A part `low` to `high` times; None is without end."""

    part: "_Node"
    low: int
    high: int | None


_Node = _Char | _Start | _Sequence | _Choice | _Repeat


class _Parser:
    """Reads one pattern that `re` has accepted."""

    def __init__(self, pattern: str):
        self._pattern, self._at = pattern, 0

    def read(self) -> _Node:
        """Return the whole pattern."""
        return self._choice(0)

    def _refuse(self, what: str) -> ValueError:
        return ValueError(f"stop_regex {self._pattern!r} uses {what}, which is not supported")

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        match = expression.match(self._pattern, self._at)
        if match:
            self._at = match.end()
        return match

    def _next(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _choice(self, flags: int) -> _Node:
        parts: list[_Node] = []
        items: list[_Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            if self._next("|"):
                parts.append(_Sequence(items))
                items = []
            elif found := re.compile(r"\(\?([aimsux]+)\)").match(self._pattern, self._at):
                # Flags of the whole pattern stand at its start.
                self._at = found.end()
                flags |= self._flags(found.group(1))
            else:
                items.append(self._repeated(self._atom(flags)))
        if parts:
            return _Choice([*parts, _Sequence(items)])
        return items[0] if len(items) == 1 else _Sequence(items)

    def _flags(self, letters: str) -> int:
        if "x" in letters:
            raise self._refuse("the flag x")
        return functools.reduce(lambda flags, letter: flags | _FLAG_OF.get(letter, 0), letters, 0)

    def _atom(self, flags: int) -> _Node:
        if self._pattern.startswith("(", self._at):
            return self._group(flags)
        if self._next("^"):
            return _Start(LINE_START if flags & re.MULTILINE else TEXT_START)
        if self._next("$"):
            raise self._refuse("the end of the text")
        start = self._at
        if self._pattern[start] == "[":
            self._match(_CLASS)
        elif self._pattern[start] == "\\":
            if not self._match(_ESCAPE):
                raise self._refuse("a reference")
            letter = self._pattern[start + 1]
            if letter == "A":
                return _Start(TEXT_START)
            if letter in "bBZ":
                raise self._refuse(f"\\{letter}")
        else:
            self._at += 1
        return _Char(_accepts(self._pattern[start : self._at], flags))

    def _group(self, flags: int) -> _Node:
        for opening, what in _REFUSED_GROUPS.items():
            if self._pattern.startswith(opening, self._at):
                raise self._refuse(what)
        if self._next("(?#"):
            self._at = self._pattern.index(")", self._at) + 1
            return _Sequence([])
        if self._next("(?P<"):
            self._at = self._pattern.index(">", self._at) + 1
        elif match := self._match(_FLAGGED_GROUP):
            flags |= self._flags(match.group(1))
            flags &= ~self._flags(match.group(2) or "")
        else:
            self._next("(")
        inside = self._choice(flags)
        self._next(")")
        return inside

    def _repeated(self, node: _Node) -> _Node:
        match = self._match(_REPEAT)
        if match is None:
            return node
        if self._next("+"):
            raise self._refuse("a possessive repetition")
        # Greedy or not, the shortest match ends the text.
        self._next("?")
        sign, low, comma, high = match.groups()
        if sign:
            return _Repeat(node, int(sign == "+"), 1 if sign == "?" else None)
        least = int(low or 0)
        most = least if not comma else int(high) if high else None
        return _Repeat(node, least, most)


def _accepts(atom: str, flags: int) -> Callable[[str], bool]:
    """Return whether a character is what a one-character pattern matches."""
    if len(atom) == 1 and atom != "." and not flags & re.IGNORECASE:
        return atom.__eq__
    compiled = re.compile(atom, flags)
    return functools.lru_cache(1024)(lambda char: compiled.fullmatch(char) is not None)


@dataclasses.dataclass(eq=False)
class _State:
    """A place in the automaton.

    Attributes:
      accepts: the character that leads on; None if none is needed.
      where: what must start here, for a state without a character; 0 for nothing.
      next: places to go on to.
    """

    accepts: Callable[[str], bool] | None = None
    where: int = 0
    next: list["_State"] = dataclasses.field(default_factory=list)


class Automaton:
    """All patterns of a request at once. Read-only, so that requests may share it.

    Attributes:
      start: where a match begins.
      end: where it ends.
    """

    def __init__(self, patterns: Sequence[str]):
        """Compile the patterns.

        Raises:
          ValueError: one cannot be matched here, matches the empty text, or all are too large.
        """
        self._num_parts = 0
        self.end, self.start = _State(), _State()
        for pattern in patterns:
            first = self._build(_parsed(pattern), self.end)
            reached: dict[int, _State] = {}
            _spread(first, TEXT_START | LINE_START, reached)
            if id(self.end) in reached:
                raise ValueError(f"stop_regex {pattern!r} matches the empty text")
            self.start.next.append(first)

    def _build(self, node: _Node, then: _State) -> _State:
        """The state that begins `node` and goes on to `then`."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ValueError(f"stop_regex patterns have more than {MAX_PARTS} parts")
        match node:
            case _Char(accepts):
                return _State(accepts, next=[then])
            case _Start(where):
                return _State(where=where, next=[then])
            case _Sequence(parts):
                for part in reversed(parts):
                    then = self._build(part, then)
                return then
            case _Choice(parts):
                return _State(next=[self._build(part, then) for part in parts])
            case _Repeat(part, low, high):
                return self._repeat(part, low, high, then)

    def _repeat(self, part: _Node, low: int, high: int | None, then: _State) -> _State:
        state = then
        if high is None:
            state = _State(next=[then])
            state.next.append(self._build(part, state))
        else:
            for _ in range(high - low):
                state = _State(next=[self._build(part, state), then])
        for _ in range(low):
            state = self._build(part, state)
        return state


def _parsed(pattern: str) -> _Node:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"stop_regex {pattern!r} is not a pattern: {error}") from error
    return _Parser(pattern).read()


def _spread(state: _State, where: int, reached: dict[int, _State]) -> list[_State]:
    """Add to `reached` what a state leads to without a character; return what is new there."""
    new, waiting = [], [state]
    while waiting:
        at = waiting.pop()
        if id(at) not in reached:
            reached[id(at)] = at
            new.append(at)
            if at.accepts is None and at.where & where == at.where:
                waiting.extend(at.next)
    return new


@functools.lru_cache(64)
def compile_patterns(patterns: tuple[str, ...]) -> Automaton:
    """Return the automaton of some patterns; see `Automaton`."""
    return Automaton(patterns)


class PatternMatcher:
    """Matches patterns against one text, character by character.

    Attributes:
      num_pending: characters at the end of the text that may be the beginning of a match.
    """

    def __init__(self, patterns: tuple[str, ...]):
        """Start before the first character. Raises as `Automaton` does."""
        self._automaton = compile_patterns(patterns)
        self._length = 0
        self.num_pending = 0
        # States that wait for a character and where their match began, the earliest first: what
        # a state leads to need not be looked at again for a later one.
        self._threads: list[tuple[_State, int]] = []
        self._enter(self._automaton.start, 0, TEXT_START | LINE_START, {})

    def push(self, char: str) -> int:
        """Take the next character; return the length of the longest match it ends, or 0."""
        where = LINE_START if char == "\n" else 0
        before, self._threads = self._threads, []
        self._length += 1
        matched = self._length
        reached: dict[int, _State] = {}
        for state, begin in before:
            if state.accepts is not None and state.accepts(char):
                is_end = self._enter(state.next[0], begin, where, reached)
                matched = min(matched, begin) if is_end else matched
        first = self._threads[0][1] if self._threads else self._length
        self.num_pending = self._length - first
        self._enter(self._automaton.start, self._length, where, reached)
        return self._length - matched

    def _enter(self, state: _State, begin: int, where: int, reached: dict[int, _State]) -> bool:
        """Go on from a state; return whether that is the first to end a match here."""
        new = _spread(state, where, reached)
        self._threads += [(other, begin) for other in new if other.accepts is not None]
        return self._automaton.end in new
