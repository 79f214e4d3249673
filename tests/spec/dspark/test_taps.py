"""Feature taps: the residual rows after chosen layers, against float64 and over schedules."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_hybrid.fixed_batch import SLOTS_OF_ONE, fixed_batch, start_state
from qwen_hybrid.model import HybridModel
from qwen_hybrid.state import Call, commit
from qwen_hybrid.step import COMPILER_OPTIONS
from qwen_hybrid.weights import load_checkpoint
from tests.oracles.numpy_model import NumpyModel
from tests.oracles.recipe import Checkpoints, config_dict, sample_tokens
from tests.tolerances import FLOAT32

# One residual stream; several, with an n-gram embedding in a layer that is tapped.
NAMES = ("q35_dense", "q4_ple")
NUM_TOKENS = 75
MAX_ROWS = 48
SCHEDULES = ([48, 27], [1, 1, 30, 17, 20, 6], [5] * 15)


class ResidualOracle(NumpyModel):
    """The float64 model cut off after some layers, giving its residual rows as they are."""

    def __init__(self, directory: Path, num_layers: int) -> None:
        super().__init__(directory)
        self.config["layer_types"] = self.config["layer_types"][:num_layers]

    def _outputs(self, x, w, recorder):
        count = self.config["hc_count"] if self._is_qwen4 else 1
        return x.reshape(len(x), count, -1).mean(axis=1)


class Tapped:
    """A model whose embedding and first and last layers are tapped."""

    def __init__(self, name: str, directory: Path) -> None:
        self.ids = sample_tokens(config_dict(name), NUM_TOKENS)
        loaded = load_checkpoint(directory, dtype="float32", progress=False)
        self.params, config = loaded.params, loaded.config
        layers = (-1, 0, config.num_layers - 1)
        self.model = HybridModel(config, "float32", tap_layers=layers)
        self.batch = fixed_batch(batch_size=2, max_tokens=NUM_TOKENS)
        self.start = start_state(config, self.batch)
        self.expected = np.concatenate(
            [ResidualOracle(directory, 1 + i).run(self.ids) for i in layers], axis=-1
        )
        self._call = jax.jit(self._paged, compiler_options=COMPILER_OPTIONS)

    def _paged(self, params, state, call: Call):
        bound = self.model.bind({"params": params})
        _, _, state, taps = bound(call, state, self.batch)
        return taps, commit(state, call.count)

    def run(self, sizes: list[int]) -> np.ndarray:
        """Taps of every token, fed to the second slot in pieces."""
        state, done, out = self.start, 0, []
        for size in sizes:
            free = jnp.asarray([-1, SLOTS_OF_ONE + 1 + len(out) % 2], jnp.int32)
            sequences = dataclasses.replace(state.sequences, next_slot=free)
            state = dataclasses.replace(state, sequences=sequences)
            packed = np.zeros(MAX_ROWS, np.int32)
            packed[:size] = self.ids[done : done + size]
            count = jnp.asarray([0, size], jnp.int32)
            call = Call(jnp.asarray(packed), count, count, jnp.zeros(2, bool))
            taps, state = self._call(self.params, state, call)
            out.append(np.asarray(taps[:size]))
            done += size
        assert done == NUM_TOKENS
        return np.concatenate(out)


@functools.cache
def _tapped(name: str, directory: Path) -> Tapped:
    return Tapped(name, directory)


@pytest.fixture(scope="module", params=NAMES)
def tapped(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Tapped:
    """Each model, its paged program compiled once."""
    return _tapped(request.param, checkpoints.directory(request.param))


def test_sequence_equals_float64(tapped: Tapped):
    run = jax.jit(
        functools.partial(tapped.model.apply, method="sequence"), compiler_options=COMPILER_OPTIONS
    )
    out = run({"params": tapped.params}, jnp.asarray(tapped.ids, jnp.int32)[None])
    np.testing.assert_allclose(
        out.taps[0], tapped.expected, rtol=FLOAT32.max_difference, atol=FLOAT32.max_difference
    )


def test_paged_equals_float64_and_pieces_change_no_bit(tapped: Tapped):
    whole = tapped.run(SCHEDULES[0])
    np.testing.assert_allclose(
        whole, tapped.expected, rtol=FLOAT32.max_difference, atol=FLOAT32.max_difference
    )
    for sizes in SCHEDULES[1:]:
        np.testing.assert_array_equal(tapped.run(sizes), whole)


@pytest.mark.parametrize("layers", [(1, 0), (0, 0), (-2,), (4,)])
def test_layers_that_are_not_there_are_refused(tapped: Tapped, layers: tuple[int, ...]):
    model = dataclasses.replace(tapped.model, tap_layers=layers)
    with pytest.raises(ValueError, match="tap_layers must ascend"):
        model.bind({"params": tapped.params}).embed(jnp.zeros(1, jnp.int32))
