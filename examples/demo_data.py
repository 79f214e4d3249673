"""Make the demo models' training data: tokenizer, tokenised documents, held-out text.

    python -m examples.demo_data --out .carry/demo

One folder then holds all that training needs, so that it can be copied to another machine and
train there on exactly the same corpus.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples import demo_corpus, demo_tokenizer

# Chats repeat what the functions say; this many of them teach the form.
MAX_CHATS = 4_000
HELDOUT_NAME = "heldout.txt"


@dataclass(frozen=True)
class Dataset:
    """Tokenised corpus.

    Attributes:
      tokens: All training documents in a row, each ending with the end-of-text token.
      starts: First token of each document, and the number of tokens at the end.
      heldout: Tokens of the held-out files, likewise in a row.
      heldout_text: Their text.
      provenance: As `Corpus.provenance`.
      tokenizer: The tokenizer that made the tokens.
    """

    tokens: np.ndarray
    starts: np.ndarray
    heldout: np.ndarray
    heldout_text: str
    provenance: dict[str, str | int]
    tokenizer: Tokenizer

    def save(self, directory: Path) -> None:
        """Write the dataset to a folder."""
        directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(directory / "tokenizer.json"))
        (directory / HELDOUT_NAME).write_text(self.heldout_text)
        (directory / "provenance.json").write_text(json.dumps(self.provenance, indent=2) + "\n")
        np.savez_compressed(
            directory / "tokens.npz", tokens=self.tokens, starts=self.starts, heldout=self.heldout
        )

    @classmethod
    def load(cls, directory: Path) -> "Dataset":
        """Read a folder written by `save`."""
        arrays = np.load(directory / "tokens.npz")
        return cls(
            tokens=arrays["tokens"],
            starts=arrays["starts"],
            heldout=arrays["heldout"],
            heldout_text=(directory / HELDOUT_NAME).read_text(),
            provenance=json.loads((directory / "provenance.json").read_text()),
            tokenizer=Tokenizer.from_file(str(directory / "tokenizer.json")),
        )


def build_dataset(folder: Path | None = None, vocab_size: int = demo_tokenizer.VOCAB_SIZE):
    """Read the corpus, train the tokenizer on its training files and tokenise everything.

    Args:
      folder: Python sources; the running interpreter's standard library if None.
      vocab_size: Entries of the tokenizer.
    """
    corpus = demo_corpus.read_corpus(folder)
    training = [source.text for source in corpus.training]
    tokenizer = demo_tokenizer.train_tokenizer(training, vocab_size)
    texts = [text for source in corpus.training for text in _training_texts(source)]
    chats = [text for text in texts if text.startswith("<|im_start|>")]
    dropped = set(chats[MAX_CHATS:])
    encoded = _encode(tokenizer, [text for text in texts if text not in dropped])
    heldout = demo_corpus.heldout_text(corpus.heldout)
    return Dataset(
        tokens=np.concatenate(encoded),
        starts=np.cumsum([0] + [len(document) for document in encoded]),
        heldout=np.asarray(tokenizer.encode(heldout).ids, np.uint16),
        heldout_text=heldout,
        provenance=corpus.provenance(),
        tokenizer=tokenizer,
    )


def _training_texts(source: demo_corpus.Source) -> list[str]:
    return [text for texts in demo_corpus.documents(source).values() for text in texts]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    end = tokenizer.token_to_id(demo_corpus.END_OF_TEXT)
    encodings = tokenizer.encode_batch_fast(texts)
    return [np.asarray([*encoding.ids, end], np.uint16) for encoding in encodings]


def epoch_windows(dataset: Dataset, *, length: int, seed: int) -> np.ndarray:
    """Return the corpus as rows of length + 1 tokens, in a document order drawn from the seed.

    Rows overlap by one token, so that each token is a target once.
    """
    order = np.random.default_rng(seed).permutation(len(dataset.starts) - 1)
    pieces = [dataset.tokens[dataset.starts[i] : dataset.starts[i + 1]] for i in order]
    return token_windows(np.concatenate(pieces), length=length)


def token_windows(tokens: np.ndarray, *, length: int) -> np.ndarray:
    """Cut tokens into rows of length + 1 that overlap by one; a shorter rest is dropped."""
    count = (len(tokens) - 1) // length
    index = np.arange(count)[:, None] * length + np.arange(length + 1)[None, :]
    return tokens[index].astype(np.int32)


def unigram_entropy(tokens: np.ndarray) -> float:
    """Return the entropy in nats of the token frequencies."""
    counts = np.bincount(tokens).astype(np.float64)
    frequencies = counts[counts > 0] / counts.sum()
    return float(-np.sum(frequencies * np.log(frequencies)))


def main() -> None:
    """Build the dataset and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--corpus", type=Path, help="folder of Python files to use instead")
    arguments = parser.parse_args()
    dataset = build_dataset(arguments.corpus)
    dataset.save(arguments.out)
    print(json.dumps(dataset.provenance))
    print(
        f"{len(dataset.tokens):,} training tokens in {len(dataset.starts) - 1:,} documents, "
        f"{len(dataset.heldout):,} held-out tokens of {len(dataset.heldout_text):,} characters, "
        f"unigram entropy {unigram_entropy(dataset.heldout):.3f} nats"
    )


if __name__ == "__main__":
    main()
