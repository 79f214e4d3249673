"""Both forms of the model in bfloat16, beside what transformers loses in bfloat16."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.harness import PagedModel, reference_logits
from tests.oracles.recipe import Checkpoints
from tests.oracles.transformers_oracle import TransformersOracle
from tests.qwen_hybrid.parity_cases import (
    DEMO_NAMES,
    NAMES,
    PROMPT_LEN,
    RoundingError,
    check_rounding,
    checkpoint,
    sequences,
)
from tests.tolerances import BFLOAT16

# Between them these have every mechanism; the others compile for minutes and differ in sizes.
COVER = ("q35_dense", "q35_moe", "q4_odd", *DEMO_NAMES)
PAGED = [pytest.param(name, marks=() if name in COVER else pytest.mark.full) for name in NAMES]


@dataclass(frozen=True)
class Case:
    """A checkpoint stored in bfloat16, some sequences, and what transformers makes of them.

    Attributes:
        exact: transformers' logits in float32.
        theirs: the error of transformers' logits in bfloat16: the first sequence decoded from
            `PROMPT_LEN` on, the others prefilled whole.
    """

    directory: Path
    ids: np.ndarray
    exact: np.ndarray
    theirs: RoundingError


@cache
def expected(name: str, checkpoints: Checkpoints) -> Case:
    """Run transformers once for both tests of a checkpoint."""
    directory = checkpoint(name, "bfloat16", checkpoints)
    ids = sequences(name)
    oracle = TransformersOracle(directory, "float32")
    exact = np.stack([oracle.run(row).logits for row in ids])
    oracle = TransformersOracle(directory, "bfloat16")
    runs = [oracle.decode(ids[0], [PROMPT_LEN]), *map(oracle.run, ids[1:])]
    theirs = RoundingError.of(np.stack([run.logits for run in runs]), exact)
    return Case(directory, ids, exact, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_reference_rounds_no_worse(name: str, checkpoints: Checkpoints):
    case = expected(name, checkpoints)
    logits = reference_logits(case.directory, "bfloat16", case.ids)
    check_rounding(RoundingError.of(logits, case.exact), case.theirs, BFLOAT16)


@pytest.mark.parametrize("name", PAGED)
def test_paged_model_rounds_no_worse(name: str, checkpoints: Checkpoints):
    case = expected(name, checkpoints)
    model = PagedModel(case.directory, "bfloat16")
    prompt, rest = case.ids[0, :PROMPT_LEN], case.ids[0, PROMPT_LEN:]
    logits = [np.concatenate([model.prefill(prompt), model.decode(rest)])]
    logits += [model.prefill(row) for row in case.ids[1:]]
    check_rounding(RoundingError.of(np.stack(logits), case.exact), case.theirs, BFLOAT16)
