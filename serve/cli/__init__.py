"""The command line. The only place that reads the process's environment."""

from serve.cli.main import main as main
