"""`generate`: complete prompts; one is streamed as text, several give a JSON object a line."""

import argparse
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TextIO, cast

from serve.cli.batch import OUTPUT_FLAG, Tally, run_jobs, sum_up, writer
from serve.cli.command import Command
from serve.cli.errors import EXIT_OK, UsageError
from serve.cli.flags import (
    ENGINE_GROUPS,
    SAMPLING_DEFAULTS_FLAG,
    SAMPLING_GROUP,
    Flag,
    canonical,
    engine_arguments,
    engine_config,
    sampling_arguments,
    single_sequence,
)
from serve.cli.jobs import INPUT_FLAG, PROMPT_FLAG, Job, Result, failure, read_jobs
from serve.cli.terminal import note, start_engine, write
from serve.engine import Engine
from serve.errors import StepError

TEXT_FLAGS = (
    PROMPT_FLAG,
    INPUT_FLAG,
    OUTPUT_FLAG,
    Flag(name="echo", read=bool, default=False, help="print the prompt before its completion"),
    Flag(name="stream", read=bool, default=True, help="print text as it comes, not at the end"),
)

IDS_FLAG = Flag(
    name="skip_tokenizer_init",
    read=bool,
    default=False,
    help="ids in, ids out; no tokenizer is read",
    field="skip_tokenizer_init",
)

RESULT_FLAGS = (
    Flag(name="return_logprob", read=bool, default=False, help="add the tokens' log-probabilities"),
    Flag(
        name="logprob_start_len",
        read=int,
        help="also those of the prompt's tokens from this position on",
    ),
    Flag(name="top_logprobs_num", read=int, help="also so many of the likeliest tokens"),
    IDS_FLAG,
)

# Flags that ask for more than the output's log-probabilities, and all keys of a line that do.
LOGPROB_DETAILS = ("logprob_start_len", "top_logprobs_num")
LOGPROB_KEYS = ("return_logprob", *LOGPROB_DETAILS, "token_ids_logprob")


def run(args: argparse.Namespace) -> int:
    """Load the model and complete the prompts; figures go to standard error."""
    # All of it is checked before the model is loaded, which takes longer than an error should.
    asked = sampling_arguments(args)
    arguments = engine_arguments(args, SAMPLING_DEFAULTS_FLAG, IDS_FLAG)
    jobs = read_jobs(args.prompt, args.input)
    is_single = args.prompt is not None and len(jobs) == 1 and asked.get("n", 1) == 1
    has_more = args.skip_tokenizer_init or _logprob_options(args)
    if is_single and args.output is None and not has_more:
        prompt = jobs[0].fields["prompt"]
        return _print_text(args, prompt, asked, single_sequence(arguments))
    if args.echo:
        raise UsageError("--echo is for text, and JSON lines are asked for")
    tokens = {"prompt_tokens": 0, "completion_tokens": 0}

    def count(result: Result) -> None:
        for part in result.get("samples", [result]):
            for name in tokens:
                tokens[name] += part.get("meta_info", {}).get(name, 0)

    with writer(args.output) as (write_result, file):
        tally = Tally(jobs, file)
        if tally.left:
            config = engine_config(arguments)
            with start_engine(arguments, config, log_level=args.log_level) as engine:
                answer = _answerer(engine, args, asked)
                target = {"write": write_result, "is_file": file is not None}
                run_jobs(tally, answer, label="generating", count=count, **target)
    prompt, completion = tokens["prompt_tokens"], tokens["completion_tokens"]
    rate = completion / max(tally.seconds, 1e-9)
    return sum_up(tally, f"{prompt} + {completion} tokens, {rate:.1f} tokens/s,")


def _answerer(
    engine: Engine, args: argparse.Namespace, sampling: Mapping[str, Any]
) -> Callable[[Job], Awaitable[Result]]:
    """Return what computes the result of one job, be it an error of its own."""

    async def answer(job: Job) -> Result:
        if job.error is not None:
            return failure(job, job.error)
        try:
            found = await engine.async_generate(**_request(engine, job, args, sampling))
        except (ValueError, TypeError, StepError) as error:
            return failure(job, error)
        if isinstance(found, list):
            return {"id": job.id, "samples": found}
        return {"id": job.id, **cast(Result, found)}

    return answer


def _request(
    engine: Engine, job: Job, args: argparse.Namespace, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of the engine for one job."""
    fields = job.fields
    options = _logprob_options(args) | {
        name: fields[name] for name in LOGPROB_KEYS if fields.get(name) is not None
    }
    return {
        **prompt_arguments(engine, fields, add_generation_prompt=True),
        **options,
        "sampling_params": {**sampling, **canonical(fields.get("sampling_params") or {})},
    }


def _logprob_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags ask of log-probabilities, nothing if none is given."""
    details = {name: getattr(args, name) for name in LOGPROB_DETAILS}
    given = {name: value for name, value in details.items() if value is not None}
    return {"return_logprob": True, **given} if args.return_logprob or given else {}


def prompt_arguments(
    engine: Engine, fields: Mapping[str, Any], *, add_generation_prompt: bool
) -> dict[str, Any]:
    """Return the prompt of an input line as the engine takes it.

    Raises:
      ValueError: the messages are none that the model's template takes.
    """
    if fields.get("messages") is None:
        return {
            name: fields[name] for name in ("prompt", "input_ids") if fields.get(name) is not None
        }
    if engine.tokenizer is None:
        raise ValueError(
            "messages need the model's tokenizer, which --skip-tokenizer-init leaves out"
        )
    text = engine.tokenizer.apply_chat_template(
        fields["messages"],
        tools=fields.get("tools"),
        add_generation_prompt=add_generation_prompt,
        **(fields.get("chat_template_kwargs") or {}),
    )
    return {"prompt": text}


def _print_text(
    args: argparse.Namespace, prompt: str, asked: dict[str, Any], arguments: dict[str, Any]
) -> int:
    """Print the completion of one prompt."""
    start_s = time.monotonic()
    config = engine_config(arguments)
    with start_engine(arguments, config, log_level=args.log_level) as engine:
        if args.echo:
            write(sys.stdout, prompt)
        answer = engine.generate(prompt, asked, stream=args.stream)
        # One prompt gets one result, or an iterator over it.
        parts = cast(Iterator[Result], answer if args.stream else iter([answer]))
        last, first_text_s = print_parts(parts, sys.stdout)
    write(sys.stdout, "\n")
    note(summary(last["meta_info"], start_s=start_s, first_text_s=first_text_s))
    return EXIT_OK


def print_parts(parts: Iterator[Result], out: TextIO) -> tuple[Result, float]:
    """Print what each part adds; return the last part and when the first text came."""
    part: Result = {}
    num_printed = 0
    first_text_s = time.monotonic()
    for part in parts:
        text = part["text"]
        if text and not num_printed:
            first_text_s = time.monotonic()
        write(out, text[num_printed:])
        num_printed = len(text)
    return part, first_text_s


def summary(info: Mapping[str, Any], *, start_s: float, first_text_s: float) -> str:
    """Return one line about one completion."""
    num_tokens, rate = info["completion_tokens"], info.get("decode_throughput")
    speed = f", then {rate:.1f} tokens/s" if rate else ""
    return (
        f"{info['prompt_tokens']} + {num_tokens} tokens, ended by "
        f"{(info['finish_reason'] or {}).get('type')}, first text after "
        f"{first_text_s - start_s:.1f} s{speed}, seed {info.get('sampling_seed')}"
    )


COMMAND = Command(
    name="generate",
    help="complete prompts",
    groups={"text": TEXT_FLAGS, "results": RESULT_FLAGS, **SAMPLING_GROUP, **ENGINE_GROUPS},
    run=run,
    epilog='one prompt: qwen-hybrid generate --model demo --prompt "def f(x):"\n'
    "many: qwen-hybrid generate --model demo --input prompts.jsonl --output results.jsonl",
)
