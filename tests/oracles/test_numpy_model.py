"""The float64 model against transformers: logits, selections, both MTP heads, hash vectors."""

import numpy as np
import pytest
import torch

from tests.oracles import numpy_qwen4
from tests.oracles.numpy_layers import rms_norm, scoped
from tests.oracles.numpy_model import NumpyModel
from tests.oracles.recipe import CONFIG_NAMES, Checkpoints, config_dict, sample_tokens
from tests.oracles.transformers_oracle import TransformersOracle, composed_qwen4_layer
from tests.tolerances import float32_parity

# The real model's table: vocabulary 248320, one PLE layer.
REAL_HASH = {
    "vocab_size": 248320,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "seed": 1234,
    "eos_token_id": 248044,
}
REAL_MULTIPLIERS = [23703573157769, 20109073645365, 8052911324071]
REAL_LAST_OFFSET = 300001275
# (previous ids) -> id: the rows of the first and last two heads, from the official function.
REAL_ROWS = [
    ([0], (768795, 32189829, 296240796, 304432235)),
    ([5, 6, 7], (9319853, 32980418, 296253588, 313224935)),
    ([5, 248044, 6], (5664792, 36347845, 290934383, 308751519)),
    ([248319, 248319, 248319], (3035822, 30922970, 282070880, 303365432)),
]


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_logits_and_selections_equal_transformers(name: str, checkpoints: Checkpoints):
    directory = checkpoints.directory(name)
    ids = sample_tokens(config_dict(name), 134 if name == "q4_all" else 70)
    expected = TransformersOracle(directory).run(ids)
    actual = NumpyModel(directory).run(ids)
    limit = float32_parity(name).max_difference
    np.testing.assert_allclose(actual.logits, expected.logits, rtol=0, atol=limit)
    np.testing.assert_array_equal(actual.logits.argmax(-1), expected.logits.argmax(-1))
    assert actual.selections.keys() == expected.selections.keys()
    for layer, selected in expected.selections.items():
        np.testing.assert_array_equal(actual.selections[layer], selected)


@pytest.mark.parametrize("name", ["q35_dense_mtp", "q35_dense_ratio3_tied", "q35_moe_mtp"])
def test_mtp_head_equals_transformers(name: str, checkpoints: Checkpoints):
    directory = checkpoints.directory(name, mtp=True)
    ids = sample_tokens(config_dict(name), 70)
    model, oracle = NumpyModel(directory), TransformersOracle(directory)
    target = oracle.run(ids)
    logits, hidden = oracle.mtp(ids[1:], target.hidden[:-1])
    actual = model.mtp(ids[1:], target.hidden[:-1])
    limit = float32_parity(name).max_difference
    np.testing.assert_allclose(actual.logits, logits, rtol=0, atol=limit)
    np.testing.assert_allclose(actual.carried, hidden, rtol=0, atol=limit)
    # A second draft, fed by the first.
    first, second = model.mtp_drafts(ids[1:], target.hidden[:-1], count=2)
    next_ids = np.append(ids[1:], first.logits[-1].argmax())
    rows = np.concatenate([target.hidden[:-1], hidden[-1:]])
    logits, _ = oracle.mtp(next_ids, rows)
    np.testing.assert_allclose(second.logits, logits, rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["q4_all", "q4_odd", "q4_qsa"])
def test_mtp_head_of_qwen4_equals_its_parts(name: str, checkpoints: Checkpoints):
    directory = checkpoints.directory(name, mtp=True)
    ids = sample_tokens(config_dict(name), 70)
    model, oracle = NumpyModel(directory), TransformersOracle(directory)
    streams = oracle.run(ids).streams
    assert streams is not None
    w, eps = scoped(model.weights, "mtp."), model.config["rms_norm_eps"]
    embedding = model.weights["embed_tokens.weight"]
    embedded = rms_norm(embedding[ids[1:]], w["pre_fc_norm_embedding.weight"], eps)
    rows = rms_norm(streams[:-1], w["pre_fc_norm_hidden.weight"], eps)
    parts = np.split(rows, model.config["hc_count"], axis=-1)
    fed = [embedded @ w["fc_embedding.weight"].T + p @ w["fc_hidden.weight"].T for p in parts]
    body = {k: v for k, v in w.items() if k.startswith(("layers.0.", "hyper_connection_mixer."))}
    tensors = {k: torch.tensor(v).float() for k, v in body.items()}
    tensors["embed_tokens.weight"] = torch.tensor(embedding).float()
    hidden, carried = composed_qwen4_layer(
        oracle.model.config, tensors, np.concatenate(fed, axis=-1)
    )
    actual = model.mtp(ids[1:], streams[:-1], first_position=0)
    np.testing.assert_allclose(actual.hidden, hidden, rtol=0, atol=2e-5)
    np.testing.assert_allclose(actual.carried, carried, rtol=0, atol=2e-5)
    # transformers counts a draft row by the position of its token; only differences matter.
    shifted = model.mtp(ids[1:], streams[:-1], first_position=1)
    np.testing.assert_allclose(shifted.logits, actual.logits, rtol=0, atol=2e-5)


def test_hash_gives_the_rows_of_the_real_model():
    multipliers, _, offsets = numpy_qwen4.hash_constants(REAL_HASH, 0)
    assert multipliers == REAL_MULTIPLIERS
    assert offsets[-1] == REAL_LAST_OFFSET
    for ids, rows in REAL_ROWS:
        last = numpy_qwen4.ngram_rows(np.array(ids), REAL_HASH, 0)[-1]
        assert tuple(last[[0, 1, -2, -1]]) == rows


@pytest.mark.parametrize("name", ["q4_all", "q4_odd"])
def test_hash_constants_equal_the_buffers_of_the_checkpoint(name: str, checkpoints: Checkpoints):
    model = NumpyModel(checkpoints.directory(name))
    for rank, layer in enumerate(model.config["ple_layer_ids"]):
        buffers = scoped(model.weights, f"layers.{layer - 1}.ple.ple_embedding.")
        multipliers, primes, offsets = numpy_qwen4.hash_constants(model.config, rank)
        np.testing.assert_array_equal(buffers["layer_multipliers"], multipliers)
        np.testing.assert_array_equal(buffers["ngram_heads_vocab_sizes"], primes)
        np.testing.assert_array_equal(buffers["ngram_heads_offsets"], offsets)
