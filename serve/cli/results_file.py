"""A file of results, a JSON object a line, that a run killed at any moment can go on with."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, BinaryIO, Self

from serve.cli.jobs import is_failure

# How every line begins; what follows is as long as it happens to be.
LINE_START = b'{"id": '


class ResultsFile:
    """Appends results to a file; those that are in it already are kept.

    A last line without its end was torn by whatever ended the run before, so it is cut off and its
    job is done again. Every other line must be a result.

    Attributes:
      ids: names of the results that were in the file.
      num_failed: how many of them are failures.
    """

    def __init__(self, path: str | pathlib.Path):
        """Open a file, making it if there is none.

        Raises:
          OSError: it cannot be opened.
          ValueError: it holds something else than results; nothing of it is changed.
        """
        self.path = pathlib.Path(path)
        whole, torn = self._split()
        results = [self._result(line, number) for number, line in enumerate(whole, 1)]
        self.ids = {result["id"] for result in results}
        self.num_failed = sum(is_failure(result) for result in results)
        if torn and not torn.startswith(LINE_START) and not LINE_START.startswith(torn):
            raise ValueError(f"{self.path}, last line: not a result; it is left as it is")
        self._file: BinaryIO = self.path.open("ab")
        if torn:
            os.truncate(self._file.fileno(), self.path.stat().st_size - len(torn))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, result: Mapping[str, Any]) -> None:
        """Append a result; it is in the file when this returns."""
        self._file.write(result_line(result))
        self._file.flush()

    def _split(self) -> tuple[list[bytes], bytes]:
        """Return the whole lines of the file and what follows the last of them."""
        if not self.path.exists():
            return [], b""
        *whole, torn = self.path.read_bytes().split(b"\n")
        return whole, torn

    def _result(self, line: bytes, number: int) -> dict[str, Any]:
        """Return the result in a whole line."""
        try:
            result = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path}, line {number}: not a result: {error}") from error
        if not isinstance(result, dict) or not isinstance(result.get("id"), str | int):
            raise ValueError(f"{self.path}, line {number}: not a result: it has no id")
        return result


def result_line(result: Mapping[str, Any]) -> bytes:
    """Return a result as a line of JSON, its id first."""
    ordered = {"id": result["id"], **result}
    text = json.dumps(ordered, ensure_ascii=False)
    # Half a surrogate pair, which UTF-8 has not, becomes its JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"
