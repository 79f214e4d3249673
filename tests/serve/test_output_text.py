"""The text of an output: stops found in it, what may be shown of it, against brute force."""

import dataclasses
import itertools

import pytest
import transformers

from serve.output_text import OutputText, StringMatcher
from serve.request import Request, StepResult
from serve.sampling_params import SamplingParams
from serve.tokenizer import Tokenizer
from tests.serve import tokenizer_files
from tests.serve.test_stop_regex import first_match

ALPHABET = ["a", "b", "ab", " ", "é", "日本", "🙂", "\n", "</s>", "def "]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tokenizer_files.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_directory(directory)


@dataclasses.dataclass
class Expected:
    """What an output reads as, by looking at whole texts only.

    Attributes:
      num_ids: tokens up to the one that completes the first stop.
      text: with the stop kept and trimmed.
      matched: the stop, or None.
    """

    num_ids: int
    kept: str
    trimmed: str
    matched: str | None


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids without the bytes of an unfinished character."""
    data = tokenizer.token_bytes(ids, skip_special_tokens=True)
    for cut in range(4):
        text = data[: len(data) - cut].decode("utf-8", "replace")
        if not text.endswith("\ufffd"):
            return text
    return data.decode("utf-8", "replace")


def expected(tokenizer: Tokenizer, ids: list[int], stops: tuple, patterns: tuple) -> Expected:
    """The first stop by trying all pieces of the whole text, then the first token that shows it."""
    escaped = tuple("".join(f"\\U{ord(c):08x}" for c in stop) for stop in stops)
    text = whole(tokenizer, ids)
    match = first_match((*escaped, *patterns), text)
    if match is None:
        full = tokenizer.decode(ids)
        return Expected(len(ids), full, full, None)
    begin, end = match
    count = next(n for n in range(len(ids) + 1) if len(whole(tokenizer, ids[:n])) >= end)
    return Expected(count, text[:end], text[:begin], text[begin:end])


def random_ids(tokenizer: Tokenizer, rng, size: int) -> list[int]:
    """Ids of a random text, some as the tokenizer has it and some byte by byte."""
    ids: list[int] = []
    while len(ids) < size:
        piece = "".join(rng.choice(ALPHABET, int(rng.integers(1, 4))))
        if rng.random() < 0.5:
            ids += tokenizer.encode(piece)
        else:
            ids += [i for byte in piece.encode() for i in single_byte(tokenizer, byte)]
    return ids


def single_byte(tokenizer: Tokenizer, byte: int) -> list[int]:
    """The token that is one byte."""
    ids = range(tokenizer.vocab_size)
    same = (
        i for i in ids if tokenizer.token_bytes([i], skip_special_tokens=False) == bytes([byte])
    )
    return [next(same)]


CASES = [
    (("a",), ()),
    (("ab", "b"), ()),
    (("abab", "ba", "aab"), ()),
    (("日本", "本a"), ()),
    (("🙂🙂", "é"), ()),
    ((), ("a+b",)),
    ((), ("[ab]{3}", "日.")),
    (("</s>", "def "), (r"\n\s*\S",)),
    (("never",), ("x|y",)),
    (("ab ab", " "), (r"é.*🙂",)),
]


@pytest.mark.parametrize(("stops", "patterns"), CASES)
@pytest.mark.parametrize("keeps", [False, True])
def test_stops_equal_a_search_of_the_whole_text(tokenizer, rng, stops, patterns, keeps):
    params = SamplingParams(stop=stops, stop_regex=patterns, no_stop_trim=keeps)
    num_matched = 0
    for _ in range(60):
        ids = random_ids(tokenizer, rng, int(rng.integers(1, 25)))
        want = expected(tokenizer, ids, stops, patterns)
        text, matched, shown, count = OutputText(tokenizer, params), None, "", 0
        for token in ids:
            matched = text.push([token])
            count += 1
            # What was shown stays.
            assert text.shown.startswith(shown)
            shown = text.shown
            if matched is not None:
                break
        else:
            text.finish()
        assert matched == want.matched
        assert count == want.num_ids
        assert text.text == text.shown == (want.kept if keeps else want.trimmed)
        assert text.text.startswith(shown)
        num_matched += matched is not None
        # Several at once are the same.
        together = OutputText(tokenizer, params)
        assert together.push(ids) == matched
        together.finish()
        assert together.text == text.text
    assert (num_matched > 10) == ("never" not in stops)


def test_only_what_may_become_a_stop_is_held_back(tokenizer):
    text = OutputText(tokenizer, SamplingParams(stop=["</s>", "ab"], stop_regex="x+y"))
    shown = []
    for piece in ["1<", "/s", "<", "2a", "xx", "z", "a"]:
        text.push(tokenizer.encode(piece))
        shown.append(text.shown)
    assert shown == ["1", "1", "1</s", "1</s<2", "1</s<2a", "1</s<2axxz", "1</s<2axxz"]
    text.finish()
    assert text.shown == text.text == "1</s<2axxza"


def test_an_unfinished_character_is_held_back_and_shown_at_the_end(tokenizer):
    first, *others = (i for b in "é".encode() for i in single_byte(tokenizer, b))
    text = OutputText(tokenizer, SamplingParams())
    text.push([first])
    assert text.shown == ""
    text.push(others)
    assert text.shown == "é"
    text.push([first])
    assert text.shown == "é"
    text.finish()
    text.finish()
    assert text.text == "é\ufffd"


@pytest.mark.parametrize("alphabet", ["ab", "abc"])
def test_every_string_is_found_where_it_first_ends(alphabet):
    strings = ["".join(s) for n in (1, 2, 3, 4) for s in itertools.product(alphabet, repeat=n)]
    texts = ["".join(t) for t in itertools.product(alphabet, repeat=6)]
    for string in strings:
        for text in texts:
            matcher = StringMatcher(string)
            end = next((at for at, char in enumerate(text, 1) if matcher.push(char)), None)
            at = text.find(string)
            assert end == (None if at < 0 else at + len(string))
            if end is None:
                pending = max(n for n in range(len(string)) if text.endswith(string[:n]))
                assert matcher.num_pending == pending


def request_of(tokenizer: Tokenizer, **params) -> Request:
    """A request whose rows are the prompt's."""
    checked = SamplingParams(**params)
    return Request(
        rid="a",
        prompt_ids=[1],
        params=checked,
        seed=0,
        eos_ids=frozenset(tokenizer.eos_token_ids),
        output_text=OutputText(tokenizer, checked),
        committed_len=1,
    )


def test_a_request_ends_with_the_token_that_completes_a_stop(tokenizer):
    ids = tokenizer.encode("one two STOP three")
    request = request_of(tokenizer, stop=["STOP"])
    request.take(StepResult(request, ids))
    assert request.finish_reason == {"type": "stop", "matched": "STOP"}
    assert request.output_text and request.output_text.text == "one two "
    text = tokenizer.decode(request.output_ids)
    assert "STOP" in text and "STOP" not in tokenizer.decode(request.output_ids[:-1])


def test_the_text_that_a_pattern_matched_is_named(tokenizer):
    request = request_of(tokenizer, stop_regex=r"\d{3}")
    request.take(StepResult(request, tokenizer.encode("in 12345 ways")))
    assert request.finish_reason == {"type": "stop", "matched": "123"}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "ab"),
        ({"no_stop_trim": True}, "ab"),
        ({"no_stop_trim": True, "skip_special_tokens": False}, "ab<|im_end|>"),
        ({"skip_special_tokens": False}, "ab"),
        ({"ignore_eos": True, "max_new_tokens": 3}, "ab"),
        ({"ignore_eos": True, "max_new_tokens": 3, "skip_special_tokens": False}, "ab<|im_end|>"),
    ],
)
def test_text_of_an_output_that_a_stop_id_ends(tokenizer, more, text):
    (end,) = tokenizer.encode("<|im_end|>")
    ids = [*(i for b in b"ab" for i in single_byte(tokenizer, b)), end]
    request = request_of(tokenizer, **more)
    request.take(StepResult(request, [*ids, 1, 1]))
    assert request.output_ids == ids
    ends_early = not more.get("ignore_eos")
    assert request.finish_reason == (
        {"type": "stop", "matched": end} if ends_early else {"type": "length", "length": 3}
    )
    assert request.output_text and request.output_text.text == text


def test_a_stop_on_the_last_token_counts_as_a_stop(tokenizer):
    request = request_of(tokenizer, stop="b", max_new_tokens=1)
    request.take(StepResult(request, single_byte(tokenizer, ord("b"))))
    assert request.finish_reason == {"type": "stop", "matched": "b"}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("spaces", [True, False])
def test_special_tokens_read_as_in_transformers(directory, tokenizer, rng, skip, spaces):
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    for _ in range(30):
        ids = random_ids(tokenizer, rng, 12)
        for at in rng.integers(0, 12, 4):
            ids.insert(int(at), int(rng.choice([0, 1, 2, 424])))
        text = OutputText(tokenizer, params)
        text.push(ids)
        text.finish()
        assert text.text == theirs.decode(
            ids,
            skip_special_tokens=skip,
            spaces_between_special_tokens=spaces,
            clean_up_tokenization_spaces=False,
        )
