"""The differentiable reference against transformers; both MTP heads against the float64 model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_hybrid.model import HybridModel
from qwen_hybrid.weights import load_checkpoint
from tests.harness import reference_logits
from tests.oracles.numpy_model import NumpyModel
from tests.oracles.recipe import Checkpoints
from tests.oracles.transformers_oracle import TransformersOracle
from tests.qwen_hybrid.parity_cases import NAMES, check_logits, checkpoint, sequences
from tests.tolerances import float32_parity


@pytest.mark.parametrize("name", NAMES)
def test_reference(name: str, checkpoints: Checkpoints):
    directory = checkpoint(name, "float32", checkpoints)
    ids, oracle = sequences(name)[:2], TransformersOracle(directory)
    expected = np.stack([oracle.run(row).logits for row in ids])
    check_logits(reference_logits(directory, "float32", ids), expected, float32_parity(name))


@pytest.mark.parametrize(
    "name", ["q35_dense_mtp", "q35_dense_ratio3_tied", "q35_moe_mtp", "q4_all", "q4_odd"]
)
def test_mtp_head(name: str, checkpoints: Checkpoints):
    directory = checkpoints.directory(name, mtp=True)
    loaded = load_checkpoint(directory, dtype="float32", progress=False)
    mtp = jax.jit(partial(HybridModel(loaded.config).apply, method="mtp_sequence"))
    ids, oracle = sequences(name)[0], NumpyModel(directory)
    next_ids, carried = ids[1:], oracle.run(ids).carried[:-1]
    # The head feeds itself in the second round: its own argmax and its own hidden row.
    drafts = oracle.mtp_drafts(next_ids, carried, count=2)
    for draft in drafts:
        logits, recurrent, _ = mtp(
            {"params": loaded.params}, jnp.asarray(next_ids)[None], jnp.float32(carried)[None]
        )
        limits = float32_parity(name)
        check_logits(np.asarray(logits[0]), draft.logits, limits)
        limit = limits.max_difference
        np.testing.assert_allclose(recurrent[0], draft.carried, rtol=0, atol=limit)
        next_ids = np.append(next_ids, draft.logits[-1].argmax())
        carried = np.concatenate([carried, draft.carried[-1:]])
