"""The paged model in float32 against transformers: prefill, prefill in chunks, cached decode."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.harness import PagedModel, config_of
from tests.oracles.recipe import Checkpoints
from tests.oracles.transformers_oracle import Run, TransformersOracle
from tests.qwen_hybrid.parity_cases import (
    CHUNKS,
    DEMO_NAMES,
    NAMES,
    NUM_TOKENS,
    PROMPT_CHUNKS,
    PROMPT_LEN,
    check_logits,
    checkpoint,
    sequences,
)
from tests.qwen_hybrid.recorded_selections import SelectionRecorder
from tests.tolerances import float32_parity


@dataclass(frozen=True)
class Case:
    """A model in float32, ours and theirs, and one sequence."""

    name: str
    ids: np.ndarray
    model: PagedModel
    recorder: SelectionRecorder
    oracle: TransformersOracle
    whole: Run

    def check(self, logits: np.ndarray, expected: Run) -> None:
        """Compare logits and selections of all rows."""
        check_logits(logits, expected.logits, float32_parity(self.name))
        selections = self.recorder.take(len(self.ids))
        assert selections.keys() == expected.selections.keys()
        for layer, selected in expected.selections.items():
            np.testing.assert_array_equal(selections[layer], selected, f"layer {layer}")


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Case]:
    """Build both models of one checkpoint; compiled once for all tests of the module."""
    directory = checkpoint(request.param, "float32", checkpoints)
    recorder = SelectionRecorder(config_of(directory))
    oracle = TransformersOracle(directory)
    ids = sequences(request.param)[0]
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder.install(monkeypatch)
        model = PagedModel(directory, "float32")
        yield Case(request.param, ids, model, recorder, oracle, oracle.run(ids))


def test_prefill(case: Case):
    case.check(case.model.prefill(case.ids), case.whole)


def test_chunked_prefill(case: Case):
    # Fed in chunks, transformers strays further from float64 than in one piece (7e-4 with tied
    # embeddings), and a chunked prefill is to give what a whole one gives.
    case.check(case.model.prefill(case.ids, CHUNKS), case.whole)


def test_cached_decode(case: Case):
    prompt, rest = case.ids[:PROMPT_LEN], case.ids[PROMPT_LEN:]
    logits = np.concatenate([case.model.prefill(prompt, PROMPT_CHUNKS), case.model.decode(rest)])
    case.check(logits, case.oracle.decode(case.ids, PROMPT_CHUNKS))


def test_sequences_cover_what_is_compared():
    assert sum(CHUNKS) == NUM_TOKENS
    assert sum(PROMPT_CHUNKS) == PROMPT_LEN
    assert set(DEMO_NAMES) <= {"demo", "demo-dense"}
