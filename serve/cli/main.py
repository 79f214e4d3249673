"""Entry point: picks the command and turns its errors into messages and exit codes."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from serve.cli import (
    bench_offline,
    bench_one_batch,
    chat,
    check,
    convert,
    drift,
    generate,
    info,
    score,
)
from serve.cli.command import Command
from serve.cli.environment import default_compilation_cache
from serve.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, UsageError
from serve.cli.settings import merge
from serve.cli.terminal import logs
from serve.sglang_flags import refusal

PROGRAM = "qwen-hybrid"
COMMANDS: tuple[Command, ...] = (
    generate.COMMAND,
    chat.COMMAND,
    score.COMMAND,
    info.COMMAND,
    check.COMMAND,
    bench_one_batch.COMMAND,
    bench_offline.COMMAND,
    convert.COMMAND,
    drift.COMMAND,
)

# What a user can cause and mend. Anything else is a bug and keeps its traceback.
USER_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the options are behind `--help`."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; options that are not given are not in its result."""
    parser = _Parser(
        prog=PROGRAM, description="Run Qwen hybrid language models.", allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.help,
            description=command.help + ".",
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(command=command)
        for title, flags in command.all_groups.items():
            group = sub.add_argument_group(title)
            for flag in flags:
                flag.add_to(group)
    return parser


def settings(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return every option of the command that the arguments name, wherever it is set.

    Raises:
      UsageError: something that there is not.
    """
    given, unknown = build_parser().parse_known_args(argv)
    if unknown:
        raise UsageError(_unknown(unknown, given.command))
    known = [
        name
        for command in COMMANDS
        for flag in command.flags
        for name in (flag.name, *(a.lstrip("-").replace("-", "_") for a in flag.aliases))
    ]
    args = merge(given, given.command.flags, environment=os.environ, known=known)
    if "compilation_cache_dir" in args and args.compilation_cache_dir is None:
        args.compilation_cache_dir = default_compilation_cache(os.environ)
    if args.verbose:
        args.log_level = "info"
    return args


def _unknown(words: Sequence[str], command: Command) -> str:
    """Return what is wrong with words that no option takes: refused by name, or unknown."""
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    for spelling in names:
        if problem := refusal(spelling.removeprefix("--").replace("-", "_"), spelling=spelling):
            return problem
    spellings = [spelling for flag in command.flags for spelling in flag.spellings]
    guesses = [g for name in names for g in difflib.get_close_matches(name, spellings, n=1)]
    hint = f"; did you mean {guesses[0]}?" if guesses else ""
    return f"unrecognized arguments: {' '.join(words)}{hint}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    Args:
        argv: the arguments, the program's name left out; None takes the process's.
    """
    try:
        args = settings(argv)
        with logs(args.log_level):
            return args.command.run(args)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except UsageError as error:
        return _fail(error, EXIT_USAGE)
    except USER_ERRORS as error:
        return _fail(error, EXIT_FAILED)


def _fail(error: Exception, code: int) -> int:
    """Write an error in one line; return its exit code."""
    print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code
