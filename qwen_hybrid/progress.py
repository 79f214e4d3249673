"""A progress bar for a terminal; silent anywhere else."""

import io
import sys
import time
from collections.abc import Callable
from typing import TextIO

WIDTH = 30
REDRAW_S = 0.1
UNITS = ("B", "kB", "MB", "GB", "TB")


class ProgressBar:
    """Shows how much of a known total is done, on one line of a stream.

    Args:
        label: what is being done.
        total: what will be done at the end, in bytes unless `show` says otherwise.
        is_shown: False keeps it silent; None shows it if the stream is a terminal.
        stream: where to write; standard error if None.
        show: an amount as text.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        is_shown: bool | None = None,
        stream: TextIO | io.TextIOBase | None = None,
        show: Callable[[int], str] | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = self._stream.isatty() if is_shown is None else is_shown
        self._label = label
        self._total = total
        self._done = 0
        self._drawn_at = 0.0
        self._show = readable_bytes if show is None else show

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()

    def advance(self, amount: int) -> None:
        """Count an amount as done."""
        self._done += amount
        if self._is_shown and time.monotonic() - self._drawn_at > REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        filled = WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (WIDTH - filled)
        done, total = self._show(self._done), self._show(self._total)
        self._stream.write(f"\r{self._label} [{bar}] {done} of {total}")
        self._stream.flush()


def readable_bytes(num_bytes: int) -> str:
    """Return a byte count with a decimal unit."""
    value, unit = float(num_bytes), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{num_bytes} B"
