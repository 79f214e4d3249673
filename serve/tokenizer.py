"""Text to token ids and back, as the model's own files say.

Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `config.json` and
`generation_config.json` of a model directory; nothing is fetched, no code of the model is run.
Only byte-level tokenizers are taken, which is what Qwen models have: there a token is a string
of bytes, and a text is the concatenation of its tokens.
"""

import codecs
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from serve import chat_template

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@functools.cache
def _byte_of_letter() -> Mapping[str, int]:
    """Return the letters that stand for the 256 bytes in a byte-level vocabulary.

    Printable bytes stand for themselves; the others take the letters from U+0100 on, in order.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    themselves = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = sorted(set(range(256)) - set(themselves.values()))
    return themselves | dict(zip(letters[len(themselves) :], others, strict=True))


class IncrementalDetokenizer:
    """Turns ids into text piece by piece.

    The pieces, the one of `flush` included, add up to `Tokenizer.decode` of all ids. A character
    comes out once its last byte is in, never in part; bytes that can be no character come out as
    U+FFFD, as soon as that is certain.
    """

    def __init__(self, tokenizer: "Tokenizer", *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; return the text they complete, which may be empty."""
        skip = self._skip_special_tokens
        return self._decoder.decode(self._tokenizer.token_bytes(ids, skip_special_tokens=skip))

    def flush(self) -> str:
        """Return the text of an unfinished character and start anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer. Read-only, so threads may share it.

    Attributes:
        backend: the vocabulary and its rules.
        eos_token_ids: every id that ends a text, ascending: the model's and the generation
            configuration's together.
        special_ids: ids that `skip_special_tokens` leaves out.
        chat: the chat templates, or None if the model has none.
        generation_defaults: `generation_config.json`, empty if there is none.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    chat: chat_template.ChatTemplate | None
    generation_defaults: Mapping[str, Any]

    @classmethod
    def from_directory(cls, directory: str | pathlib.Path) -> "Tokenizer":
        """Return the tokenizer of a model directory.

        Raises:
            FileNotFoundError: there is no `tokenizer.json`.
            ValueError: a file is malformed, or the tokenizer is not byte-level.
        """
        directory = pathlib.Path(directory)
        settings = _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        special_tokens = _special_tokens(settings)
        backend = _backend(directory / "tokenizer.json", special_tokens)
        added = backend.get_added_tokens_decoder()
        return cls(
            backend=backend,
            eos_token_ids=_eos_token_ids(_read_json(directory / "config.json"), generation),
            special_ids=frozenset(i for i, token in added.items() if token.special),
            chat=_chat(directory, settings, special_tokens),
            generation_defaults=generation,
        )

    @property
    def vocab_size(self) -> int:
        """Return the number of ids that have a token; the model's logits may be wider."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; special tokens spelled out in it count as such.

        Args:
            text: any text.
            add_special_tokens: add what `tokenizer.json` puts around a text (Qwen's: nothing).
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids without a token count for nothing."""
        skip = skip_special_tokens
        return self.token_bytes(ids, skip_special_tokens=skip).decode("utf-8", "replace")

    def token_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """Return the bytes of `ids`, which may end inside a character."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self._bytes_of(token_id) for token_id in ids if token_id not in skipped)

    def token_text(self, token_id: int) -> str:
        """Return one token as text, for display; broken characters show as U+FFFD."""
        return self._bytes_of(token_id).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """Return a fresh detokenizer for one sequence."""
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation; see `ChatTemplate.render`.

        Raises:
            ValueError: the model has no template, or it refuses the messages.
        """
        if self.chat is None:
            raise ValueError("this model has no chat template")
        return self.chat.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    def _bytes_of(self, token_id: int) -> bytes:
        """Return one token's bytes, none if no token has this id."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        letters = _byte_of_letter()
        # Added tokens are plain text; one with a letter of no byte is taken as it is written.
        if any(letter not in letters for letter in token):
            return token.encode()
        return bytes(letters[letter] for letter in token)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens of `tokenizer_config.json`, as text by name."""
    named = {name: settings.get(name) for name in SPECIAL_TOKEN_NAMES}
    texts = {
        name: token["content"] if isinstance(token, Mapping) else token
        for name, token in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _backend(path: pathlib.Path, special_tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Return the vocabulary and its rules; the named special tokens are special in it."""
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer.json in {path.parent}")
    decoder = _read_json(path).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        raise ValueError(
            f"{path}: only byte-level tokenizers are supported, got the decoder "
            f"{decoder.get('type')!r}"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises nothing narrower.
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    known = [token for token in special_tokens.values() if backend.token_to_id(token) is not None]
    backend.add_special_tokens(known)
    return backend


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text in either file, ascending."""
    text_config = config.get("text_config", config)
    ids: set[int] = set()
    for where in (text_config, generation):
        value = where.get("eos_token_id")
        ids.update(value if isinstance(value, list) else () if value is None else (value,))
    return tuple(sorted(ids))


def _chat(
    directory: pathlib.Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> chat_template.ChatTemplate | None:
    """Return the chat templates: a file of their own wins over the settings."""
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if source is None:
        return None
    if isinstance(source, str):
        sources = {"default": source}
    else:
        sources = {entry["name"]: entry["template"] for entry in source}
    if "default" not in sources:
        raise ValueError(f"{directory}: none of the chat templates is named 'default'")
    templates = {name: chat_template.compile_template(text) for name, text in sources.items()}
    return chat_template.ChatTemplate(templates, special_tokens)
