"""The demo models' text: the standard library of the running Python, as documents.

A document is a whole module, a class, a function with its indentation removed, or a short chat
that asks for a function. Each ends with the end-of-text token, so that a model learns where a
body ends. Files are split into training and held-out ones before any document is made.
"""

import ast
import hashlib
import platform
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
LICENCE = "PSF-2.0"
HELDOUT_BYTES = 280_000
HELDOUT_FILE_BYTES = 20_000
MIN_FUNCTION_CHARS = 60
MAX_CLASS_CHARS = 6_000
MAX_CHAT_CHARS = 1_200
# Tables of a machine or of an encoding: no code to learn from.
SKIPPED_PARTS = ("site-packages", "__pycache__", "pydoc_data", "encodings", "lib-dynload")
SKIPPED_PREFIXES = ("_sysconfigdata", "badsyntax", "bad_")
MAX_DIGIT_SHARE = 0.15

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One source file.

    Attributes:
      path: Relative to the standard library's folder, with forward slashes.
      text: Its content, with line ends as "\\n".
    """

    path: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of the path: an order of the files that means nothing."""
        return hashlib.sha256(self.path.encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Every source used, split by file.

    Attributes:
      training: Files to learn from.
      heldout: Files that no training document comes from.
    """

    training: tuple[Source, ...]
    heldout: tuple[Source, ...]

    def provenance(self) -> dict[str, str | int]:
        """Return name, version, licence and the SHA-256 of all texts in the order of paths."""
        sources = sorted(self.training + self.heldout, key=lambda source: source.path)
        joined = "".join(source.text for source in sources).encode()
        return {
            "name": "Python standard library",
            "version": platform.python_version(),
            "licence": LICENCE,
            "files": len(sources),
            "bytes": len(joined),
            "sha256": hashlib.sha256(joined).hexdigest(),
        }


def read_corpus(folder: Path | None = None) -> Corpus:
    """Read the standard library (or another folder of Python files) and split it by file.

    Held out are files up to `HELDOUT_FILE_BYTES`, in the order of `Source.digest`, until
    `HELDOUT_BYTES` are full.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    sources = [source for path in sorted(folder.rglob("*.py")) if (source := _read(path, folder))]
    heldout, size = [], 0
    for source in sorted(sources, key=lambda source: source.digest):
        length = len(source.text.encode())
        if length <= HELDOUT_FILE_BYTES and size + length <= HELDOUT_BYTES:
            heldout.append(source)
            size += length
    chosen = {source.path for source in heldout}
    training = [source for source in sources if source.path not in chosen]
    return Corpus(tuple(training), tuple(sorted(heldout, key=lambda source: source.path)))


def _read(path: Path, folder: Path) -> Source | None:
    """Return the file, or None if it holds no ordinary Python code."""
    relative = path.relative_to(folder)
    if any(part in SKIPPED_PARTS for part in relative.parts) or path.name.startswith(
        SKIPPED_PREFIXES
    ):
        return None
    try:
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    digits = sum(character.isdigit() for character in text)
    if not text.strip() or END_OF_TEXT in text or digits > MAX_DIGIT_SHARE * len(text):
        return None
    return Source(relative.as_posix(), text)


def documents(source: Source) -> dict[str, list[str]]:
    """Return the documents of one file by kind: module, class, function, chat."""
    tree = ast.parse(source.text)
    lines = source.text.splitlines(keepends=True)
    classes, functions, chats = [], [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            text = _dedented(node, lines)
            if text and len(text) <= MAX_CLASS_CHARS:
                classes.append(text)
        elif isinstance(node, Function):
            text = _dedented(node, lines)
            if text and len(text) >= MIN_FUNCTION_CHARS:
                functions.append(text)
                chats.extend(_chat(text))
    return {"module": [source.text], "class": classes, "function": functions, "chat": chats}


def _dedented(node: ast.ClassDef | Function, lines: list[str]) -> str | None:
    """Return the node's lines from `def` or `class` on, moved to column 0, if that still parses."""
    text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
    try:
        ast.parse(text)
    except SyntaxError:
        return None
    return text if text.endswith("\n") else text + "\n"


def _chat(text: str) -> list[str]:
    """Return a chat that asks for a documented function and answers without its docstring."""
    function = ast.parse(text).body[0]
    assert isinstance(function, Function)
    docstring = ast.get_docstring(function)
    if docstring is None or len(function.body) < 2 or len(text) > MAX_CHAT_CHARS:
        return []
    paragraphs = docstring.split("\n\n")
    summary = " ".join(paragraphs[0].split())
    thought = paragraphs[1].strip() if len(paragraphs) > 1 else ""
    lines = text.splitlines(keepends=True)
    head = "".join(lines[: function.body[0].lineno - 1])
    body = "".join(lines[function.body[1].lineno - 1 :])
    if not body.startswith((" ", "\t")):
        return []
    return [
        f"<|im_start|>user\nWrite the Python function `{function.name}`. {summary}<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n{thought}\n</think>\n\n{head}{body}<|im_end|>\n"
    ]


def function_headers(sources: tuple[Source, ...]) -> list[str]:
    """Return the distinct headers of all functions: `def` to the line that ends with its colon.

    The order is that of the headers' SHA-256, so that any first n are a fair sample.
    """
    headers = set()
    for source in sources:
        lines = source.text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, Function) and node.body[0].lineno > node.lineno:
                text = _dedented(node, lines)
                if text and len(text) >= MIN_FUNCTION_CHARS:
                    first = ast.parse(text).body[0]
                    assert isinstance(first, Function)
                    headers.add(_signature(text.splitlines(True)[: _body_line(first) - 1]))
    return sorted(headers, key=lambda header: hashlib.sha256(header.encode()).hexdigest())


def _body_line(function: Function) -> int:
    """Return the line of the first statement, decorators of a nested function included."""
    first = function.body[0]
    if isinstance(first, ast.ClassDef | Function) and first.decorator_list:
        return first.decorator_list[0].lineno
    return first.lineno


def _signature(lines: list[str]) -> str:
    """Return the lines before a body without the comments and blanks that lead to it."""
    while not lines[-1].strip() or lines[-1].lstrip().startswith("#"):
        lines = lines[:-1]
    return "".join(lines)


def heldout_text(sources: tuple[Source, ...]) -> str:
    """Return the held-out files as one text, each followed by the end-of-text marker."""
    return "".join(source.text + END_OF_TEXT for source in sources)


def parse_heldout(text: str) -> tuple[Source, ...]:
    """Return the files of `heldout_text`, whose paths are lost."""
    parts = text.split(END_OF_TEXT)[:-1]
    return tuple(Source(f"{index:03d}", part) for index, part in enumerate(parts))
