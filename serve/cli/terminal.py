"""What a command shows on the terminal beside its results."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from serve.engine import Engine
from serve.engine_config import EngineConfig

OUR_LOGGERS = ("serve", "qwen_hybrid", "cache")


def write(out: TextIO, text: str) -> None:
    """Write at once, a character that the terminal cannot show as a question mark."""
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "replace").decode(encoding))
    out.flush()


def note(text: str) -> None:
    """Write one line about the run to standard error."""
    write(sys.stderr, f"[{text}]\n")


@contextlib.contextmanager
def logs(level: str) -> Iterator[None]:
    """Show our packages' log lines from `level` on, on standard error, until the context ends."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    )
    loggers = [logging.getLogger(name) for name in OUR_LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(level.upper())
        logger.addHandler(handler)
        # Libraries put handlers of their own on the root, which would show every line twice.
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (old_level, old_propagate) in zip(loggers, before, strict=True):
            logger.setLevel(old_level)
            logger.propagate = old_propagate
            logger.removeHandler(handler)


def start_engine(arguments: dict[str, Any], config: EngineConfig, *, log_level: str) -> Engine:
    """Return a running engine, saying what it waits for where somebody watches.

    A first start compiles for a minute, which looks like a program that hangs.
    """
    is_watched = sys.stderr.isatty() or log_level in ("debug", "info")
    start_s = time.monotonic()
    if is_watched:
        count, kept = len(config.row_buckets), arguments.get("compilation_cache_dir")
        after = "kept for the next start" if kept else "kept nowhere"
        note(f"starting; a first start compiles {count} programs, {after}")
    engine = Engine(**arguments)
    if is_watched:
        note(f"ready after {time.monotonic() - start_s:.1f} s")
    return engine
