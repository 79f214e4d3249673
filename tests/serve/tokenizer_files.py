"""A small byte-level tokenizer, trained here, saved as the files of a model directory."""

import json
import pathlib

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "def quicksort(xs):\n    return xs if len(xs) < 2 else quicksort(xs[1:])\n",
    "The quick brown fox can't jump over 12,345 lazy dogs; naïve façade, coöperate.\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\n",
    "日本語のテキスト、これは試験です。🙂🙃👩‍👩‍👧 emoji\n",
] * 3

TEMPLATE = """\
{%- set ns = namespace(last=messages|length - 1, seen=0) %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}
        {%- continue %}
    {%- endif %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('no such role: ' ~ message.role) }}
    {%- endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {%- if message.reasoning_content is defined %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- message.content }}
        {% endgeneration %}
    {%- elif message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- call.arguments | tojson(indent=2) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
{{- ns.seen }} {{ dict(a=1)['a'] }} {{ strftime_now('%Y')|length }}{{ eos_token }}
"""


def train() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with Qwen's splitting rule, of 400 entries or so."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # A token that is no special one, and one outside ASCII: both occur in real vocabularies.
    tokenizer.add_tokens(["<think>", "</think>", "東京"])
    return tokenizer


def write(directory: pathlib.Path, *, template_file: bool = True) -> pathlib.Path:
    """Write the files of a model directory, weights left out, and return it."""
    train().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "clean_up_tokenization_spaces": False,
    }
    if template_file:
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    else:
        settings["chat_template"] = TEMPLATE
    config = {"model_type": "qwen3_5", "text_config": {"eos_token_id": 0}}
    generation = {"eos_token_id": [2, 0], "temperature": 0.7}
    for name, content in [
        ("tokenizer_config.json", settings),
        ("config.json", config),
        ("generation_config.json", generation),
    ]:
        (directory / name).write_text(json.dumps(content))
    return directory
