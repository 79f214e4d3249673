"""How many drafts are accepted on held-out prompts, and how many rejection sampling would accept.

    python -m benchmarks.acceptance [--models demo demo-dense] [--prompts 200]

Accept length is tokens by verify step, counted over outputs that do not repeat themselves (at least
half of their 4-grams differ). For the first draft, beside it, on the same logits at temperature 1:
the probability that the target's noise picks the draft that the same noise picked for the drafter
(what this engine does), and that rejection sampling accepts (the overlap of both distributions).
Writes benchmarks/results/acceptance.csv. Exit code 1 if an accept length is below what is wanted.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qwen_hybrid as qh
from benchmarks.record import RESULTS, provenance, write_csv
from serve import Engine
from serve.model_path import PACKAGED_MODELS, resolve_model_path
from serve.tokenizer import Tokenizer

HELD_OUT = Path(__file__).parent.parent / "tests" / "vectors" / "heldout.txt"
PROMPT_LEN, NUM_TOKENS = 64, 64
NUM_GRAMS, MIN_DISTINCT = 4, 0.5
SLOTS = 8
NUM_DRAWS = 32
# (arguments of the engine, accept length wanted at temperature 0)
ALGORITHMS: dict[str, tuple[dict[str, Any], float]] = {
    "NEXTN": ({"speculative_num_draft_tokens": 4}, 2.3),
    "DSPARK": ({"speculative_num_draft_tokens": 8}, 2.8),
    "NGRAM": ({"speculative_num_draft_tokens": 8}, 0.0),
}
TEMPERATURES = (0.0, 1.0)


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Stretches of the held-out text at even distances."""
    tokenizer = Tokenizer.from_directory(resolve_model_path(model))
    ids = tokenizer.encode(HELD_OUT.read_text(encoding="utf-8"))
    starts = np.linspace(0, len(ids) - PROMPT_LEN, count).astype(int)
    return [ids[start : start + PROMPT_LEN] for start in starts]


def distinct_share(ids: list[int]) -> float:
    """Share of a text's n-grams that differ."""
    grams = [tuple(ids[i : i + NUM_GRAMS]) for i in range(len(ids) - NUM_GRAMS + 1)]
    return len(set(grams)) / len(grams)


def measure(
    model: str, algorithm: str, prompts: list[list[int]], temperature: float
) -> tuple[dict[str, Any], list[list[int]]]:
    """A row of the record, and the texts."""
    arguments, wanted = ALGORITHMS[algorithm]
    if algorithm == "DSPARK":
        arguments = {**arguments, "speculative_draft_model_path": f"{model}-dspark"}
    params = [
        {
            "temperature": temperature,
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "sampling_seed": seed,
        }
        for seed in range(len(prompts))
    ]
    with Engine(
        model,
        max_running_requests=SLOTS,
        context_length=2 * (PROMPT_LEN + NUM_TOKENS),
        sampling_defaults="openai",
        speculative_algorithm=algorithm,
        **arguments,
    ) as engine:
        results: Any = engine.generate(input_ids=prompts, sampling_params=params)
    varied = [r for r in results if distinct_share(r["output_ids"]) >= MIN_DISTINCT]
    infos = [r["meta_info"] for r in varied]
    width = arguments["speculative_num_draft_tokens"]
    rounds = sum(info["spec_verify_ct"] for info in infos)
    accepted = [0] * (width - 1)
    for info in infos:
        for at, number in enumerate(info["spec_accepted_by_position"]):
            accepted[at] += number
    row = {
        "model": model,
        "algorithm": algorithm,
        "temperature": temperature,
        "width": width,
        "outputs": len(results),
        "outputs_counted": len(varied),
        "accept_length": round(1 + sum(accepted) / rounds, 3),
        "wanted": wanted if temperature == 0.0 and wanted else "",
        "accepted_by_position": " ".join(f"{number / rounds:.3f}" for number in accepted),
    }
    return row, [prompt + r["output_ids"] for prompt, r in zip(prompts, results, strict=True)]


def first_draft(model: str, texts: list[list[int]]) -> dict[str, float]:
    """Of the MTP head's first draft at every position of some texts, at temperature 1."""
    checkpoint = qh.load_checkpoint(resolve_model_path(model), dtype="float32", progress=False)
    hybrid = qh.HybridModel(checkpoint.config, "float32")
    has_streams = checkpoint.config.hyper_connection is not None

    @jax.jit
    def of(ids: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        bound = hybrid.bind({"params": checkpoint.params})
        out = bound.sequence(ids[None])
        hidden = out.residual if has_streams else out.hidden
        draft, _, _ = bound.mtp_sequence(ids[None, 1:], hidden[:, :-1])
        # Row i of the head and row i + 1 of the target both say token i + 2.
        target, draft = out.logits[0, 1:-1], draft[0, :-1]
        overlap = jnp.minimum(jax.nn.softmax(target), jax.nn.softmax(draft)).sum(-1)
        noise = jax.random.gumbel(key, (NUM_DRAWS, *target.shape))
        same = jnp.argmax(target + noise, -1) == jnp.argmax(draft + noise, -1)
        return overlap, same.mean(0)

    keys = jax.random.split(jax.random.key(0), len(texts))
    pairs = [of(jnp.asarray(ids), key) for ids, key in zip(texts, keys, strict=True)]
    rejection, coupled = (
        float(np.mean([np.mean(p[i][PROMPT_LEN:]) for p in pairs])) for i in (0, 1)
    )
    return {
        "first_draft_rejection_sampling": round(rejection, 3),
        "first_draft_same_noise": round(coupled, 3),
    }


def main() -> int:
    """Measure every drafter on every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=PACKAGED_MODELS, choices=PACKAGED_MODELS)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS / "acceptance.csv")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        prompts = prompts_of(model, arguments.prompts)
        for algorithm in arguments.algorithms:
            for temperature in TEMPERATURES:
                row, texts = measure(model, algorithm, prompts, temperature)
                shares = {"first_draft_rejection_sampling": "", "first_draft_same_noise": ""}
                if algorithm == "NEXTN" and temperature > 0:
                    shares = first_draft(model, texts)
                rows.append({**row, **shares})
                print(*(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    common = provenance()
    write_csv(arguments.output, [row | common for row in rows])
    short = [row for row in rows if row["wanted"] and row["accept_length"] < row["wanted"]]
    for row in short:
        print(f"below what is wanted: {row}", file=sys.stderr)
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
