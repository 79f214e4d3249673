"""Measure a trained demo model on held-out text.

    python -m examples.demo_quality --directory out/demo --data .carry/demo

Loss against the unigram entropy, share of function headers completed to code that parses, and
agreement of the MTP head's first draft with the target. Weights are those on disk, in float32
arithmetic. The result goes to quality.json in the same folder.
"""

import argparse
import ast
import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from examples import demo_corpus
from examples.demo_data import Dataset, token_windows, unigram_entropy
from examples.demo_losses import Heldout, Params, heldout_sums
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.weights import load_params
from serve.engine import Engine

NUM_HEADERS = 100
MAX_HEADER_TOKENS = 64
MAX_NEW_TOKENS = 192


@dataclass(frozen=True)
class Quality:
    """What is measured.

    Attributes:
      heldout_loss: Nats per token, windows of `window` tokens.
      unigram_entropy: Nats per token, of the held-out tokens' own frequencies.
      loss_ratio: The first over the second.
      headers: Function headers completed greedily.
      parsed: Completions that `ast.parse` accepts.
      mtp_agreement: Share of positions whose first draft is the target's argmax.
      window: Tokens per window.
    """

    heldout_loss: float
    unigram_entropy: float
    loss_ratio: float
    headers: int
    parsed: int
    mtp_agreement: float
    window: int


def heldout(config: HybridConfig, params: Params, windows: np.ndarray, batch: int) -> Heldout:
    """Return held-out sums over every window."""
    sums_of = jax.jit(functools.partial(heldout_sums, config))
    sums = Heldout()
    for start in range(0, len(windows), batch):
        ids = windows[start : start + batch]
        loss, agreed = sums_of(params, jnp.asarray(ids))
        rows = ids.shape[1] - 1
        sums = sums.plus(float(loss), len(ids) * rows, int(agreed), len(ids) * (rows - 1))
    return sums


def greedy(directory: Path, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Return the greedy continuation of each prompt."""
    with Engine(
        directory,
        dtype="float32",
        skip_tokenizer_init=True,
        max_running_requests=16,
        context_length=512,
    ) as engine:
        params = {"temperature": 0, "max_new_tokens": max_new_tokens}
        results = engine.generate(input_ids=prompts, sampling_params=params)
    assert isinstance(results, list)
    return [result["output_ids"] for result in results]


def completed_function(tokenizer: Tokenizer, tokens: list[int], header: str) -> str:
    """Return header and body, cut where the function ends.

    That is the end of text, or the first line that is indented less than the body's first one. A
    last line that the token limit cut short is left out.
    """
    end = tokenizer.token_to_id(demo_corpus.END_OF_TEXT)
    is_ended = end in tokens
    text = tokenizer.decode(tokens[: tokens.index(end)] if is_ended else tokens)
    first, *lines = text[len(header) :].splitlines(keepends=True) or [""]
    kept, indent = [first], None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if line.strip():
            indent = depth if indent is None else indent
            if depth < max(indent, 1):
                return header + "".join(kept)
        kept.append(line)
    return header + "".join(kept if is_ended else kept[:-1])


def parses(code: str) -> bool:
    """Return whether `ast.parse` accepts the code."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


def complete_headers(directory: Path, dataset: Dataset, count: int) -> list[str]:
    """Return the first `count` held-out headers that are short enough, each with its body."""
    tokenizer = dataset.tokenizer
    headers = demo_corpus.function_headers(demo_corpus.parse_heldout(dataset.heldout_text))
    encoded = {header: tokenizer.encode(header.rstrip("\n")).ids for header in headers}
    chosen = [h for h in headers if len(encoded[h]) <= MAX_HEADER_TOKENS][:count]
    # The line break that ends a header is one token with the body's indentation: left to the model.
    outputs = greedy(directory, [encoded[header] for header in chosen], MAX_NEW_TOKENS)
    return [
        completed_function(tokenizer, encoded[header] + output, header.rstrip("\n"))
        for header, output in zip(chosen, outputs, strict=True)
    ]


def measure(directory: Path, dataset: Dataset, *, window: int, num_headers: int) -> dict[str, Any]:
    """Return the quality record of a checkpoint, with a few of its completions."""
    config = HybridConfig.from_directory(directory)
    params = load_params(directory, config, dtype="float32", progress=False)
    windows = token_windows(dataset.heldout, length=window)
    sums = heldout(config, params, windows, batch=23)
    completions = complete_headers(directory, dataset, num_headers)
    entropy = unigram_entropy(dataset.heldout)
    loss = sums.loss / sums.num_tokens
    quality = Quality(
        heldout_loss=loss,
        unigram_entropy=entropy,
        loss_ratio=loss / entropy,
        headers=len(completions),
        parsed=sum(parses(code) for code in completions),
        mtp_agreement=sums.agreed / sums.num_drafts,
        window=window,
    )
    return asdict(quality) | {"completions": completions[:8]}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="checkpoint to measure")
    parser.add_argument("--data", type=Path, default=Path(".carry/demo"), help="prepared corpus")
    parser.add_argument("--window", type=int, default=512, help="tokens per held-out window")
    parser.add_argument("--headers", type=int, default=NUM_HEADERS)
    arguments = parser.parse_args()
    dataset = Dataset.load(arguments.data)
    record = measure(
        arguments.directory, dataset, window=arguments.window, num_headers=arguments.headers
    )
    (arguments.directory / "quality.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "completions"}, indent=2))


if __name__ == "__main__":
    main()
