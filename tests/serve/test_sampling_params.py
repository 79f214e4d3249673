"""Names, defaults, ranges and messages of the sampling parameters, as in the documented table."""

import dataclasses
import math

import numpy as np
import pytest

from serve.sampling_params import (
    UNSUPPORTED_PARAMS,
    SamplingParams,
    as_sampling_params,
    require_supported,
    require_vocabulary,
    with_model_defaults,
)

DEFAULTS = {
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "stop": None,
    "stop_token_ids": None,
    "stop_regex": None,
    "ignore_eos": False,
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "n": 1,
    "sampling_seed": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stream_interval": None,
    "custom_params": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
}

# name, values at the edges of the range, values outside it, the message up to the value
RANGES = [
    ("max_new_tokens", [0, 1, 10**9], [-1, 1.0, True, "3"], "max_new_tokens must be at least 0"),
    ("min_new_tokens", [0, 1, 128], [-1, 0.5, False], "min_new_tokens must be at least 0"),
    (
        "temperature",
        [0, 0.0, 1e-7, 2.5],
        [-0.1, math.nan, math.inf, True, "1", 10**400],
        "temperature must be a non-negative finite number",
    ),
    ("top_p", [1e-6, 0.5, 1], [0, -0.5, 1.0001, 2, math.nan, True], "top_p must be in (0, 1]"),
    (
        "top_k",
        [-1, 1, 50],
        [0, -2, 1.0, True, "5"],
        "top_k must be -1 (disable) or at least 1",
    ),
    ("min_p", [0, 0.05, 1], [-0.01, 1.01, math.nan, False], "min_p must be in [0, 1]"),
    (
        "frequency_penalty",
        [-2, 0, 2],
        [-2.1, 2.1, math.inf],
        "frequency_penalty must be in [-2, 2]",
    ),
    ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan], "presence_penalty must be in [-2, 2]"),
    (
        "repetition_penalty",
        [0.1, 1, 2],
        [0, -1, 2.1, math.nan],
        "repetition_penalty must be in (0, 2] (1.0 = no penalty)",
    ),
    ("n", [1, 64], [0, -1, 65, 1.0, True], "n must be in [1, 64]"),
    ("stream_interval", [1, 8], [0, -1, 1.5, True], "stream_interval must be at least 1"),
    ("logprobs", [0, 20], [-1, 21, True, 1.0], "logprobs must be in [0, 20]"),
    ("prompt_logprobs", [0, 20], [-1, 21, False], "prompt_logprobs must be in [0, 20]"),
    ("truncate_prompt_tokens", [1, 9], [0, -1, True], "truncate_prompt_tokens must be at least 1"),
    ("ignore_eos", [True, False], [1, 0, "yes"], "ignore_eos must be a boolean"),
    ("skip_special_tokens", [True, False], [1, "no"], "skip_special_tokens must be a boolean"),
]


def test_defaults_are_the_table():
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, good, _, _ in RANGES for value in good]
)
def test_edges_are_accepted(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(name, value, message) for name, _, bad, message in RANGES for value in bad],
)
def test_outside_is_refused_with_value_and_rule(name, value, message):
    with pytest.raises(ValueError) as error:
        as_sampling_params({name: value})
    assert str(error.value) == f"{message}, got {value!r}"


@pytest.mark.parametrize("name", DEFAULTS)
def test_none_is_the_default(name):
    assert getattr(as_sampling_params({name: None}), name) == DEFAULTS[name]


def test_min_new_tokens_stays_below_max_new_tokens():
    assert SamplingParams(min_new_tokens=4, max_new_tokens=4).min_new_tokens == 4
    with pytest.raises(ValueError) as error:
        SamplingParams(min_new_tokens=5, max_new_tokens=4)
    assert str(error.value) == "min_new_tokens must be in [0, max_new_tokens(4)], got 5"


def test_numpy_scalars_become_python_numbers():
    params = SamplingParams(top_k=np.int32(3), top_p=np.float32(0.5))
    assert (type(params.top_k), type(params.top_p)) == (int, float)
    with pytest.raises(ValueError):
        SamplingParams(top_k=np.bool_(True))


@pytest.mark.parametrize("value", [-(2**63), -1, 0, 2**63 - 1])
def test_seed_is_a_signed_64_bit_integer(value):
    assert as_sampling_params({"seed": value}).sampling_seed == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("7", "sampling_seed must be an integer, got str"),
        (1.0, "sampling_seed must be an integer, got float"),
        (True, "sampling_seed must be an integer, got bool"),
        (2**63, f"sampling_seed must be in [-2^63, 2^63-1], got {2**63}"),
    ],
)
def test_bad_seed(value, message):
    with pytest.raises(ValueError) as error:
        as_sampling_params({"sampling_seed": value})
    assert str(error.value) == message


def test_alias_beside_its_name_is_refused():
    with pytest.raises(ValueError, match="sampling_seed is given twice"):
        as_sampling_params({"seed": 1, "sampling_seed": 1})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("temprature", "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        (
            "max_completion_tokens",
            "unknown sampling parameter 'max_completion_tokens'; did you mean 'max_new_tokens'?",
        ),
        ("topk", "unknown sampling parameter 'topk'; did you mean 'top_k'?"),
        ("zzzzzz", "unknown sampling parameter 'zzzzzz'"),
        ("beam_width", "beam_width is not supported"),
        ("lora_path", "lora_path is not supported"),
        ("image_data", "image_data is not supported"),
        (3, "sampling parameters have names, got the key 3"),
    ],
)
def test_unknown_keys(key, message):
    with pytest.raises(ValueError) as error:
        as_sampling_params({key: 1})
    assert str(error.value) == message


def test_only_known_forms_are_taken():
    params = SamplingParams(top_k=3)
    assert as_sampling_params(params) is params
    assert as_sampling_params(None) == SamplingParams()
    with pytest.raises(TypeError, match="must be SamplingParams, a dict or None, got list"):
        as_sampling_params([("top_k", 3)])


def test_stop_strings():
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "yz"]).stop == ("x", "yz")
    assert SamplingParams(stop=[]).stop is None
    assert len(SamplingParams(stop=["x"] * 32).stop or ()) == 32
    for bad, message in [
        (["x"] * 33, "at most 32 stop strings are allowed, got 33"),
        (["x", ""], "stop strings must not be empty"),
        (["x", 1], "stop must be a string or a list of strings, got ['x', 1]"),
        (5, "stop must be a string or a list of strings, got 5"),
    ]:
        with pytest.raises(ValueError) as error:
            as_sampling_params({"stop": bad})
        assert str(error.value) == message


def test_stop_regex():
    assert SamplingParams(stop_regex="a+").stop_regex == ("a+",)
    assert SamplingParams(stop_regex="a" * 256).stop_regex == ("a" * 256,)
    for bad, message in [
        (["a"] * 33, "at most 32 stop_regex patterns are allowed, got 33"),
        ("a" * 257, "a stop_regex pattern must have 1 to 256 bytes, got 257"),
        ("ä" * 129, "a stop_regex pattern must have 1 to 256 bytes, got 258"),
        ("(", "stop_regex '(' is not a pattern: "),
    ]:
        with pytest.raises(ValueError) as error:
            as_sampling_params({"stop_regex": bad})
        assert str(error.value).startswith(message)


def test_token_ids_are_checked_against_the_vocabulary():
    params = as_sampling_params({"stop_token_ids": [0, 9], "logit_bias": {"9": 1, 0: -1.5}})
    assert params.stop_token_ids == (0, 9)
    assert params.logit_bias == {9: 1.0, 0: -1.5}
    require_vocabulary(params, 10)
    for bad, message in [
        ({"stop_token_ids": [9]}, "stop_token_ids must be in [0, 8], got 9"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be in [0, 8], got -1"),
        ({"logit_bias": {9: 0.5}}, "logit_bias must have keys in [0, 8], got 9"),
        ({"logit_bias": {-1: 0.5}}, "logit_bias must have keys in [0, 8], got -1"),
    ]:
        with pytest.raises(ValueError) as error:
            require_vocabulary(as_sampling_params(bad), 9)
        assert str(error.value) == message


@pytest.mark.parametrize(
    "bad",
    [
        {"stop_token_ids": "12"},
        {"stop_token_ids": [1.0]},
        {"stop_token_ids": [True]},
        {"logit_bias": [1]},
        {"logit_bias": {1: 2.0, "1": 2.0}},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"custom_params": {"x": math.nan}},
        {"custom_params": {"x": object()}},
        {"custom_params": [1]},
        {"json_schema": 3},
    ],
)
def test_malformed_collections(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        as_sampling_params(bad)


def test_one_constraint_at_most():
    assert SamplingParams(json_schema="", regex="a").json_schema is None
    assert as_sampling_params({"json_schema": {"type": "object"}}).json_schema == (
        '{"type": "object"}'
    )
    with pytest.raises(ValueError) as error:
        SamplingParams(regex="a", ebnf="b")
    assert str(error.value) == (
        "Only one of json_schema, regex, ebnf, or structural_tag can be set."
    )
    assert SamplingParams(ebnf="x" * 65536).ebnf
    with pytest.raises(ValueError, match="ebnf must be at most 65536 bytes, got 65537"):
        SamplingParams(ebnf="x" * 65537)


def test_greedy_is_a_tiny_temperature():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-7).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_params_are_hashable_and_compare_by_value():
    one = as_sampling_params({"stop": ["a"], "logit_bias": {1: 2.0}, "seed": 3})
    two = as_sampling_params({"stop": "a", "logit_bias": {1: 2.0}, "seed": 3})
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"max_tokens": 3}, "max_new_tokens", 3),
        ({"min_tokens": 3}, "min_new_tokens", 3),
        ({"seed": 3}, "sampling_seed", 3),
        ({"include_stop_str_in_output": True}, "no_stop_trim", True),
    ],
)
def test_other_engines_names(given, field, value):
    assert getattr(as_sampling_params(given), field) == value
    with pytest.raises(ValueError, match=f"{field} is given twice"):
        as_sampling_params(given | {field: value})


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3, "stop_token_ids": [1]}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"logit_bias": {1: 0.0}}, True),
        ({"min_new_tokens": 1}, True),
    ],
)
def test_which_parameters_change_logits(given, changes):
    assert as_sampling_params(given).changes_logits == changes


def test_the_models_own_defaults_fill_what_is_not_given():
    model = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "eos_token_id": [1, 2],
        "do_sample": True,
        "max_length": 20,
        "min_p": None,
    }
    merged = with_model_defaults({"top_k": 5, "top_p": None, "max_tokens": 7}, model)
    assert merged == SamplingParams(
        temperature=0.6, top_k=5, top_p=0.95, repetition_penalty=1.05, max_new_tokens=7
    )
    assert with_model_defaults(None, {}) == SamplingParams()
    assert with_model_defaults(None, {"top_k": 0}) == SamplingParams()
    ready = SamplingParams()
    assert with_model_defaults(ready, model) is ready
    with pytest.raises(ValueError) as error:
        with_model_defaults({"top_p": 0.5}, {"top_p": 7})
    assert str(error.value) == "generation_config.json: top_p must be in (0, 1], got 7"
    with pytest.raises(TypeError, match="got list"):
        with_model_defaults([], model)


UNSUPPORTED_VALUES = {
    "json_schema": "{}",
    "regex": "a",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
}


@pytest.mark.parametrize("name", UNSUPPORTED_VALUES)
def test_constrained_decoding_is_refused_by_name(name):
    params = as_sampling_params({name: UNSUPPORTED_VALUES[name]})
    with pytest.raises(ValueError) as error:
        require_supported(params)
    assert str(error.value) == f"{name} is not supported by this engine yet"


def test_everything_else_is_supported():
    values = {name: good[-1] for name, good, _, _ in RANGES}
    values |= {"max_new_tokens": 200, "stop": ["x"], "stop_regex": "x", "stop_token_ids": [1]}
    values |= {"logit_bias": {1: 1.0}, "custom_params": {"x": 1}, "seed": 1}
    values |= {"no_stop_trim": True, "spaces_between_special_tokens": False}
    require_supported(as_sampling_params(values))
    assert set(DEFAULTS) - set(values) == {*UNSUPPORTED_PARAMS, "sampling_seed"}
