"""`chat`: one message, or a conversation at the terminal."""

import argparse
import importlib
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast

from serve.cli.command import Command
from serve.cli.errors import EXIT_OK, UsageError
from serve.cli.flags import (
    ENGINE_GROUPS,
    SAMPLING_DEFAULTS_FLAG,
    SAMPLING_GROUP,
    Flag,
    engine_arguments,
    engine_config,
    json_object,
    sampling_arguments,
    single_sequence,
)
from serve.cli.generate import print_parts, summary
from serve.cli.jobs import Result
from serve.cli.terminal import note, start_engine, write
from serve.engine import Engine

PROMPT = "> "
HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer"

CHAT_FLAGS = (
    Flag(name="message", metavar="TEXT", help="answer this one message and end"),
    Flag(name="system", metavar="TEXT", help="system prompt"),
    Flag(
        name="thinking",
        read=bool,
        help="whether the model thinks before it answers; the template's default if not given",
    ),
    Flag(name="tools", metavar="FILE", help="JSON list of schemas of functions it may call"),
    Flag(
        name="chat_template_kwargs",
        read=json_object,
        metavar="JSON",
        help="further variables of the model's chat template",
    ),
    Flag(name="stream", read=bool, default=True, help="print text as it comes, not at the end"),
)


class Conversation:
    """What was said so far, and how the next answer is got.

    Attributes:
      messages: oldest first; the system prompt, if any, on top.
    """

    def __init__(self, args: argparse.Namespace, engine: Engine, sampling: dict[str, Any]):
        """Start with nothing but the system prompt.

        Args:
          sampling: parameters of every answer.
        """
        self._engine, self._sampling = engine, sampling
        self._system, self._is_streamed = args.system, args.stream
        self._tools = _tools(args.tools)
        self._variables = dict(args.chat_template_kwargs or {})
        if args.thinking is not None:
            self._variables["enable_thinking"] = args.thinking
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def answer(self, text: str) -> Iterator[Result]:
        """Give the answer to a message as it grows; both are remembered, also if it is cut off.

        Raises:
          ValueError: the template refuses it, or the conversation is too long; it is forgotten.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.apply_chat_template(said, tools=self._tools, **self._variables)
        ids = tokenizer.encode(prompt)
        # An answer may be as long as there is room, unless that was said otherwise.
        room = max(self._engine.context_length - len(ids), 1)
        params = {"max_new_tokens": room, **self._sampling}
        parts = self._engine.generate(
            input_ids=ids, sampling_params=params, stream=self._is_streamed
        )
        part: Result = {"text": ""}
        try:
            for part in cast(Iterator[Result], parts if self._is_streamed else iter([parts])):
                yield part
        finally:
            self.messages = [*said, {"role": "assistant", "content": part["text"]}]


def _tools(path: str | None) -> list[Any] | None:
    """Return the tools in a JSON file."""
    if path is None:
        return None
    try:
        tools = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(tools, list):
        raise ValueError(f"{path} must hold a list of tools, got {type(tools).__name__}")
    return tools


def run(args: argparse.Namespace) -> int:
    """Load the model; answer one message, or one after the other."""
    asked = sampling_arguments(args)
    arguments = single_sequence(engine_arguments(args, SAMPLING_DEFAULTS_FLAG))
    if asked.get("n", 1) != 1:
        raise UsageError("a chat has one answer: --n must be 1")
    start_s = time.monotonic()
    config = engine_config(arguments)
    with start_engine(arguments, config, log_level=args.log_level) as engine:
        if engine.tokenizer is None or engine.tokenizer.chat is None:
            raise ValueError(f"{args.model_path} has no chat template")
        chat = Conversation(args, engine, asked)
        if args.message is None:
            return _converse(chat, sys.stdin, sys.stdout)
        last, first_text_s = print_parts(chat.answer(args.message), sys.stdout)
    write(sys.stdout, "\n")
    note(summary(last["meta_info"], start_s=start_s, first_text_s=first_text_s))
    return EXIT_OK


def _converse(chat: Conversation, lines: TextIO, out: TextIO) -> int:
    """Answer line after line until there are no more."""
    is_terminal = lines.isatty()
    if is_terminal:
        _edit_lines()
        note(HELP)
    while True:
        try:
            line = _read(lines, is_terminal=is_terminal)
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            write(out, "\n")
            note(HELP)
            continue
        if line is None or line.strip() == "/exit":
            return EXIT_OK
        if line.strip() == "/reset":
            chat.reset()
        elif line.startswith("/"):
            note(f"no command {line.strip()!r}; {HELP}")
        elif line.strip():
            _print_answer(chat, line, out)


def _edit_lines() -> None:
    """Make the arrow keys and the history of lines work in `input`, where Python came with them."""
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")


def _read(lines: TextIO, *, is_terminal: bool) -> str | None:
    """Return the next line without its end, or None if there is none."""
    if not is_terminal:
        line = lines.readline()
        return line.rstrip("\n") if line else None
    try:
        return input(PROMPT)
    except EOFError:
        return None


def _print_answer(chat: Conversation, text: str, out: TextIO) -> None:
    """Print the answer to a message; Ctrl-C ends the answer only."""
    answer = chat.answer(text)
    try:
        print_parts(answer, out)
    except KeyboardInterrupt:
        write(out, " [stopped]")
    except ValueError as error:
        note(f"not answered: {error}")
        return
    finally:
        # Ends the request; what came of the answer is remembered.
        cast(Any, answer).close()
    write(out, "\n")


COMMAND = Command(
    name="chat",
    help="talk to a model",
    groups={"chat": CHAT_FLAGS, **SAMPLING_GROUP, **ENGINE_GROUPS},
    run=run,
    epilog="at the terminal: qwen-hybrid chat --model demo\n"
    'one message: qwen-hybrid chat --model demo --message "Say hi." --no-thinking',
)
