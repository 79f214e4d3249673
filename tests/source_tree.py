"""The repository's Python sources, parsed once, for the tests that read the code itself."""

import ast
import dataclasses
import functools
import pathlib
import subprocess
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("pallas_kernels", "cache", "qwen_hybrid", "spec", "serve")
AROUND = ("tests", "benchmarks", "examples", "tools")


@dataclasses.dataclass(frozen=True)
class Source:
    """One parsed file.

    Attributes:
        path: relative to the repository's root.
        tree: the parsed module.
        num_lines: of the file.
    """

    path: pathlib.PurePosixPath
    tree: ast.Module
    num_lines: int

    @property
    def package(self) -> str:
        """Return the top-level folder."""
        return self.path.parts[0]

    @property
    def module(self) -> str:
        """Return the dotted name that imports this file."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        line: where it stands.
        names: every dotted name that the statement may be importing; the first is the longest
            one that is certainly a module.
    """

    line: int
    names: tuple[str, ...]

    @property
    def top(self) -> str:
        """Return the imported top-level package."""
        return self.names[0].split(".")[0]


def parse(text: str, path: str) -> Source:
    """Return `text` as the source at `path`."""
    return Source(pathlib.PurePosixPath(path), ast.parse(text), text.count("\n"))


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Return every Python file under `folders` that exists, in the order of their paths."""
    found = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(parse(path.read_text(), path.relative_to(ROOT).as_posix()) for path in found)


def imports(source: Source) -> Iterator[Import]:
    """Yield every import statement's modules, wherever it stands in the file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, (alias.name,))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            yield Import(node.lineno, (base, *(f"{base}.{alias.name}" for alias in node.names)))


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    """Return the module that a `from` statement names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = source.path.with_suffix("").parts[: -node.level]
    return ".".join((*parts, *((node.module or "").split(".") if node.module else ())))


def text_files() -> Iterator[pathlib.Path]:
    """Yield the repository's own text files: what git tracks, or all if there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listing.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and b"\0" not in path.read_bytes()[:4096]:
            yield path
