"""Stop patterns against Python's `re` tried on every piece of a text, and what they cost."""

import itertools
import re
import time

import pytest

from serve.stop_regex import MAX_PARTS, PatternMatcher, compile_patterns

PATTERNS = (
    "ab",
    "a|bc|abc",
    "a+b",
    "a*?b",
    "(a|b)*c",
    "[^a]c",
    "a{2}",
    "a{2,}b",
    "b{,2}c",
    "(?:ab){1,2}c",
    "(?P<x>a)(?#not b)b",
    "a.c",
    "(?s)a.c",
    r"\w\d",
    r"[\d\]-]b",
    r"[]a]c",
    "^b",
    r"\Aab",
    "(?m)^ab",
    "(?i)B1",
    "b(?i:A)c",
    "(?i:a(?-i:B))",
    r"\x61\n",
    "(a?){3}b",
    "(a|aa)+c",
    "((a*)*)*b",
    "é.",
    "b{|c{a|1}|a{}",
)
LETTERS = "abcAB1{}\né-]"


def first_match(patterns: tuple[str, ...], text: str) -> tuple[int, int] | None:
    """(start, end) of the longest match that ends first, by trying all pieces."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            # Nothing after the piece, and anchors see what stands before it.
            if any(re.compile(p).fullmatch(text, start, end) for p in patterns):
                return start, end
    return None


def found(patterns: tuple[str, ...], text: str) -> tuple[int, int] | None:
    """The same by the matcher."""
    matcher = PatternMatcher(patterns)
    for end, char in enumerate(text, 1):
        length = matcher.push(char)
        if length:
            return end - length, end
    return None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_first_match_equals_that_of_re(pattern, rng):
    texts = ["".join(t) for n in (1, 2, 3) for t in itertools.product("abc", repeat=n)]
    texts += ["".join(rng.choice(list(LETTERS), 12)) for _ in range(300)]
    results = [found((pattern,), text) for text in texts]
    assert results == [first_match((pattern,), text) for text in texts]
    assert any(results)


def test_of_several_patterns_the_first_to_end_counts(rng):
    for _ in range(150):
        chosen = tuple(rng.choice(PATTERNS, 3, replace=False))
        text = "".join(rng.choice(list(LETTERS), 12))
        assert found(chosen, text) == first_match(chosen, text), (chosen, text)


def test_what_may_become_a_match_is_pending(rng):
    for pattern in PATTERNS:
        for _ in range(50):
            text = "".join(rng.choice(list(LETTERS), 12))
            matcher, settled = PatternMatcher((pattern,)), 0
            for at, char in enumerate(text, 1):
                length = matcher.push(char)
                if length:
                    assert at - length >= settled, (pattern, text)
                    break
                # Once it is certain that no match begins before here, that stays so.
                assert at - matcher.num_pending >= settled
                settled = at - matcher.num_pending
    matcher = PatternMatcher(("ab+c",))
    pending = [matcher.push(char) or matcher.num_pending for char in "xabbxab"]
    assert pending == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "stop_regex '(' is not a pattern: "),
        ("a{2,1}", "stop_regex 'a{2,1}' is not a pattern: "),
        ("a*", "stop_regex 'a*' matches the empty text"),
        ("^", "stop_regex '^' matches the empty text"),
        ("a$", "stop_regex 'a$' uses the end of the text, which is not supported"),
        (r"a\b", r"stop_regex 'a\\b' uses \b, which is not supported"),
        (r"(a)\1", r"stop_regex '(a)\\1' uses a reference, which is not supported"),
        ("(?P<x>a)(?P=x)", "stop_regex '(?P<x>a)(?P=x)' uses a reference, which is not supported"),
        ("(?=a)b", "stop_regex '(?=a)b' uses lookahead, which is not supported"),
        ("(?<!a)b", "stop_regex '(?<!a)b' uses lookbehind, which is not supported"),
        ("(?>a)b", "stop_regex '(?>a)b' uses an atomic group, which is not supported"),
        ("a++b", "stop_regex 'a++b' uses a possessive repetition, which is not supported"),
        ("(?x)a b", "stop_regex '(?x)a b' uses the flag x, which is not supported"),
        ("(?x:a b)", "stop_regex '(?x:a b)' uses the flag x, which is not supported"),
        ("((a{99}){99}){99}", f"stop_regex patterns have more than {MAX_PARTS} parts"),
        ("((((){999}){999}){999})a", f"stop_regex patterns have more than {MAX_PARTS} parts"),
        ("(a{0,4000000000}){9}b", f"stop_regex patterns have more than {MAX_PARTS} parts"),
    ],
)
def test_what_cannot_be_matched_is_refused(pattern, message):
    with pytest.raises(ValueError) as error:
        compile_patterns((pattern,))
    assert str(error.value).startswith(message)


def test_deep_nesting_is_matched_or_refused():
    deep = "(" * 127 + "a" + ")" * 127
    assert found((deep,), "ba") == (1, 2)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+b", "(a|a)*b", "(.*)*x", "(a?){100}a{100}b"])
def test_patterns_that_make_a_backtracking_matcher_hang_cost_little(pattern):
    start = time.process_time()
    assert found((pattern,), "a" * 3000) is None
    # Exponential in the length of the text if it backtracked.
    assert time.process_time() - start < 10
