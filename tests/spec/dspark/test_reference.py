"""The drafter over whole sequences against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_hybrid.dspark_config import DSparkConfig
from spec.dspark import block_heads, block_rows
from spec.dspark.layers import rotary_frequencies
from tests.oracles.dspark import official_rotary
from tests.spec.dspark.cases import Case
from tests.tolerances import FLOAT32
from tests.vector_configs import hf_config

NUM_TOKENS = 90
# The first token, one block in, past the sliding window, the last one.
ANCHORS = (0, 1, 16, 40, 89)


def test_rotation_with_yarn_is_the_official_one():
    hf = hf_config("RadixArk-Qwen3.8-27B-DSpark")
    config = DSparkConfig.from_hf(hf)
    frequencies, factor = official_rotary(hf)
    # Theirs are float32.
    np.testing.assert_allclose(rotary_frequencies(config), frequencies, rtol=1e-6)
    assert config.yarn is not None
    assert config.yarn.attention_factor == pytest.approx(factor)


def _run(case: Case, taps, ids, anchors, forced):
    embed, head = case.embed("float32"), case.head()
    first = ids[anchors]
    hidden = block_rows(case.config, case.params, taps, first, anchors, embed)

    def likeliest(logits, j):
        del j
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def given(logits, j):
        del logits
        return forced[:, j]

    run = functools.partial(block_heads, case.config, case.params, hidden, first, head=head)
    return run(follow=given), run(follow=likeliest)


def test_blocks_equal_float64(case: Case, rng: np.random.Generator):
    taps = case.draw_taps(rng, NUM_TOKENS)
    ids = rng.integers(0, case.config.vocab_size, NUM_TOKENS)
    forced = rng.integers(0, case.config.vocab_size, (len(ANCHORS), case.config.block_size))
    arrays = (jnp.asarray(a, jnp.int32) for a in (ids, ANCHORS, forced))
    outputs = jax.jit(functools.partial(_run, case))(jnp.asarray(taps), *arrays)
    limits = {"rtol": 0, "atol": FLOAT32.max_difference}
    for index, anchor in enumerate(ANCHORS):
        for out, follow in zip(outputs, (forced[index], None), strict=True):
            expected = case.oracle.block(taps[:anchor], int(ids[anchor]), follow)
            np.testing.assert_array_equal(out.token[index], expected.tokens)
            np.testing.assert_allclose(out.logits[index], expected.logits, **limits)
            np.testing.assert_allclose(out.confidence[index], expected.confidence, **limits)
