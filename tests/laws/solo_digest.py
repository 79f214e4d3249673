"""What requests of a model give alone, for another process to compare (law L5).

    python -m tests.laws.solo_digest MODEL DTYPE FOLDER

Prints a JSON list: a digest of each outcome.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from qwen_hybrid.config import HybridConfig
from tests.laws.law_run import setting_of
from tests.laws.schedules import Outcome, golden_outcomes, make_cases

NUM_CASES = 8


def digests(outcomes: list[Outcome]) -> list[str]:
    """A digest of the tokens, log-probabilities and state of each outcome."""
    return [hashlib.sha256(repr(outcome).encode()).hexdigest() for outcome in outcomes]


if __name__ == "__main__":
    model = setting_of(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    size = HybridConfig.from_directory(model.directory).vocab_size
    some = make_cases(np.random.default_rng(11), size, NUM_CASES)
    json.dump(digests(golden_outcomes(model, some)), sys.stdout)
