"""What a command is: its options and what it runs."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping

from serve.cli.flags import LOG_FLAGS, Flag
from serve.cli.settings import CONFIG_FLAG


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the program.

    Attributes:
      name: how it is called.
      help: one line.
      groups: its options by the heading they stand under; those of all commands come on top.
      run: takes the settings, returns the exit code.
      epilog: examples, shown below its options.
    """

    name: str
    help: str
    groups: Mapping[str, tuple[Flag, ...]]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""

    @property
    def all_groups(self) -> Mapping[str, tuple[Flag, ...]]:
        """Its options and those of all commands."""
        return {**self.groups, "logs and configuration": (*LOG_FLAGS, CONFIG_FLAG)}

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Its options in one row."""
        return tuple(flag for flags in self.all_groups.values() for flag in flags)
