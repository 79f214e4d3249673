"""The demo corpus: what becomes a document, how it is split, tokenised and cut."""

import numpy as np
import pytest

from examples import demo_corpus, demo_data, demo_quality, demo_tokenizer

MODULE = '''\
"""A module."""


class Stack:
    """Holds things."""

    def push(self, thing):
        """Put a thing on top.

        Nothing is returned.
        """
        self.things.append(thing)
        self.count += 1

    @property
    def top(
        self,
    ):  # the last one
        # a comment that leads to the body

        return self.things[-1] if self.things else None
'''


@pytest.fixture
def folder(tmp_path):
    for index in range(6):
        (tmp_path / f"module_{index}.py").write_text(MODULE.replace("Stack", f"Stack{index}"))
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "table.py").write_text("x = [" + "1234567890," * 50 + "]\n")
    return tmp_path


def test_documents_of_a_file():
    documents = demo_corpus.documents(demo_corpus.Source("a.py", MODULE))
    assert documents["module"] == [MODULE]
    assert documents["class"][0].startswith("class Stack:")
    push, top = documents["function"]
    assert push.startswith("def push(self, thing):\n    ")
    assert top.startswith("def top(\n")
    (chat,) = documents["chat"]
    assert "Write the Python function `push`. Put a thing on top.<|im_end|>" in chat
    assert "<think>\nNothing is returned.\n</think>\n\ndef push(self, thing):\n" in chat
    assert '"""' not in chat


def test_split_is_by_file_and_covers_all_good_files(folder, monkeypatch):
    monkeypatch.setattr(demo_corpus, "HELDOUT_BYTES", 2 * len(MODULE) + 10)
    corpus = demo_corpus.read_corpus(folder)
    names = [{source.path for source in part} for part in (corpus.training, corpus.heldout)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {f"module_{index}.py" for index in range(6)}
    assert len(names[1]) == 2
    assert corpus.provenance()["files"] == 6


def test_heldout_text_round_trip():
    sources = tuple(demo_corpus.Source(f"{i}.py", text) for i, text in enumerate((MODULE, "x\n")))
    text = demo_corpus.heldout_text(sources)
    assert [s.text for s in demo_corpus.parse_heldout(text)] == [MODULE, "x\n"]


def test_headers_end_with_their_colon_line():
    headers = demo_corpus.function_headers((demo_corpus.Source("a.py", MODULE),))
    assert sorted(headers) == [
        "def push(self, thing):\n",
        "def top(\n    self,\n):  # the last one\n",
    ]


def test_tokenizer_keeps_text_and_puts_added_tokens_last():
    tokenizer = demo_tokenizer.train_tokenizer([MODULE] * 3, vocab_size=330)
    text = "def f(x_1):\n    return  x_1\n\n\té 日 \r\n  \n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    added = demo_tokenizer.CONTROL_TOKENS + demo_tokenizer.TAG_TOKENS
    size = tokenizer.get_vocab_size()
    ids = [tokenizer.token_to_id(token) for token in added]
    assert ids == list(range(size - len(added), size))
    assert tokenizer.encode("<|im_start|>user").ids[0] == ids[1]
    # A line break and the indentation after it are one piece.
    assert "Ċ" + "Ġ" * 4 in tokenizer.encode("a\n    b").tokens


def test_dataset_round_trip_and_windows(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_corpus, "HELDOUT_BYTES", len(MODULE) + 10)
    dataset = demo_data.build_dataset(folder, vocab_size=300)
    dataset.save(tmp_path / "out")
    loaded = demo_data.Dataset.load(tmp_path / "out")
    np.testing.assert_array_equal(loaded.tokens, dataset.tokens)
    end = dataset.tokenizer.token_to_id(demo_corpus.END_OF_TEXT)
    assert all(loaded.tokens[start - 1] == end for start in loaded.starts[1:])
    windows = demo_data.epoch_windows(loaded, length=16, seed=3)
    assert windows.shape == ((len(loaded.tokens) - 1) // 16, 17)
    np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])
    counts = np.bincount(windows[:, 1:].ravel(), minlength=300)
    assert (counts <= np.bincount(loaded.tokens, minlength=300)).all()


def test_unigram_entropy_of_equal_frequencies():
    assert demo_data.unigram_entropy(np.arange(8).repeat(3)) == pytest.approx(np.log(8))


@pytest.mark.parametrize(
    ("continuation", "kept"),
    [
        ("\n    return 1\n<|endoftext|>junk", "\n    return 1\n"),
        ("\n    return 1\n\nx = 3\n    y", "\n    return 1\n\n"),
        (" pass\nclass A:", " pass\n"),
        ("\n        return 1\n\n    def g():\n", "\n        return 1\n\n"),
        ("\n    x = 1\n    return [1, 2", "\n    x = 1\n"),
    ],
)
def test_completion_is_cut_where_the_function_ends(continuation, kept):
    tokenizer = demo_tokenizer.train_tokenizer([MODULE], vocab_size=300)
    tokens = tokenizer.encode("def f():" + continuation).ids
    assert demo_quality.completed_function(tokenizer, tokens, "def f():") == "def f():" + kept
