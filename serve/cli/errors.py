"""Exit codes, and what ends a command with one line."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UsageError(Exception):
    """The command line, the environment or the configuration file asks for what there is not."""
