"""The demo models' tokenizer: a byte-level BPE trained on the corpus, with Qwen's chat tokens."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
# Control tokens vanish from decoded text; tags stay, since parsers of reasoning and of tool calls
# look for them.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
TAG_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
# A line break takes the indentation that follows it, so that a level of indentation is one token;
# an identifier takes its underscores.
SPLIT_PATTERN = (
    r" ?[\p{L}\p{M}_]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}_]+"
    r"|\n[ \t]*"
    r"|[^\S\n]+(?!\S)"
    r"|\s"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train on the texts; the added tokens take the last ids below `vocab_size`."""
    added = CONTROL_TOKENS + TAG_TOKENS
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    control = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    tags = [AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(tags)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (Path(__file__).parent / "demo_chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    end_of_text, end_of_turn = (tokenizer.token_to_id(CONTROL_TOKENS[i]) for i in (0, 2))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "extra_special_tokens": list(CONTROL_TOKENS[1:]),
        },
    )
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": end_of_text,
            "eos_token_id": [end_of_turn, end_of_text],
            "pad_token_id": end_of_text,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.95,
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
