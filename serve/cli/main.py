"""Entry point: picks the command and turns its errors into messages and exit codes."""

import argparse
import os
import sys
from collections.abc import Sequence

from serve.cli import generate

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

# What a user can cause and mend. Anything else is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, NotImplementedError)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="qwen-hybrid", description="Run Qwen hybrid language models.", allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate.add_command(commands, os.environ)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    Args:
        argv: the arguments, the program's name left out; None takes the process's.
    """
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except USER_ERRORS as error:
        print(f"qwen-hybrid: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK
