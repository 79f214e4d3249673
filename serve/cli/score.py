"""`score`: log-probabilities and perplexity of texts, by prefill."""

import argparse
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any, cast

from serve.cli.batch import OUTPUT_FLAG, Tally, run_jobs, sum_up, writer
from serve.cli.command import Command
from serve.cli.errors import UsageError
from serve.cli.flags import ENGINE_GROUPS, Flag, engine_arguments, engine_config
from serve.cli.generate import prompt_arguments
from serve.cli.jobs import INPUT_FLAG, PROMPT_FLAG, Job, Result, failure, read_jobs
from serve.cli.terminal import start_engine
from serve.engine import Engine
from serve.errors import StepError

TEXT_FLAGS = (
    PROMPT_FLAG,
    INPUT_FLAG,
    Flag(name="text_file", metavar="FILE", help="a file that is one text"),
    OUTPUT_FLAG,
    Flag(
        name="token_logprobs",
        read=bool,
        default=True,
        help="write the log-probability of every token, not only their sum",
    ),
    Flag(name="top_logprobs_num", read=int, help="also so many of the likeliest tokens"),
)


def run(args: argparse.Namespace) -> int:
    """Load the model and score the texts; the figures of all together go to standard error."""
    arguments = engine_arguments(args)
    jobs = _jobs(args)
    total_logprob, num_scored = 0.0, 0

    def count(result: Result) -> None:
        nonlocal total_logprob, num_scored
        total_logprob += result.get("logprob", 0.0)
        num_scored += result.get("num_scored", 0)

    with writer(args.output) as (write_result, file):
        tally = Tally(jobs, file)
        if tally.left:
            config = engine_config(arguments)
            with start_engine(arguments, config, log_level=args.log_level) as engine:
                answer = functools.partial(_answer, engine, args)
                target = {"write": write_result, "is_file": file is not None}
                run_jobs(tally, answer, label="scoring", count=count, **target)
    perplexity = _perplexity(total_logprob, num_scored)
    return sum_up(tally, f"{num_scored} tokens scored, perplexity {perplexity:.4f},")


def _jobs(args: argparse.Namespace) -> list[Job]:
    """Return the texts to score, in order."""
    if args.text_file is None:
        return read_jobs(args.prompt, args.input)
    if args.prompt or args.input:
        raise UsageError("give one of --prompt, --input and --text-file")
    try:
        text = pathlib.Path(args.text_file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.text_file} is not UTF-8: {error}") from error
    return [Job(0, 0, {"prompt": text})]


async def _answer(engine: Engine, args: argparse.Namespace, job: Job) -> Result:
    """Return the scores of one text, be it an error of its own."""
    if job.error is not None:
        return failure(job, job.error)
    try:
        ids = _ids(engine, job.fields)
        top = {"top_logprobs_num": args.top_logprobs_num} if args.top_logprobs_num else {}
        result = await engine.async_score(ids, **top)
    except (ValueError, TypeError, StepError) as error:
        return failure(job, error)
    return _scores(job, cast(Result, result)["meta_info"], args)


def _ids(engine: Engine, fields: Mapping[str, Any]) -> Any:
    """Return the token ids of an input line."""
    prompt = prompt_arguments(engine, fields, add_generation_prompt=False)
    if "input_ids" in prompt:
        return prompt["input_ids"]
    if not isinstance(prompt["prompt"], str):
        raise ValueError(f"prompt must be a string, got {prompt['prompt']!r}")
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(prompt["prompt"])


def _scores(job: Job, info: Mapping[str, Any], args: argparse.Namespace) -> Result:
    """Return what is written about a text."""
    tokens = info["input_token_logprobs"]
    # Nothing comes before the first token, so it has no probability.
    logprobs = [logprob for logprob, _, _ in tokens[1:]]
    total = math.fsum(logprobs)
    result = {
        "id": job.id,
        "prompt_tokens": len(tokens),
        "num_scored": len(logprobs),
        "logprob": total,
        "perplexity": _perplexity(total, len(logprobs)) if logprobs else None,
    }
    if args.token_logprobs:
        result["input_token_logprobs"] = tokens
    if args.top_logprobs_num:
        result["input_top_logprobs"] = info["input_top_logprobs"]
    return result


def _perplexity(logprob: float, count: int) -> float:
    """The exponential of the mean negative log-probability."""
    if count == 0:
        return math.nan
    try:
        return math.exp(-logprob / count)
    except OverflowError:
        return math.inf


COMMAND = Command(
    name="score",
    help="log-probabilities and perplexity of texts",
    groups={"text": TEXT_FLAGS, **ENGINE_GROUPS},
    run=run,
    epilog='one text: qwen-hybrid score --model demo --prompt "def f(x):"\n'
    "a file: qwen-hybrid score --model demo --text-file book.txt --no-token-logprobs",
)
