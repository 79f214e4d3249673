"""Measure how many tokens a drafter's rounds would commit, at temperature 0.

    python -m examples.dspark_quality --draft out/demo-dspark --target demo

The target goes on greedily with held-out prompts. At every place of what it said, the drafter then
drafts a block, and rounds are walked through: a round commits the leading drafts that the target
said, and one token more. That is what a lossless loop does, without running one. The result goes
to quality.json and, as a section, to the drafter's README.md.
"""

import argparse
import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tokenizers import Tokenizer

from examples.dspark_models import target_directory
from examples.dspark_rollouts import continuations
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dspark_config import DSparkConfig
from qwen_hybrid.model import HybridModel, SequenceOutput
from qwen_hybrid.params import ParamTree
from qwen_hybrid.weights import load_params
from spec.dspark import block_heads, block_rows, load_draft, read_draft_config

HELDOUT = Path(__file__).parents[1] / "tests" / "vectors" / "heldout.txt"
BATCH = 8
SECTION = "\n## Accept length\n"
# Outputs that go round in circles are easy to draft and prove little.
MIN_DISTINCT = 0.5
NGRAM = 4


@dataclass(frozen=True)
class Quality:
    """What is measured.

    Attributes:
      prompts: Held-out prompts.
      new_tokens: Greedy tokens after each.
      accept_length: Tokens committed a round.
      counted: Outputs with enough distinct 4-grams.
      counted_accept_length: The same over those.
      accepted_by_draft: For each draft, the share of rounds of all outputs that took it.
    """

    prompts: int
    new_tokens: int
    accept_length: float
    counted: int
    counted_accept_length: float
    accepted_by_draft: list[float]


def distinct_share(tokens: np.ndarray) -> float:
    """Return the share of 4-grams that are the first of their kind."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return len(set(grams)) / len(grams)


def walk(drafts: np.ndarray, said: np.ndarray) -> list[int]:
    """Return how many drafts each round takes.

    Args:
      drafts: Row i follows token i of what was said.
      said: What the target said; a first token is there before the first round.
    """
    rounds, at = [], 0
    while at < len(said) - 1:
        following = said[at + 1 : at + 1 + drafts.shape[1]]
        agrees = drafts[at, : len(following)] == following
        # The last token is the target's own.
        taken = min(int(np.cumprod(agrees).sum()), len(said) - 2 - at)
        rounds.append(taken)
        at += taken + 1
    return rounds


def greedy_drafts(
    draft: DSparkConfig,
    target: HybridConfig,
    params: ParamTree,
    target_params: ParamTree,
    ids: Int[Array, "B T"],
    first: int,
) -> Int[Array, "B A R"]:
    """Draft after every token of some texts from `first` on."""
    model = HybridModel(target, tap_layers=draft.target_layer_ids)
    bound = model.bind({"params": target_params})
    read = bound.sequence(ids)
    assert isinstance(read, SequenceOutput) and read.taps is not None
    anchors = jnp.arange(first, ids.shape[1], dtype=jnp.int32)

    def likeliest(logits: Array, draft_number: int) -> Array:
        del draft_number
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def of_text(taps: Array, ids: Array) -> Array:
        tokens = ids[anchors]
        hidden = block_rows(draft, params, taps, tokens, anchors, bound.embed)
        return block_heads(draft, params, hidden, tokens, head=bound.head, follow=likeliest).token

    return jax.vmap(of_text)(read.taps, ids)


def held_out_prompts(directory: Path, count: int, length: int) -> np.ndarray:
    """Return rows of the held-out text, spread evenly."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = np.asarray(tokenizer.encode(HELDOUT.read_text()).ids)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return np.stack([tokens[start : start + length] for start in starts])


def measure(draft_directory: Path, target_name: str, prompts: np.ndarray, new: int) -> Quality:
    """Return the quality of a drafter after some prompts."""
    directory = target_directory(target_name)
    target, draft = HybridConfig.from_directory(directory), read_draft_config(draft_directory)
    draft.check_target(target)
    params = load_draft(draft_directory, draft, dtype="float32", progress=False)
    target_params = load_params(directory, target, dtype="float32", progress=False)
    rows = continuations(directory, prompts, new, [0.0] * len(prompts))
    width = prompts.shape[1]
    drafts_of = jax.jit(functools.partial(greedy_drafts, draft, target, first=width))
    rounds, counted = [], []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        drafts = np.asarray(drafts_of(params, target_params, jnp.asarray(part, jnp.int32)))
        for row, own in zip(part, drafts, strict=True):
            rounds.append(walk(own, row[width:]))
            counted.append(distinct_share(row[width:]) >= MIN_DISTINCT)
    good = [taken for taken, is_good in zip(rounds, counted, strict=True) if is_good]
    taken = np.concatenate(rounds)
    return Quality(
        prompts=len(prompts),
        new_tokens=new,
        accept_length=accept_length(rounds),
        counted=len(good),
        counted_accept_length=accept_length(good) if good else float("nan"),
        accepted_by_draft=[float((taken > j).mean()) for j in range(draft.block_size)],
    )


def accept_length(rounds: list[list[int]]) -> float:
    """Return the mean number of tokens that a round commits."""
    taken = np.concatenate(rounds)
    return float(taken.mean() + 1.0)


def section(quality: Quality) -> str:
    """Return what the model card says of it."""
    by_draft = ", ".join(f"{share:.2f}" for share in quality.accepted_by_draft)
    return (
        f"{SECTION}\n{quality.prompts} held-out prompts, {quality.new_tokens} greedy tokens after "
        f"each: {quality.accept_length:.2f} tokens a round, "
        f"{quality.counted_accept_length:.2f} in the {quality.counted} outputs of which at least "
        f"half the 4-grams are distinct. Drafts taken, by place in the block: {by_draft}\n"
        "(`python -m examples.dspark_quality`).\n"
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draft", type=Path, required=True, help="the drafter's directory")
    parser.add_argument("--target", required=True, help="demo, demo-dense, or a directory")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    directory = target_directory(arguments.target)
    prompts = held_out_prompts(directory, arguments.prompts, arguments.prompt_length)
    quality = measure(arguments.draft, arguments.target, prompts, arguments.new_tokens)
    text = json.dumps(asdict(quality), indent=2)
    (arguments.draft / "quality.json").write_text(text + "\n")
    card = arguments.draft / "README.md"
    card.write_text(card.read_text().split(SECTION)[0] + section(quality))
    print(text)


if __name__ == "__main__":
    main()
