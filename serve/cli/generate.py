"""`generate`: complete one prompt, streaming the text to the terminal as it comes."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO, cast

from serve.cli.environment import compilation_cache_dir
from serve.engine import Engine
from serve.sampling_params import SamplingParams, as_sampling_params

DTYPES = ("auto", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")

Result = Mapping[str, Any]

# Command-line names of the sampling parameters, and how their text is read.
SAMPLING_FLAGS: Mapping[str, Any] = {
    "max_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
}


def add_command(commands: Any, environment: Mapping[str, str]):
    """Add `generate` to the parser's commands.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
        environment: for the defaults that depend on it.
    """
    parser = commands.add_parser(
        "generate",
        help="complete one prompt",
        description="Complete one prompt, streaming the text to standard output.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model",
        "--model-path",
        required=True,
        dest="model_path",
        metavar="NAME_OR_DIR",
        help="demo, demo-dense or a model directory",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to complete")
    parser.add_argument(
        "--echo", action="store_true", help="print the prompt before its completion"
    )
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print text as it comes, not at the end",
    )
    _add_sampling_flags(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto is the checkpoint's")
    parser.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default="auto",
        help="dummy makes random weights and reads none",
    )
    parser.add_argument(
        "--compilation-cache-dir",
        default=str(compilation_cache_dir(environment)),
        metavar="DIR",
        help="where compiled programs are kept; empty keeps none",
    )


def _add_sampling_flags(parser: argparse.ArgumentParser):
    """Add a flag for each sampling parameter that the command offers."""
    group = parser.add_argument_group("sampling")
    defaults = SamplingParams()
    for name, read in SAMPLING_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        default = getattr(defaults, name)
        group.add_argument(flag, type=read, default=default, metavar=read.__name__.upper())
    group.add_argument(
        "--seed", type=int, default=None, metavar="INT", help="fixes the noise; drawn if not given"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end of the text")


def run(args: argparse.Namespace):
    """Load the model and print the completion; figures go to standard error."""
    # Checked before the model is loaded, which takes longer than reading an error should.
    params = as_sampling_params(
        {name: getattr(args, name) for name in (*SAMPLING_FLAGS, "seed", "ignore_eos")}
    )
    start_s = time.monotonic()
    with Engine(
        model_path=args.model_path,
        dtype=args.dtype,
        load_format=args.load_format,
        max_running_requests=1,
        compilation_cache_dir=args.compilation_cache_dir or None,
    ) as engine:
        if args.echo:
            _write(sys.stdout, args.prompt)
        parts = _parts(engine, args.prompt, params, stream=args.stream)
        last, first_text_s = _print_parts(parts, sys.stdout)
    _write(sys.stdout, "\n")
    _write(sys.stderr, _summary(last["meta_info"], start_s=start_s, first_text_s=first_text_s))


def _parts(
    engine: Engine, prompt: str, params: SamplingParams, *, stream: bool
) -> Iterator[Result]:
    """Yield results whose text grows, or the one whole result."""
    answer = engine.generate(prompt, params, stream=stream)
    # One prompt gets one result, or an iterator over it.
    yield from cast(Iterator[Result], answer) if stream else (cast(Result, answer),)


def _print_parts(parts: Iterator[Result], out: TextIO) -> tuple[Result, float]:
    """Print what each part adds; return the last part and when the first text came."""
    part: Result = {}
    num_printed = 0
    first_text_s = time.monotonic()
    for part in parts:
        text = part["text"]
        if text and not num_printed:
            first_text_s = time.monotonic()
        _write(out, text[num_printed:])
        num_printed = len(text)
    return part, first_text_s


def _write(out: TextIO, text: str):
    """Write at once, a character that the terminal cannot show as a question mark."""
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "replace").decode(encoding))
    out.flush()


def _summary(info: Mapping[str, Any], *, start_s: float, first_text_s: float) -> str:
    """Return one line about the run."""
    num_tokens, rate = info["completion_tokens"], info.get("decode_throughput")
    speed = f", then {rate:.1f} tokens/s" if rate else ""
    return (
        f"[{info['prompt_tokens']} + {num_tokens} tokens, ended by "
        f"{(info['finish_reason'] or {}).get('type')}, first text after "
        f"{first_text_s - start_s:.1f} s{speed}, seed {info.get('sampling_seed')}]\n"
    )
