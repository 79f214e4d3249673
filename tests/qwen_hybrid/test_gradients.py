"""Gradients of the reference form against torch's autograd through transformers."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jaxtyping import Array

from qwen_hybrid.model import HybridModel
from qwen_hybrid.params import ParamTree, leaves
from qwen_hybrid.weights import load_checkpoint
from tests.oracles.recipe import build_model, sample_tokens, save_checkpoint
from tests.tiny_models import two_layers

NUM_TOKENS = 70
# Float32 on both sides, through every layer and back: at most 2.2e-4 was seen.
RELATIVE = 1e-3
# What only chooses tokens gets no gradient, there as here.
CHOOSING = ("index_qk_proj", "q_layernorm", "k_layernorm")


def torch_name(path: tuple[str, ...]) -> str:
    """Name of a parameter in transformers, without its suffix."""
    name = ".".join(path).replace("layers_", "layers.")
    name = name.replace("ngram_embedding", "ple_embedding.ngram_embedding")
    return name if name == "lm_head" else f"model.{name}"


def torch_gradients(
    model: transformers.PreTrainedModel, ids: np.ndarray
) -> tuple[float, dict[str, np.ndarray | None]]:
    """Loss of next-token prediction, and its gradient by parameter name; None where it has none."""
    tokens = torch.tensor(ids)[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits.float(), tokens[0, 1:])
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name.removesuffix(".weight")] = None if gradient is None else gradient.numpy()
    return loss.item(), found


def our_gradients(directory: Path, ids: np.ndarray) -> tuple[float, ParamTree]:
    """The same through `HybridModel.sequence`."""
    checkpoint = load_checkpoint(directory, dtype="float32", progress=False)
    model = HybridModel(checkpoint.config, "float32")
    run = functools.partial(model.apply, method="sequence")

    def loss(params: ParamTree) -> Array:
        out: Any = run({"params": params}, jnp.asarray(ids, jnp.int32)[None])
        log_probabilities = jax.nn.log_softmax(out.logits[0, :-1])
        return -jnp.mean(jnp.take_along_axis(log_probabilities, ids[1:, None], axis=1))

    value, gradients = jax.jit(jax.value_and_grad(loss))(checkpoint.params)
    return float(value), gradients


@pytest.mark.parametrize("name", ["q35_dense", "q4_all"])
def test_gradients_of_every_parameter(name: str, tmp_path: Path):
    """Attention and delta rule, experts and router, hyper-connections, n-gram tables, head."""
    config = two_layers(name)
    ids = sample_tokens(config, NUM_TOKENS)
    expected_loss, expected = torch_gradients(build_model(config), ids)
    loss, gradients = our_gradients(save_checkpoint(config, tmp_path, dtype=torch.float32), ids)
    assert any("indexer" in path for path, _ in leaves(gradients)) == (name == "q4_all")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    ours = {torch_name(path): np.asarray(value) for path, value in leaves(gradients)}
    assert ours.keys() == expected.keys()
    for key, value in ours.items():
        wanted = expected[key]
        if key.endswith(CHOOSING):
            assert wanted is None and not np.any(value), key
            continue
        assert wanted is not None, key
        error = np.linalg.norm(value - wanted.reshape(value.shape))
        norm = np.linalg.norm(wanted)
        assert norm > 0 and error < RELATIVE * norm, (key, error / norm)
