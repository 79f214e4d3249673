"""The options of the commands, and the one place that maps them to engine and sampling fields."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pallas_kernels.gated_delta_net import StateDtype
from serve.cli.errors import UsageError
from serve.engine_config import EngineConfig
from serve.inputs import SAMPLING_DEFAULTS
from serve.sampling_params import ALIASES, as_sampling_params
from serve.sglang_flags import FIXED
from serve.speculation import DEBUG_HELP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One option: `--name` on the command line, `name` in a file, in capitals in the environment.

    Attributes:
      name: where its value is kept; the spelling is made of it.
      help: one line.
      read: text to value; `bool` makes a pair `--name` and `--no-name`, or with `choices`, which
        then are `true`, `--name` alone.
      default: the value if it is given nowhere.
      choices: the valid texts, all if empty.
      aliases: more spellings.
      metavar: stands for the value in the help.
      is_list: takes several values, and may be repeated.
      is_positional: stands in its place, without a spelling; it must be given.
      field: the argument of `Engine` or the sampling parameter that it sets, if any.
    """

    name: str
    help: str
    read: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    is_list: bool = False
    is_positional: bool = False
    field: str | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        """What it is called on the command line."""
        return ("--" + self.name.replace("_", "-"), *self.aliases)

    def add_to(self, group: Any) -> None:
        """Add it to an argparse group; a value that is not given stays out of the namespace."""
        shown = "" if self.default in (None, (), "") else f" (default: {self.default})"
        if self.is_positional:
            group.add_argument(self.name, type=self.parse, metavar=self.metavar, help=self.help)
            return
        common = {"dest": self.name, "default": argparse.SUPPRESS, "help": self.help + shown}
        if self.read is bool and self.choices:
            group.add_argument(*self.spellings, action="store_true", **common)
            return
        if self.read is bool:
            group.add_argument(*self.spellings, action=argparse.BooleanOptionalAction, **common)
            return
        several = {"action": "extend", "nargs": "+"} if self.is_list else {}
        metavar = self.metavar or self.read.__name__.upper()
        if self.choices:
            metavar = "{" + ",".join(self.choices) + "}"
        group.add_argument(*self.spellings, type=self.parse, metavar=metavar, **several, **common)

    def parse(self, text: str) -> Any:
        """Read one value.

        Raises:
          argparse.ArgumentTypeError: it is not valid; what is, if few values are.
        """
        if self.choices and text not in self.choices:
            supported = ", ".join(self.choices)
            # Of a flag that has one value, the help says why.
            why = f": {self.help}" if len(self.choices) == 1 else ""
            raise argparse.ArgumentTypeError(
                f"invalid value {text!r} (choose from {supported}){why}"
            )
        try:
            return self.read(text)
        except ValueError as error:
            kind = self.read.__name__
            raise argparse.ArgumentTypeError(f"invalid {kind} value {text!r}") from error


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def _engine(name: str, help: str, *, field: str | None = None, **more: Any) -> Flag:
    """An option that sets an engine argument; its default is the engine's own."""
    field = field or name
    known = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    return Flag(name=name, help=help, field=field, default=known.get(field), **more)


MODEL_FLAGS = (
    Flag(
        name="model_path",
        aliases=("--model",),
        metavar="NAME_OR_DIR",
        help="demo, demo-dense or a model directory",
        field="model_path",
    ),
    Flag(
        name="load_format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy makes random weights and reads none",
        field="load_format",
    ),
    _engine("dtype", "auto is the checkpoint's", choices=("auto", "float32", "bfloat16")),
    _engine(
        "mamba_ssm_dtype",
        "how sealed recurrent states are stored",
        field="state_dtype",
        choices=tuple(kind.value for kind in StateDtype),
    ),
    _engine(
        "context_length",
        "longest prompt plus completion, in tokens; the model's, at most 4096, if not given",
        read=int,
    ),
    Flag(
        name="compilation_cache_dir",
        metavar="DIR",
        help="where compiled programs are kept for the next start; empty keeps none",
        field="compilation_cache_dir",
    ),
)

MEMORY_FLAGS = (
    Flag(
        name="max_running_requests",
        read=int,
        help="sequences side by side; if not given, 8, 1 for a single prompt or a chat, and in "
        "bench-one-batch the largest batch",
        field="max_running_requests",
    ),
    _engine("chunked_prefill_size", "prompt tokens of one step at most", read=int),
    _engine("page_size", "tokens of a block", field="block_size", read=int),
    _engine("memory_bytes", "byte budget of the decode state; made to fit if not given", read=int),
)

SPECULATION_FLAGS = (
    _engine(
        "speculative_algorithm",
        "who drafts: NEXTN (also MTP, the model's own head), DSPARK (a draft model) or NGRAM "
        "(prompt lookup); nobody if not given",
    ),
    _engine(
        "speculative_num_draft_tokens",
        "rows of a verify window: the drafts and the target's own token",
        read=int,
    ),
    _engine(
        "speculative_draft_model_path",
        "draft model of DSPARK: demo-dspark, demo-dense-dspark or a directory",
        metavar="NAME_OR_DIR",
    ),
    _engine("speculative_dspark_block_size", "drafts of DSPARK in a block", read=int),
    _engine(
        "speculative_dspark_threshold",
        "probability of being taken below which DSPARK's drafts are not verified; 0 verifies all",
        read=float,
    ),
    _engine(
        "speculative_adaptive",
        "verify fewer drafts where many requests generate or few are accepted",
        read=bool,
    ),
    _engine(
        "disable_self_check",
        "start with speculation without comparing a request with drafts and without",
        read=bool,
        choices=("true",),
    ),
    _engine("speculative_debug", f"drafts for diagnosis: {DEBUG_HELP}"),
)

ENGINE_FLAGS = (*MODEL_FLAGS, *MEMORY_FLAGS, *SPECULATION_FLAGS)

# They set nothing: what they may say is so.
FIXED_FLAGS = tuple(
    Flag(
        name=name,
        read=type(fixed.value),
        choices=(str(fixed.value).lower(),),
        help=fixed.why,
    )
    for name, fixed in FIXED.items()
)


def _sampling(name: str, help: str, *, field: str | None = None, **more: Any) -> Flag:
    """An option that sets a sampling parameter; not given, what lies below it counts."""
    return Flag(name=name, help=help, field=field or name, **more)


SAMPLING_FLAGS = (
    _sampling("max_new_tokens", "tokens to generate at most", read=int),
    _sampling("min_new_tokens", "tokens before the text may end", read=int),
    _sampling("temperature", "0 takes the likeliest token", read=float),
    _sampling("top_p", "keep the likeliest tokens of this probability together", read=float),
    _sampling("top_k", "keep so many of the likeliest tokens, -1 keeps all", read=int),
    _sampling("min_p", "drop tokens below this share of the likeliest", read=float),
    _sampling("frequency_penalty", "off a token's logit for each time it came", read=float),
    _sampling("presence_penalty", "off the logit of every token that came", read=float),
    _sampling("repetition_penalty", "divides the logits of tokens seen before", read=float),
    _sampling("stop", "a string that ends the text", metavar="TEXT", is_list=True),
    _sampling("stop_token_ids", "a token that ends the text", read=int, is_list=True),
    _sampling("ignore_eos", "go on past the end of the text", read=bool),
    _sampling("n", "samples of each prompt", read=int),
    _sampling("stream_interval", "tokens that a stream shows at once, at least", read=int),
    _sampling("seed", "fixes the noise; drawn if not given", field="sampling_seed", read=int),
)

SAMPLING_DEFAULTS_FLAG = Flag(
    name="sampling_defaults",
    choices=SAMPLING_DEFAULTS,
    default="model",
    help="what counts where nothing is given: generation_config.json, or fixed values",
    field="sampling_defaults",
)

SAMPLING_SOURCES = (
    Flag(
        name="sampling_params",
        aliases=("--preferred-sampling-params",),
        read=json_object,
        metavar="JSON",
        help="any sampling parameters by name; the flags above come before them",
    ),
    SAMPLING_DEFAULTS_FLAG,
)

LOG_FLAGS = (
    Flag(
        name="log_level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="what goes to standard error; info shows the numerics and every compilation",
    ),
    Flag(name="verbose", aliases=("-v",), read=bool, default=False, help="the same as info of it"),
)

ENGINE_GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "model": MODEL_FLAGS,
    "memory and schedule": MEMORY_FLAGS,
    "speculative decoding": SPECULATION_FLAGS,
    "what is so in any case": FIXED_FLAGS,
}
SAMPLING_GROUP: Mapping[str, tuple[Flag, ...]] = {"sampling": (*SAMPLING_FLAGS, *SAMPLING_SOURCES)}


def _given(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Values that were given or have a default, by the field they set."""
    values = {flag.field: getattr(args, flag.name) for flag in flags if flag.field}
    return {str(field): value for field, value in values.items() if value is not None}


def engine_arguments(args: argparse.Namespace, *more: Flag) -> dict[str, Any]:
    """Arguments of `Engine`.

    Args:
      more: flags of one command that set some too.

    Raises:
      UsageError: no model, or a value out of its range.
    """
    arguments = _given(args, (*ENGINE_FLAGS, *more))
    if "model_path" not in arguments:
        raise UsageError("--model is required")
    arguments["compilation_cache_dir"] = args.compilation_cache_dir or None
    engine_config(arguments)
    return arguments


def single_sequence(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an engine that has one sequence at a time, unless they ask for more.

    A step computes every slot, whether a sequence is in it or not.
    """
    return {"max_running_requests": 1, **arguments}


def engine_config(arguments: Mapping[str, Any]) -> EngineConfig:
    """The part of the arguments that is an engine's configuration.

    Raises:
      UsageError: a value out of its range.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    try:
        return EngineConfig(**{name: arguments[name] for name in known & set(arguments)})
    except ValueError as error:
        raise UsageError(str(error)) from error


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters that were asked for, by field; flags come before `--sampling-params`.

    Raises:
      UsageError: an unknown name, or a value out of its range.
    """
    arguments = canonical(args.sampling_params or {}) | _given(args, SAMPLING_FLAGS)
    try:
        as_sampling_params(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return arguments


def canonical(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters with their aliases replaced, so that two layers of them can be merged."""
    return {ALIASES.get(name, name): value for name, value in params.items()}
