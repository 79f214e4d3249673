"""What the parity tests compare: checkpoints, token sequences, and the rules of comparison."""

import ast
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer

import qwen_hybrid
from tests.oracles.recipe import CONFIG_NAMES, Checkpoints, config_dict, sample_tokens
from tests.tolerances import BFloat16Parity, Float32Parity, num_pooled

DEMO_DIR = Path(qwen_hybrid.__file__).parent / "demos"
DEMO_NAMES = tuple(sorted(path.parent.name for path in DEMO_DIR.glob("*/config.json")))
# The configurations with an MTP head have the body of the one without; their heads have a test.
NAMES = tuple(name for name in CONFIG_NAMES if not name.endswith("_mtp")) + DEMO_NAMES

PROMPT_LEN = 70
NUM_TOKENS = PROMPT_LEN + 64
# The pieces of a prompt: across blocks, single rows, and lengths that no tile divides.
PROMPT_CHUNKS = [37, 1, 32]
CHUNKS = [37, 1, 64, 3, 29]


def checkpoint(name: str, dtype: str, checkpoints: Checkpoints) -> Path:
    """Return the directory of a demo model, or of a small configuration stored as `dtype`."""
    return DEMO_DIR / name if name in DEMO_NAMES else checkpoints.directory(name, dtype)


def sequences(name: str) -> Int[np.ndarray, "B T"]:
    """Return several sequences of ids: Python text for demo models, else random ids."""
    count = num_pooled(name)
    if name in DEMO_NAMES:
        tokenizer = Tokenizer.from_file(str(DEMO_DIR / name / "tokenizer.json"))
        ids = tokenizer.encode(Path(ast.__file__).read_text(encoding="utf-8")).ids
        return np.array(ids[: count * NUM_TOKENS]).reshape(count, NUM_TOKENS)
    config = config_dict(name)
    rng = np.random.default_rng(1)
    others = rng.integers(12, config["vocab_size"], (count - 1, NUM_TOKENS))
    return np.concatenate([sample_tokens(config, NUM_TOKENS)[None], others])


def check_logits(
    actual: Float[np.ndarray, "*T V"], expected: Float[np.ndarray, "*T V"], limits: Float32Parity
) -> None:
    """Fail if a logit is too far off, or a decided row has another argmax."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limits.max_difference)
    best = np.sort(expected, axis=-1)[..., -2:]
    decided = best[..., 1] - best[..., 0] > limits.decided_margin
    np.testing.assert_array_equal(
        actual.argmax(-1)[decided], expected.argmax(-1)[decided], "argmax of a decided row"
    )


@dataclass(frozen=True)
class RoundingError:
    """How far some bfloat16 logits are from float32 logits of the same weights.

    Attributes:
        rms: over all rows and logits.
        agreement: share of rows with the same argmax.
    """

    rms: float
    agreement: float

    @classmethod
    def of(cls, logits: Float[np.ndarray, "*T V"], exact: Float[np.ndarray, "*T V"]):
        """Measure `logits` against `exact`."""
        error = logits.astype(np.float64) - exact
        same = logits.argmax(-1) == exact.argmax(-1)
        return cls(float(np.sqrt((error**2).mean())), float(same.mean()))


def check_rounding(actual: RoundingError, reference: RoundingError, limits: BFloat16Parity) -> None:
    """Fail if `actual` is clearly worse than what transformers does."""
    assert actual.rms <= limits.rms_ratio * reference.rms, (actual, reference)
    assert actual.agreement >= reference.agreement - limits.agreement_loss, (actual, reference)
