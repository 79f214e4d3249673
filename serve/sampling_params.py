"""What a request asks of the sampler: every name, its default, its range, its error message.

`SamplingParams` is the one internal form. `as_sampling_params` makes it from whatever a caller
gave; `require_supported` refuses what the engine cannot do yet, by name.
"""

import dataclasses
import difflib
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qwen_hybrid.step import MAX_TOP_LOGPROBS
from serve.stop_regex import compile_patterns

MAX_STOPS = 32
MAX_STOP_REGEX_BYTES = 256
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_SAMPLES = 64
MAX_TOKEN_IDS_LOGPROB = 128
GREEDY_TEMPERATURE = 1e-6

# Other engines' names for the same thing.
ALIASES = {
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
}

# Names for something near, better guesses than the spelling gives.
FOREIGN_NAMES = {"max_completion_tokens": "max_new_tokens", "do_sample": "temperature"}

# What `generation_config.json` may set; its other entries are not about sampling, or not ours.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# Known elsewhere, never here: refused by name, so that nobody hunts for a spelling.
REFUSED_NAMES = frozenset(
    {
        "beam_width",
        "watermark",
        "return_hidden_states",
        "lora_path",
        "lora_id",
        "best_of",
        "use_beam_search",
        "image_data",
        "audio_data",
        "video_data",
        "session_params",
        "session_id",
        "priority",
    }
)

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")

# Parsed and checked, but not carried out yet: each leaves this list with the change that adds it.
UNSUPPORTED_PARAMS = GRAMMARS


def _integer(value: Any) -> int | None:
    """Return `value` as an int, or None if it is not one; a bool is not."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return None


def _real(value: Any) -> float:
    """Return `value` as a float, NaN (which no range holds) if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


@dataclasses.dataclass(frozen=True)
class _Number:
    """A range of finite numbers; called with a field's name and value, returns the number.

    Attributes:
        rule: the range in words, for the message.
        low: the smallest valid value.
        high: the largest valid value.
        above_low: `low` itself is invalid.
        integer: only integers are valid.
        also: one more valid value, outside the range.
    """

    rule: str
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    integer: bool = False
    also: float | None = None

    def __call__(self, name: str, value: Any) -> Any:
        """Return `value` as an int or a float, or raise with the value and the rule."""
        number = _integer(value) if self.integer else _real(value)
        if number is None or not self._holds(number):
            raise ValueError(f"{name} must be {self.rule}, got {value!r}")
        return number

    def _holds(self, number: float) -> bool:
        """Return whether `number` is valid."""
        if number == self.also:
            return True
        if isinstance(number, float) and not math.isfinite(number):
            return False
        return self.low <= number <= self.high and not (self.above_low and number == self.low)


def _boolean(name: str, value: Any) -> bool:
    """Return `value` if it is a bool; no other type has a truth that we trust."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a boolean, got {value!r}")
    return value


# Which ids exist is the model's to say: `require_vocabulary` asks it.
_TOKEN_ID = _Number("made of token ids", integer=True)
_BIAS = _Number("finite")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """Return a string or a sequence of strings as a tuple."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} must be a string or a list of strings, got {value!r}")
    return tuple(value)


def _stop_strings(name: str, value: Any) -> tuple[str, ...] | None:
    """Return the stop strings, None if there are none."""
    strings = _strings(name, value)
    if len(strings) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, got {len(strings)}")
    if "" in strings:
        raise ValueError("stop strings must not be empty")
    return strings or None


def _stop_patterns(name: str, value: Any) -> tuple[str, ...] | None:
    """Return the stop patterns, None if there are none; each is short and can be matched."""
    patterns = _strings(name, value)
    if len(patterns) > MAX_STOPS:
        raise ValueError(
            f"at most {MAX_STOPS} stop_regex patterns are allowed, got {len(patterns)}"
        )
    for pattern in patterns:
        num_bytes = len(pattern.encode())
        if not 1 <= num_bytes <= MAX_STOP_REGEX_BYTES:
            raise ValueError(
                f"a stop_regex pattern must have 1 to {MAX_STOP_REGEX_BYTES} bytes, got {num_bytes}"
            )
    compile_patterns(patterns)
    return patterns or None


def _token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Return the stop ids as a tuple, None if there are none."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    ids = [_TOKEN_ID(name, item) for item in value]
    return tuple(ids) or None


def _logit_bias(name: str, value: Any) -> Mapping[int, float] | None:
    """Return id -> bias; ids may come as decimal strings, as JSON has no other keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping from token id to bias, got {value!r}")
    bias = {}
    for key, item in value.items():
        token = _TOKEN_ID(name, int(key) if isinstance(key, str) and key.isdecimal() else key)
        if token in bias:
            raise ValueError(f"{name} names the token {token} twice")
        bias[token] = _BIAS(name, item)
    return bias or None


def _grammar(name: str, value: Any) -> str | None:
    """Return a constraint's text, None if it is empty."""
    text = _dumps(name, value) if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string, got {value!r}")
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{name} must be at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}")
    return text or None


def _custom_params(name: str, value: Any) -> Mapping[str, Any]:
    """Return a copy of a JSON object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, got {value!r}")
    return json.loads(_dumps(name, value))


def _dumps(name: str, value: Mapping[str, Any]) -> str:
    """Return `value` as JSON text, which has neither NaN nor infinities."""
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a JSON object: {error}") from error


def _seed(name: str, value: Any) -> int:
    """Return the seed, a signed 64-bit integer."""
    number = _integer(value)
    if number is None:
        raise ValueError(f"{name} must be an integer, got {type(value).__name__}")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must be in [-2^63, 2^63-1], got {number}")
    return number


# One canonicaliser per field: it returns the value that the field will hold, or raises.
_COUNT = _Number("at least 0", low=0, integer=True)
_PENALTY = _Number("in [-2, 2]", low=-2, high=2)
_NUM_TOP = _Number(f"in [0, {MAX_TOP_LOGPROBS}]", low=0, high=MAX_TOP_LOGPROBS, integer=True)
_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": _COUNT,
    "min_new_tokens": _COUNT,
    "temperature": _Number("a non-negative finite number", low=0),
    "top_p": _Number("in (0, 1]", low=0, high=1, above_low=True),
    "top_k": _Number("-1 (disable) or at least 1", low=1, integer=True, also=-1),
    "min_p": _Number("in [0, 1]", low=0, high=1),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": _Number("in (0, 2] (1.0 = no penalty)", low=0, high=2, above_low=True),
    "logit_bias": _logit_bias,
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "stop_regex": _stop_patterns,
    "ignore_eos": _boolean,
    "no_stop_trim": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "n": _Number(f"in [1, {MAX_SAMPLES}]", low=1, high=MAX_SAMPLES, integer=True),
    "sampling_seed": _seed,
    "json_schema": _grammar,
    "regex": _grammar,
    "ebnf": _grammar,
    "structural_tag": _grammar,
    "stream_interval": _Number("at least 1", low=1, integer=True),
    "custom_params": _custom_params,
    "logprobs": _NUM_TOP,
    "prompt_logprobs": _NUM_TOP,
    "truncate_prompt_tokens": _Number("at least 1", low=1, integer=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters, checked and in canonical form.

    None stands for a field's default everywhere. NaN and infinities are invalid everywhere, and
    a bool is no integer. Lists become tuples, mappings copies that nobody changes, empty ones None.

    Attributes:
        max_new_tokens: the most tokens to generate; 0 prefills only.
        min_new_tokens: EOS and stop ids cannot be sampled before this many tokens.
        temperature: below 1e-6 is greedy.
        top_p: keep the smallest set of tokens with at least this probability.
        top_k: keep this many tokens; -1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest.
        frequency_penalty: times a token's count among the generated ones, off its logit.
        presence_penalty: off the logit of every token generated before.
        repetition_penalty: divides positive, multiplies negative logits of seen tokens.
        logit_bias: added to the logits of these ids.
        stop: strings that end the text; cut from it unless `no_stop_trim`.
        stop_token_ids: end the text, beside the model's EOS set.
        stop_regex: patterns that end the text.
        ignore_eos: the model's EOS set does not end the text; `stop_token_ids` still do.
        no_stop_trim: leave the stop in the text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: taken as elsewhere, where it concerns tokenizers that put
            spaces between tokens; byte-level ones do not, so it changes nothing here.
        n: samples per prompt.
        sampling_seed: fixes the sampling noise; None draws one at admission.
        json_schema: constrain the text to this schema; at most one of the four is set.
        regex: constrain the text to this pattern.
        ebnf: constrain the text to this grammar.
        structural_tag: constrain the tagged parts of the text.
        stream_interval: stream a part every so many tokens.
        custom_params: a JSON object for extensions.
        logprobs: vLLM's name: log-probabilities of the output, with so many likeliest tokens.
        prompt_logprobs: the same of the prompt.
        truncate_prompt_tokens: keep only so many of the prompt's last tokens.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stream_interval: int | None = None
    custom_params: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self):
        """Check every field, put it in canonical form, then check the fields together."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            value = field.default if value is None else _FIELDS[field.name](field.name, value)
            object.__setattr__(self, field.name, value)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be in [0, max_new_tokens({self.max_new_tokens})], "
                f"got {self.min_new_tokens}"
            )
        if sum(getattr(self, name) is not None for name in GRAMMARS) > 1:
            raise ValueError("Only one of json_schema, regex, ebnf, or structural_tag can be set.")

    @property
    def greedy(self) -> bool:
        """Return whether the likeliest token is taken and no noise is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def changes_logits(self) -> bool:
        """Return whether logits change before temperature and filters."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.logit_bias is not None
            or self.min_new_tokens > 0
        )


def as_sampling_params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Return `params` as a `SamplingParams`; None gives the defaults.

    Args:
        params: ready ones, or a mapping by field name or alias.

    Raises:
        ValueError: an unknown or refused name, or a value out of its range.
        TypeError: neither form.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    return SamplingParams(**_fields(params))


def with_model_defaults(
    params: SamplingParams | Mapping[str, Any] | None, generation_config: Mapping[str, Any]
) -> SamplingParams:
    """Return `params` with the model's own values where the caller gave none.

    Ready `SamplingParams` say nothing about what was given, so they stay as they are.

    Args:
        params: what the caller gave.
        generation_config: the content of `generation_config.json`.

    Raises:
        ValueError: a bad value in either.
        TypeError: `params` has no form that is known.
    """
    if isinstance(params, SamplingParams):
        return params
    defaults = {
        name: generation_config[name]
        for name in MODEL_DEFAULTS
        if generation_config.get(name) is not None
    }
    if defaults.get("top_k") == 0:
        del defaults["top_k"]
    try:
        as_sampling_params(defaults)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from error
    given = {
        name: value
        for name, value in _fields({} if params is None else params).items()
        if value is not None
    }
    return SamplingParams(**defaults | given)


def _fields(params: Any) -> dict[str, Any]:
    """Return a mapping's values by field name."""
    if not isinstance(params, Mapping):
        raise TypeError(
            f"sampling_params must be SamplingParams, a dict or None, got {type(params).__name__}"
        )
    fields: dict[str, Any] = {}
    for key, value in params.items():
        name = _field_name(key)
        if name in fields:
            raise ValueError(f"{name} is given twice, once by its alias")
        fields[name] = value
    return fields


def _field_name(key: Any) -> str:
    """Return the field that a mapping's key means, or raise with the best guess."""
    if not isinstance(key, str):
        raise ValueError(f"sampling parameters have names, got the key {key!r}")
    name = ALIASES.get(key, key)
    if name in _FIELDS:
        return name
    if key in REFUSED_NAMES:
        raise ValueError(f"{key} is not supported")
    guesses = difflib.get_close_matches(key, [*_FIELDS, *ALIASES], n=1)
    guess = FOREIGN_NAMES.get(key) or (guesses[0] if guesses else None)
    hint = f"; did you mean {guess!r}?" if guess else ""
    raise ValueError(f"unknown sampling parameter {key!r}{hint}")


def require_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Check the token ids that `params` names against the model's vocabulary.

    Raises:
        ValueError: an id outside [0, vocab_size).
    """
    for name in ("logit_bias", "stop_token_ids"):
        outside = [i for i in getattr(params, name) or () if not 0 <= i < vocab_size]
        if outside:
            what = "have keys in" if name == "logit_bias" else "be in"
            raise ValueError(f"{name} must {what} [0, {vocab_size - 1}], got {outside[0]}")


def require_supported(params: SamplingParams) -> None:
    """Refuse, by name, parameters that this engine does not carry out yet.

    Raises:
        ValueError: a field of `UNSUPPORTED_PARAMS` differs from its default.
    """
    defaults = SamplingParams()
    for name in UNSUPPORTED_PARAMS:
        if getattr(params, name) != getattr(defaults, name):
            raise ValueError(f"{name} is not supported by this engine yet")
