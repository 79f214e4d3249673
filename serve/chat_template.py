"""Chat messages to prompt text, through the Jinja template that comes with a model.

The environment is the one that templates are written for (`transformers`): the sandbox, its
block trimming, loop controls, a `tojson` that does not escape HTML, `raise_exception`,
`strftime_now` and the `generation` tag. A template is input, not code: it sees plain data only.
"""

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

# What a message's reasoning is called by different senders; templates read the first.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

MEDIA_TYPES = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: renders its body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the node for one tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_body(self, caller: Any) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any):
        # `self` comes in `args`, so that a template may set a name `self`.
        self, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any):
        _refuse_private(name)
        super().__setitem__(name, value)


class _DictMaker:
    """What templates may do with `dict`: call it, and `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        """Return `dict.fromkeys` of the arguments."""
        return dict.fromkeys(*args)


def _refuse_private(name: Any):
    """Raise for a name that starts with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespaces take no private names, got {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str):
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def compile_template(source: str) -> jinja2.Template:
    """Return the compiled template.

    Raises:
        ValueError: `source` is no template.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _DictMaker()
    environment.globals["namespace"] = _Namespace
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template, line {error.lineno}: {error.message}") from error


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The templates of one model and the special tokens they may name.

    Attributes:
        templates: by name; `default` always, `tool_use` sometimes.
        special_tokens: variables of every rendering, `eos_token` for one.
    """

    templates: Mapping[str, jinja2.Template]
    special_tokens: Mapping[str, Any]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: each with `role` and `content`, oldest first.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end with the header of the answer to come.
            variables: further names for the template, such as `enable_thinking`.

        Raises:
            ValueError: no messages, media in a message, or the template refuses them.
        """
        if not messages:
            raise ValueError("a chat needs at least one message")
        template = self.templates["default"]
        if tools is not None:
            template = self.templates.get("tool_use", template)
        try:
            return template.render(
                messages=[_message(message) for message in messages],
                tools=_plain(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **_plain(variables or {})},
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template: {error.message}") from error


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: no absent keys, reasoning under its usual names."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a chat message must be a dict, got {type(message).__name__}")
    _refuse_media(message.get("content"))
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    for name in REASONING_NAMES:
        if name in plain:
            return {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
    return plain


def _refuse_media(content: Any):
    """Raise if one part of a message's content is not text."""
    for part in content if isinstance(content, list | tuple) else ():
        if isinstance(part, Mapping):
            named = [name for name in MEDIA_TYPES if part.get("type") == name or name in part]
            if named:
                raise ValueError(f"{named[0]} input is not supported: this engine is text only")


def _plain(value: Any) -> Any:
    """Return `value` rebuilt of JSON types, so that a template meets no object with methods."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"a chat template takes JSON values only, got {type(value).__name__}")
