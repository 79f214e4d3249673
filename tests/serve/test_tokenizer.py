"""The tokenizer against transformers, on files written here; the detokenizer against decoding."""

import json

import numpy as np
import pytest
import transformers

from serve.tokenizer import Tokenizer
from tests.serve import tokenizer_files

TEXTS = [
    "",
    " ",
    "Hello, world!  Two spaces\n\n\tand tabs \r\n",
    "don't WE'LL I'm 2024-01-02",
    "naïve façade decomposed: e\u0301 o\u0308",
    "日本語 東京 🙂👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>\n<think>x</think>",
    "a\u0000b\u00a0c\ufffd",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tokenizer_files.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ours(directory):
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def theirs(directory):
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_match_transformers(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        decoded = ours.decode(ids, skip_special_tokens=skip)
        assert decoded == theirs.decode(ids, skip_special_tokens=skip)


def test_decode_of_any_ids_matches_transformers(ours, theirs, rng):
    for _ in range(300):
        ids = rng.integers(0, ours.vocab_size + 5, size=rng.integers(1, 12)).tolist()
        for skip in (True, False):
            decoded = ours.decode(ids, skip_special_tokens=skip)
            assert decoded == theirs.decode(ids, skip_special_tokens=skip), ids


def test_pieces_add_up_and_never_hold_a_broken_character(ours, rng):
    ids = ours.encode("".join(TEXTS))
    for _ in range(30):
        cuts = np.sort(rng.integers(0, len(ids) + 1, size=rng.integers(0, 40)))
        for skip in (True, False):
            stream = ours.detokenizer(skip_special_tokens=skip)
            pieces = [stream.push(part.tolist()) for part in np.split(np.array(ids, int), cuts)]
            # The text has one U+FFFD of its own and no broken character.
            assert "".join(pieces).count("\ufffd") == 1
            assert "".join(pieces) == ours.decode(ids, skip_special_tokens=skip)
            assert stream.flush() == ""


def test_a_split_character_comes_out_whole_and_a_broken_one_at_the_end(ours):
    emoji = ours.encode("🧭")
    assert len(emoji) > 1
    stream = ours.detokenizer()
    assert [stream.push([i]) for i in emoji] == [""] * (len(emoji) - 1) + ["🧭"]
    assert stream.push(emoji[:-1]) == ""
    assert stream.flush() == ours.decode(emoji[:-1])
    assert stream.push(emoji) == "🧭"


def test_pieces_of_any_ids_add_up(ours, rng):
    for _ in range(200):
        ids = rng.integers(0, ours.vocab_size, size=rng.integers(1, 12)).tolist()
        stream = ours.detokenizer(skip_special_tokens=False)
        pieces = [stream.push([i]) for i in ids]
        assert "".join(pieces) + stream.flush() == ours.decode(ids, skip_special_tokens=False)


def test_special_ids_and_ends(ours):
    assert ours.special_ids == {0, 1, 2}
    assert ours.eos_token_ids == (0, 2)
    assert ours.generation_defaults["temperature"] == 0.7
    assert ours.token_text(ours.encode("東京")[0]) == "東京"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": [7, 5]}, (5, 7)),
        ({"text_config": {"eos_token_id": 5}}, {}, (5,)),
        ({"text_config": {}}, {"eos_token_id": 3}, (3,)),
        ({}, None, ()),
    ],
)
def test_ends_are_the_union_of_both_files(tmp_path, config, generation, expected):
    tokenizer_files.write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == expected


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer.json in"):
        Tokenizer.from_directory(tmp_path)
    tokenizer_files.write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="the chat template, line 1"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="this model has no chat template"):
        Tokenizer.from_directory(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="generation_config.json must hold an object, got list"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json is not JSON"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(ValueError, match="only byte-level tokenizers are supported"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
