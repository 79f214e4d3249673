"""The recipe gives the recorded sums and logits; transformers agrees with itself in pieces."""

import numpy as np
import pytest
import torch

from tests.oracles.recipe import CONFIG_NAMES, Checkpoints, build_model, config_dict, sample_tokens
from tests.oracles.transformers_oracle import TransformersOracle
from tests.tolerances import float32_parity

PROBED_ROWS = (0, 32, 63, 64, 100, 149)

# Recorded with torch 2.13.0 and transformers 5.24.0: parameters, sum of absolute weights, first
# four logits of row 149, argmax of the probed rows.
RECORDED = {
    "q35_dense": (
        200392,
        36299.970,
        (-3.1393, 0.1384, -1.5456, 1.5372),
        (174, 218, 67, 222, 153, 69),
    ),
    "q35_dense_ratio3_tied": (
        871096,
        89697.409,
        (-9.7337, -3.3325, -4.0513, 0.4539),
        (39, 298, 181, 7, 108, 274),
    ),
    "q35_moe": (
        362440,
        56011.361,
        (-0.4739, -0.7853, -2.1651, -1.0947),
        (135, 155, 114, 265, 212, 69),
    ),
    "q4_full_budget": (
        443048,
        66104.080,
        (-0.9662, -0.7622, -2.0395, 1.2649),
        (135, 282, 150, 154, 79, 122),
    ),
    "q4_qsa": (
        836688,
        110629.169,
        (-0.5786, -0.0237, -1.4179, 1.3585),
        (214, 130, 63, 18, 79, 14),
    ),
    "q4_ple": (
        472104,
        74118.835,
        (0.7474, -0.8590, -1.0029, 0.1987),
        (150, 43, 40, 154, 10, 212),
    ),
    "q4_all": (
        1363560,
        185807.749,
        (-1.5382, 0.1608, -1.0666, 0.2865),
        (137, 119, 194, 184, 79, 318),
    ),
    "q4_odd": (
        439064,
        73593.758,
        (-0.3225, 0.3743, -1.4173, 0.7353),
        (198, 142, 150, 47, 93, 14),
    ),
    "q4_mtp_layer": (
        166304,
        34223.933,
        (-1.2234, 0.6125, -0.9882, 0.7170),
        (124, 186, 150, 184, 79, 166),
    ),
}
FIRST_TOKENS = (39, 187, 63, 7, 199, 202, 16, 185, 257, 212, 137, 33, 152, 221, 100, 83)


@pytest.mark.parametrize("name", RECORDED)
def test_recipe_gives_recorded_model(name: str):
    num_parameters, sum_of_weights, last_logits, argmaxes = RECORDED[name]
    config = config_dict(name)
    model = build_model(config)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == num_parameters
    total = sum(p.abs().double().sum().item() for p in parameters)
    assert total == pytest.approx(sum_of_weights, abs=1e-3)
    ids = sample_tokens(config)
    assert tuple(ids[:16]) == FIRST_TOKENS
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None]).logits[0].numpy()
    # Four decimals were recorded, and sums may be ordered differently on another machine.
    limit = 5e-5 + float32_parity(name).max_difference
    np.testing.assert_allclose(logits[149, :4], last_logits, rtol=0, atol=limit)
    assert tuple(logits[list(PROBED_ROWS)].argmax(-1)) == argmaxes


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_saved_checkpoint_gives_the_same_logits_in_pieces(name: str, checkpoints: Checkpoints):
    ids = sample_tokens(config_dict(name), 70)
    with torch.no_grad():
        built = build_model(config_dict(name))(torch.tensor(ids)[None]).logits[0].numpy()
    oracle = TransformersOracle(checkpoints.directory(name))
    whole, decoded = oracle.run(ids), oracle.decode(ids, [37, 1, 17])
    # torch picks kernels by how tensors lie in memory: on some machines, runs differ by 3e-6.
    limit = float32_parity(name).max_difference
    np.testing.assert_allclose(whole.logits, built, rtol=0, atol=limit)
    np.testing.assert_allclose(decoded.logits, whole.logits, rtol=0, atol=limit)
    assert whole.selections.keys() == decoded.selections.keys()
    for layer, selected in whole.selections.items():
        np.testing.assert_array_equal(decoded.selections[layer], selected)
