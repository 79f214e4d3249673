"""The demo models' losses: values by hand, and which parameters each one reaches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import demo_losses
from examples.demo_models import TINY
from examples.train_demo import initial_params
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.model import HybridModel
from qwen_hybrid.params import leaves
from qwen_hybrid.qsa import QsaTrace

CONFIG = HybridConfig.from_hf(
    TINY
    | {
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "ple_layer_ids": [],
        "indexer_budget": 8,
        "eos_token_id": 1,
    }
)


def test_token_loss_of_equal_logits_is_the_log_of_the_vocabulary():
    loss = demo_losses.token_loss(jnp.zeros((2, 3, 16)), jnp.zeros((2, 3), jnp.int32))
    assert float(loss) == pytest.approx(np.log(16))


def test_balance_loss_is_one_when_balanced_and_e_when_one_expert_takes_all():
    balanced = 50.0 * jnp.eye(4)[None, :, :]
    assert float(demo_losses.balance_loss(balanced, 1)) == pytest.approx(1.0)
    collapsed = jnp.tile(jnp.array([50.0, 0.0, 0.0, 0.0]), (1, 8, 1))
    assert float(demo_losses.balance_loss(collapsed, 1)) == pytest.approx(4.0)


def test_indexer_loss_is_the_divergence_over_complete_groups():
    mass = np.array([[0.5, 0.5], [0.3, 0.1], [0.6, 0.2]])
    scores = np.array([[9.0, 9.0], [1.0, 7.0], [1.0, 0.5]])
    complete = np.array([[False, False], [True, False], [True, True]])
    trace = QsaTrace(
        jnp.asarray(scores, jnp.float32), jnp.asarray(mass, jnp.float32), jnp.asarray(complete)
    )
    target, predicted = np.array([0.75, 0.25]), np.exp([1.0, 0.5]) / np.exp([1.0, 0.5]).sum()
    # The second query has one group and nothing to learn; the first does not count.
    expected = np.sum(target * np.log(target / predicted)) / 2
    assert float(demo_losses.indexer_loss(trace)) == pytest.approx(expected, rel=1e-5)


def test_agreement_loss_of_a_certain_target():
    target = 100.0 * jax.nn.one_hot(jnp.array([[2]]), 4)
    assert float(demo_losses.agreement_loss(jnp.zeros((1, 1, 4)), target)) == pytest.approx(
        np.log(4), rel=1e-5
    )


@functools.cache
def _gradients(term: str) -> dict[str, float]:
    """Return the largest gradient of one loss term at each parameter."""
    params = initial_params(CONFIG, 0)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 41)), jnp.int32)

    def loss(params):
        return demo_losses.total_loss(CONFIG, demo_losses.SECOND_PHASE, params, ids)[1][term]

    gradients = jax.jit(jax.grad(loss))(params)
    return {"/".join(path): float(jnp.max(jnp.abs(g))) for path, g in leaves(gradients)}


def test_mtp_loss_reaches_its_head_alone():
    reached = {name for name, size in _gradients("mtp").items() if size > 0.0}
    assert reached
    assert all(name.startswith("mtp/") for name in reached)
    assert not any("indexer" in name for name in reached)


def test_indexer_loss_reaches_indexers_alone():
    gradients = _gradients("indexer")
    assert {name for name, size in gradients.items() if size > 0.0} == {
        name for name in gradients if "indexer" in name
    }


def test_heldout_sums_match_the_model():
    params = initial_params(CONFIG, 1)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 21)), jnp.int32)
    loss, agreed = jax.jit(functools.partial(demo_losses.heldout_sums, CONFIG))(params, ids)
    sequence = functools.partial(HybridModel(CONFIG).apply, method="sequence")
    out = jax.jit(sequence)({"params": params}, ids[:, :-1])
    log_p = np.asarray(jax.nn.log_softmax(out.logits), np.float64)  # pyright: ignore
    picked = np.take_along_axis(log_p, np.asarray(ids)[:, 1:, None], axis=-1)
    assert float(loss) == pytest.approx(-picked.sum(), rel=1e-5)
    assert 0 <= int(agreed) <= 2 * 19
