"""Both forms of the model in bfloat16, beside what transformers loses in bfloat16."""

import numpy as np
import pytest

from tests.harness import PagedModel, reference_logits
from tests.oracles.recipe import Checkpoints
from tests.oracles.transformers_oracle import TransformersOracle
from tests.qwen_hybrid.parity_cases import (
    NAMES,
    PROMPT_LEN,
    RoundingError,
    check_rounding,
    checkpoint,
    sequences,
)
from tests.tolerances import BFLOAT16


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_rounds_no_worse(name: str, checkpoints: Checkpoints):
    directory = checkpoint(name, "bfloat16", checkpoints)
    ids = sequences(name)
    exact_oracle = TransformersOracle(directory, "float32")
    oracle, model = TransformersOracle(directory, "bfloat16"), PagedModel(directory, "bfloat16")
    exact = np.stack([exact_oracle.run(row).logits for row in ids])
    # The first sequence is decoded, the others are prefilled whole.
    first, others = ids[0], ids[1:]
    theirs = [oracle.decode(first, [PROMPT_LEN]), *map(oracle.run, others)]
    ours = [np.concatenate([model.prefill(first[:PROMPT_LEN]), model.decode(first[PROMPT_LEN:])])]
    ours += [model.prefill(row) for row in others]
    limit = RoundingError.of(np.stack([run.logits for run in theirs]), exact)
    check_rounding(RoundingError.of(np.stack(ours), exact), limit, BFLOAT16)
    whole = reference_logits(directory, "bfloat16", ids)
    check_rounding(RoundingError.of(whole, exact), limit, BFLOAT16)
