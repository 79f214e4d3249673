"""Chat templates against transformers: the text and the ids of whole conversations."""

import enum
import json
import shutil

import pytest
import transformers

from serve.model_path import resolve_model_path
from serve.tokenizer import Tokenizer
from tests.serve import tokenizer_files
from tests.serve.conversations import CONVERSATIONS, PERSON, QWEN3_STYLE, WEATHER

MODELS = ["demo", "qwen3_style", "tags"]
THINKING = [{}, {"enable_thinking": True}, {"enable_thinking": False}]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The demos' files; their tokenizer with a Qwen3-like template; one using every extension."""
    demo = resolve_model_path("demo")
    styled = tmp_path_factory.mktemp("styled")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(demo / name, styled)
    (styled / "chat_template.jinja").write_text(QWEN3_STYLE)
    tags = tokenizer_files.write(tmp_path_factory.mktemp("tags"))
    return {"demo": demo, "qwen3_style": styled, "tags": tags}


@pytest.fixture(scope="module")
def pairs(directories):
    """For each model, our tokenizer and transformers'."""
    return {
        name: (
            Tokenizer.from_directory(directory),
            transformers.PreTrainedTokenizerFast.from_pretrained(directory),
        )
        for name, directory in directories.items()
    }


@pytest.fixture
def demo(pairs):
    return pairs["demo"][0]


@pytest.fixture
def tags(pairs):
    return pairs["tags"][0]


def _both(pair, messages, tools, prompt, variables):
    """Our text and theirs, or None where transformers raises."""
    ours, theirs = pair
    try:
        expected = theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **variables
        )
    except Exception:
        with pytest.raises(ValueError, match="^the chat template: "):
            ours.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, **variables
            )
        return None, None
    text = ours.apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, **variables
    )
    return text, expected


def test_there_are_thirty_conversations_with_every_feature():
    text = json.dumps(CONVERSATIONS, ensure_ascii=False)
    assert len(CONVERSATIONS) == 30
    assert sum(tools is not None for _, tools in CONVERSATIONS) >= 8
    for feature in ("tool_calls", '"tool"', "reasoning_content", "日本語", "<b>", '"type": "text"'):
        assert feature in text, feature


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("variables", THINKING, ids=["default", "thinking", "not_thinking"])
def test_texts_and_ids_equal_transformers(pairs, model, prompt, variables):
    num_rendered = 0
    for index, (messages, tools) in enumerate(CONVERSATIONS):
        text, expected = _both(pairs[model], messages, tools, prompt, variables)
        assert text == expected, index
        if text is None or expected is None:
            continue
        num_rendered += 1
        ours, theirs = pairs[model]
        ids = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, **variables
        )
        assert ours.encode(text) == ids["input_ids"], index
    # Each of the two real templates takes every conversation, the one for tags what it must.
    assert num_rendered == 30 if model != "tags" else num_rendered > 15


def test_special_tokens_can_be_replaced_by_variables(pairs):
    text, expected = _both(pairs["tags"], [PERSON], None, True, {"eos_token": "X"})
    assert text == expected
    assert text is not None and text.endswith("X")


def test_template_may_stand_in_the_settings(tmp_path, tags):
    other = Tokenizer.from_directory(tokenizer_files.write(tmp_path, template_file=False))
    assert other.apply_chat_template([PERSON]) == tags.apply_chat_template([PERSON])


class _Role(enum.StrEnum):
    USER = "user"


def test_text_of_a_subclass_is_plain_text_to_the_template(pairs):
    text, expected = _both(pairs["demo"], [{"role": _Role.USER, "content": "x"}], None, True, {})
    assert text == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a chat needs at least one message"),
        ("hi", "a chat must be a list of messages, got str"),
        (PERSON, "a chat must be a list of messages, got dict"),
        ([PERSON, "hi"], "message 1: a chat message must be a dict, got str"),
        ([{"content": "x"}], "message 0: a chat message needs a role, got None"),
        ([PERSON, {"role": 3, "content": "x"}], "message 1: a chat message needs a role, got 3"),
        (
            [PERSON, {"role": "user", "content": 5}],
            "message 1: content must be a string or a list of parts, got 5",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, 7]}],
            "message 0: a part of content must be a dict or a string, got 7",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "message 0: image_url input is not supported: this engine is text only",
        ),
        (
            [PERSON, {"role": "user", "content": [{"type": "video", "video": "x"}]}],
            "message 1: video input is not supported: this engine is text only",
        ),
        (
            [{"role": "user", "content": "x", "more": object()}],
            "message 0: a chat template takes JSON values only, got object",
        ),
        ([{"role": "judge", "content": "x"}], "the chat template: no such role: judge"),
    ],
)
def test_bad_chats_are_one_clear_error(tags, messages, message):
    with pytest.raises(ValueError) as error:
        tags.apply_chat_template(messages)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (WEATHER, "tools must be a list of JSON schemas, got dict"),
        ([WEATHER, "f"], "tool 1 must be a JSON schema, got str"),
    ],
)
def test_bad_tools_are_one_clear_error(demo, tools, message):
    with pytest.raises(ValueError) as error:
        demo.apply_chat_template([PERSON], tools=tools)
    assert str(error.value) == message


def test_variables_cannot_replace_the_conversation(demo):
    with pytest.raises(ValueError, match="must not be called 'documents'"):
        demo.apply_chat_template([PERSON], documents=[])


def test_what_a_template_trips_over_is_a_value_error(demo):
    calls = [{"function": {"name": "f", "arguments": "not an object"}}]
    with pytest.raises(ValueError, match="^the chat template: "):
        demo.apply_chat_template([{"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "the chat template: access to attribute '__class__'"),
        ("{% set ns = namespace(_x=1) %}", "the chat template: namespaces take no private names"),
        ("{{ messages.append(1) }}", "the chat template: "),
        ("{{ 'a' + 1 }}", "the chat template: TypeError: "),
        ("{{ 1 / 0 }}", "the chat template: ZeroDivisionError: "),
    ],
)
def test_templates_are_fenced_in(tmp_path, template, message):
    tokenizer_files.write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_directory(tmp_path)
    with pytest.raises(ValueError) as error:
        tokenizer.apply_chat_template([PERSON])
    assert str(error.value).startswith(message)
