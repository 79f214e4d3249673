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

# What a template may do wrong with the messages it is given, beside raising an error of its own.
TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# What `render` itself gives to a template.
RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt")

_PLAIN_SCALARS: Mapping[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}

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
            ValueError: no messages, one that is none or holds media (the index is named), or the
                template refuses them.
        """
        template = self.templates["default"]
        if tools is not None:
            template = self.templates.get("tool_use", template)
        # All of it is checked before the template sees any of it.
        names = {
            **self.special_tokens,
            **_variables(variables or {}),
            "messages": _messages(messages),
            "tools": _tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(names)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template: {error.message}") from error
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template: {type(error).__name__}: {error}") from error


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages as templates expect them, or raise naming the index of a bad one."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"a chat must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("a chat needs at least one message")
    checked = []
    for index, message in enumerate(messages):
        try:
            checked.append(_message(message))
        except ValueError as error:
            raise ValueError(f"message {index}: {error}") from error
    return checked


def _tools(tools: Any) -> Any:
    """Return the tools as plain data, or raise naming the index of one that is no JSON object."""
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ValueError(f"tools must be a list of JSON schemas, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tool {index} must be a JSON schema, got {type(tool).__name__}")
    return _plain(tools)


def _variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caller's variables as plain data; they replace special tokens, nothing else."""
    taken = [name for name in RESERVED_NAMES if name in variables]
    if taken:
        raise ValueError(f"chat template variables must not be called {taken[0]!r}")
    return _plain(variables)


def _message(message: Any) -> dict[str, Any]:
    """Return a message as templates expect it: no absent keys, reasoning under its usual names."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a chat message must be a dict, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"a chat message needs a role, got {role!r}")
    _check_content(message.get("content"))
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    for name in REASONING_NAMES:
        if name in plain:
            return {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
    return plain


def _check_content(content: Any):
    """Raise if a message's content is neither text nor parts, or if one part is not text."""
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise ValueError(f"content must be a string or a list of parts, got {content!r}")
    for part in content:
        if isinstance(part, Mapping):
            named = [name for name in MEDIA_TYPES if part.get("type") == name or name in part]
            if named:
                raise ValueError(f"{named[0]} input is not supported: this engine is text only")
        elif not isinstance(part, str):
            raise ValueError(f"a part of content must be a dict or a string, got {part!r}")


def _plain(value: Any) -> Any:
    """Return `value` rebuilt of JSON types, so that a template meets no object with methods."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    if value is None or isinstance(value, bool):
        return value
    # A subclass of these, an enum for one, has methods of its own: its plain value has none.
    for scalar, plain in _PLAIN_SCALARS.items():
        if isinstance(value, scalar):
            return plain(value)
    raise ValueError(f"a chat template takes JSON values only, got {type(value).__name__}")
