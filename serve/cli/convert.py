"""`convert`: a model directory between the Hugging Face and the Orbax format."""

import argparse

from qwen_hybrid import convert_checkpoint
from qwen_hybrid.progress import readable_bytes
from serve.cli.command import Command
from serve.cli.errors import EXIT_OK
from serve.cli.flags import Flag
from serve.cli.terminal import note
from serve.model_path import resolve_model_path

PATH_FLAGS = (
    Flag(
        name="source",
        is_positional=True,
        metavar="SOURCE",
        help="demo, demo-dense or a model directory of either format",
    ),
    Flag(
        name="destination",
        is_positional=True,
        metavar="DESTINATION",
        help="a directory that does not exist yet; it gets the other format",
    ),
)


def run(args: argparse.Namespace) -> int:
    """Convert, with progress bars on a terminal."""
    done = convert_checkpoint(resolve_model_path(args.source), args.destination)
    for text in done.notes:
        note(text)
    size = readable_bytes(done.num_bytes)
    note(f"{args.destination}: {done.written.value}, {done.num_tensors} tensors, {size}")
    return EXIT_OK


COMMAND = Command(
    name="convert",
    help="convert a model directory between the Hugging Face and the Orbax format",
    groups={"paths": PATH_FLAGS},
    run=run,
)
