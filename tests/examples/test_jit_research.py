"""The research example on small models: greedy tokens and log-probabilities are the engine's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qwen_hybrid as qh
from examples.jit_research import research, top_a
from pallas_kernels.sampling import likeliest
from tests import tiny_models
from tests.serve.engines import greedy, start
from tests.source_tree import ROOT

PROMPT_LEN, NUM_NEW = 60, 75


def greedy_rule(logits, key):
    """The rule that the engine has too."""
    del key
    return likeliest(logits)


@pytest.mark.parametrize("name", [pytest.param("q35_dense", marks=pytest.mark.full), "q4_ple"])
def test_greedy_tokens_and_scores_are_the_engines(name: str, tmp_path):
    """Over two block boundaries, two prompts side by side, zero tolerance."""
    directory = tiny_models.write_with_tokenizer(tmp_path, tiny_models.two_layers(name))
    config = qh.HybridConfig.from_directory(directory)
    prompts = np.random.default_rng(5).integers(0, config.vocab_size, (2, PROMPT_LEN))
    with start(directory) as engine:
        made = engine.generate(
            input_ids=prompts.tolist(), sampling_params=greedy(NUM_NEW), return_logprob=True
        )
        texts = [row.tolist() + one["output_ids"] for row, one in zip(prompts, made, strict=True)]
        scored = engine.score(texts)
    params = qh.prepare(qh.dummy_params(config, dtype="float32"))
    batch = qh.fixed_batch(batch_size=2, max_tokens=PROMPT_LEN + NUM_NEW)
    keys = jax.random.split(jax.random.key(0), NUM_NEW)
    tokens, logprobs, scores = research(
        qh.HybridModel(config, "float32"), batch, greedy_rule, params, jnp.asarray(prompts), keys
    )
    for row in range(2):
        info = made[row]["meta_info"]["output_token_logprobs"]
        assert tokens[row].tolist() == made[row]["output_ids"]
        assert logprobs[row].tolist() == [entry[0] for entry in info]
        input_info = scored[row]["meta_info"]["input_token_logprobs"]
        assert scores[row].tolist() == [entry[0] for entry in input_info[1:]]


def test_its_own_rule():
    """Kept is what has at least half the square of the best probability: 0.18 of 0.6."""
    logits = jnp.log(jnp.asarray([[0.6, 0.19, 0.17, 0.04]]))
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = jax.jit(jax.vmap(lambda key: top_a(logits, key)[0]))(keys)
    assert set(drawn.tolist()) == {0, 1}


def test_the_example_is_short():
    lines = (ROOT / "examples" / "jit_research.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 50
