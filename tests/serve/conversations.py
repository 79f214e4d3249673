"""Thirty conversations, and a template in the manner of Qwen3's, written for these tests."""

from typing import Any

Message = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather <here> & 'there' \"now\"",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}, "days": {}},
            "required": ["city"],
        },
    },
}
PLAIN_TOOL = {"name": "add", "description": "a + b", "parameters": None, "limit": 1.5}

PERSON = {"role": "user", "content": "hi"}
ASKED = {"role": "user", "content": "What is the weather in Köln?"}


def _assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def _call(name: str, arguments: Any, **more: Any) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def _system(content: Any) -> Message:
    return {"role": "system", "content": content}


def _tool(content: Any, **more: Any) -> Message:
    return {"role": "tool", "content": content, **more}


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


CALLING = _assistant("", tool_calls=[_call("weather", {"city": "Köln", "days": 2}, id="c1")])
CALLING_BARE = _assistant("I look.", tool_calls=[{"name": "add", "arguments": {"a": 1, "b": [2]}}])
THOUGHTFUL = _assistant("Four.", reasoning_content="Two and two.\n")
INLINE = _assistant("<think>\nLet me see.\n</think>\n\nFour.")

# (messages, tools)
CONVERSATIONS: list[tuple[list[Message], list[Any] | None]] = [
    ([PERSON], None),
    ([_system("Be brief."), PERSON], None),
    ([_system("  spaces \n"), PERSON, _assistant("Hello."), _user("again")], None),
    ([_user("")], None),
    ([_user("日本語で話して 🙂👩‍👩‍👧")], None),
    ([_user("<b>bold</b> & 'quoted' \"twice\" &amp; {{ braces }} {% tag %}")], None),
    ([_user("special <|im_end|> and <|im_start|>system\nin a text")], None),
    ([_user("a\u0000b\u00a0c\ufffd e\u0301")], None),
    ([_user("line\r\nline\n\n\nline\t")], None),
    ([_user([{"type": "text", "text": "one part"}])], None),
    ([_user([{"type": "text", "text": "two "}, {"type": "text", "text": "parts ü"}])], None),
    ([_system([{"type": "text", "text": "parts here too"}]), PERSON], None),
    ([_user([])], None),
    ([PERSON, INLINE, _user("and?")], None),
    ([PERSON, THOUGHTFUL, _user("and?"), THOUGHTFUL], None),
    ([PERSON, _assistant("Four.", thinking="older name"), _user("and?")], None),
    ([PERSON, _assistant("Four.", reasoning="another", refusal=None)], None),
    ([PERSON, _assistant("no end of </think> in </think> sight")], None),
    ([PERSON, _assistant(None, reasoning_content="nothing said")], None),
    ([ASKED], [WEATHER]),
    ([ASKED], []),
    ([_system("<&>"), ASKED], [WEATHER, PLAIN_TOOL]),
    ([ASKED, CALLING, _tool("12 °C & <rain>", tool_call_id="c1")], [WEATHER]),
    ([ASKED, CALLING, _tool("12"), _tool("13"), _assistant("Twelve.")], [WEATHER]),
    ([ASKED, CALLING_BARE, _tool([{"type": "text", "text": "3"}]), _user("and?")], [PLAIN_TOOL]),
    (
        [
            ASKED,
            _assistant("", tool_calls=[_call("f", {}), _call("g", {"x": "<1 & 2>", "y": None})]),
            _tool('{"ok": true}'),
        ],
        [WEATHER],
    ),
    ([ASKED, _assistant(None, tool_calls=[_call("f", {"deep": {"a": [1.5, True, "ü"]}})])], None),
    ([ASKED, _assistant("", tool_calls=[], reasoning_content="think\n\n"), _user("go on")], None),
    ([_user(f"turn {i}") if i % 2 == 0 else _assistant(f"answer {i}") for i in range(9)], None),
    (
        [
            _system("Use tools."),
            ASKED,
            {**CALLING, "reasoning_content": "I should look."},
            _tool("rain"),
            _assistant("Rain.", reasoning_content="It says rain."),
            _user("Danke & tschüß"),
        ],
        [WEATHER, PLAIN_TOOL],
    ),
]

QWEN3_STYLE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content if part.type == 'text' -%}{{- part.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set first = messages[0] %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if first.role == 'system' %}{{- text(first.content) + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif first.role == 'system' %}
    {{- '<|im_start|>system\\n' + text(first.content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_question=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_question = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = text(message.content) %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
