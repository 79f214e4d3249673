"""`python -m serve`, the same as the console script `qwen-hybrid`."""

import sys

from serve.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
