"""Let a target go on with pieces of its training text, for its drafter to learn from.

    python -m examples.dspark_rollouts --target demo --count 64 --seed 1 --out .carry/rollouts/1.npz

Rows are text of the corpus, then what the target says next: greedy in half of them, at temperature
0.8 in the others. Processes with different seeds can share the work.
"""

import argparse
from pathlib import Path

import numpy as np

from examples.demo_data import Dataset, epoch_windows
from examples.dspark_models import target_directory
from serve.engine import Engine

SAMPLED_TEMPERATURE = 0.8
BATCH = 16


def continuations(
    directory: Path, prompts: np.ndarray, new_tokens: int, temperatures: list[float]
) -> np.ndarray:
    """Return each prompt followed by `new_tokens` of the target's tokens.

    Args:
      directory: The target's.
      prompts: Rows of equally many tokens.
      new_tokens: How many to add; texts go on after an end of text.
      temperatures: One a prompt.
    """
    with Engine(
        directory,
        skip_tokenizer_init=True,
        max_running_requests=BATCH,
        context_length=prompts.shape[1] + new_tokens,
    ) as engine:
        params = [
            {"temperature": t, "max_new_tokens": new_tokens, "ignore_eos": True, "sampling_seed": i}
            for i, t in enumerate(temperatures)
        ]
        results = engine.generate(input_ids=prompts.tolist(), sampling_params=params)
    assert isinstance(results, list)
    return np.concatenate([prompts, [result["output_ids"] for result in results]], axis=1)


def main() -> None:
    """Generate and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="demo, demo-dense, or a directory")
    parser.add_argument("--data", type=Path, default=Path(".carry/demo"), help="prepared corpus")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=64, help="rows")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the corpus in a row")
    parser.add_argument("--length", type=int, default=512, help="a row has one token more")
    parser.add_argument("--seed", type=int, default=0, help="which text, and which samples")
    arguments = parser.parse_args()
    windows = epoch_windows(
        Dataset.load(arguments.data), length=arguments.length, seed=arguments.seed
    )
    rng = np.random.default_rng(arguments.seed)
    prompts = rng.choice(windows, arguments.count, replace=False)[:, : arguments.prompt]
    temperatures = [0.0, SAMPLED_TEMPERATURE] * arguments.count
    rows = continuations(
        target_directory(arguments.target),
        prompts,
        arguments.length + 1 - arguments.prompt,
        temperatures[: arguments.count],
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, windows=rows.astype(np.int32))
    print(f"{arguments.out}: {rows.shape[0]} rows of {rows.shape[1]} tokens")


if __name__ == "__main__":
    main()
