"""A batch of jobs through an engine: results as they come, a bar, a summary, an exit code."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from qwen_hybrid.progress import ProgressBar
from serve.cli.errors import EXIT_FAILED, EXIT_OK
from serve.cli.flags import Flag
from serve.cli.jobs import STANDARD_STREAM, Job, Result, in_order, is_failure
from serve.cli.results_file import ResultsFile, result_line
from serve.cli.terminal import note

# Jobs under way or waiting for an earlier one: enough to keep every slot of the engine busy.
WINDOW = 256

OUTPUT_FLAG = Flag(
    name="output",
    metavar="FILE",
    help="file of results; what is in it already is skipped; - is standard output",
)

Write = Callable[[Result], None]


class Tally:
    """What is to be done of a batch, and what it came to.

    Attributes:
      left: jobs without a result.
      num_done, num_failed, num_skipped: jobs by outcome; the skipped were in the file before.
      num_failed_before: failures that were in the file.
    """

    def __init__(self, jobs: list[Job], file: ResultsFile | None):
        """Nothing is done yet but what the file holds, if there is one."""
        self.left = [job for job in jobs if file is None or job.id not in file.ids]
        self.num_done = self.num_failed = 0
        self.num_skipped = len(jobs) - len(self.left)
        self.num_failed_before = file.num_failed if file else 0
        self._start_s = time.monotonic()

    def start(self) -> None:
        """Take the time from here."""
        self._start_s = time.monotonic()

    def count(self, result: Result) -> None:
        """Count one result."""
        if is_failure(result):
            self.num_failed += 1
        else:
            self.num_done += 1

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self._start_s

    @property
    def exit_code(self) -> int:
        """What the command returns."""
        return EXIT_FAILED if self.num_failed or self.num_failed_before else EXIT_OK

    def describe(self, more: str) -> str:
        """One line about the batch.

        Args:
          more: what the command has to add.
        """
        counts = f"{self.num_done} done, {self.num_failed} failed"
        if self.num_skipped:
            counts += f", {self.num_skipped} skipped"
        if self.num_failed_before:
            counts += f" ({self.num_failed_before} of those in the file failed)"
        return f"{counts}; {more} in {self.seconds:.1f} s"


@contextlib.contextmanager
def writer(output: str | None) -> Iterator[tuple[Write, ResultsFile | None]]:
    """Give where results go: standard output, or a file that may hold some already."""
    if output in (None, STANDARD_STREAM):

        def write(result: Result) -> None:
            sys.stdout.buffer.write(result_line(result))
            sys.stdout.flush()

        yield write, None
        return
    with ResultsFile(str(output)) as file:
        yield file.add, file


def run_jobs(
    tally: Tally,
    answer: Callable[[Job], Awaitable[Result]],
    *,
    label: str,
    count: Callable[[Result], Any],
    write: Write,
    is_file: bool,
) -> None:
    """Run the jobs that have no result yet and write theirs in the order of the input.

    Args:
      answer: computes one result; errors of the job are part of it.
      label: what the bar says.
      count: sees every result once.
      write: takes a result for good.
      is_file: results do not go to standard output.
    """
    tally.start()
    # A bar across results on the same terminal would be unreadable.
    is_shown = None if is_file or not sys.stdout.isatty() else False
    with ProgressBar(label, len(tally.left), is_shown=is_shown, show=str) as bar:

        async def answered(job: Job) -> Result:
            result = await answer(job)
            bar.advance(1)
            return result

        async def run() -> None:
            async for _, result in in_order(tally.left, answered, window=WINDOW):
                write(result)
                tally.count(result)
                count(result)

        asyncio.run(run())


def sum_up(tally: Tally, more: str) -> int:
    """Write the summary line; return the exit code."""
    note(tally.describe(more))
    return tally.exit_code
