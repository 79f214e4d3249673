"""One tiny model and one pair of programs for all tests of drift."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels.gated_delta_net import StateDtype
from qwen_hybrid.config import HybridConfig
from qwen_hybrid.dummy import dummy_params
from qwen_hybrid.prepare import prepare
from spec.drift import Fault, Program
from tests import tiny_models
from tests.laws.settings import TINY

WIDTH, MAX_TOKENS = 4, 320


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model of two layers.

    Attributes:
      directory: where its configuration is.
      program: of windows of `WIDTH` rows, with every fault.
      params: prepared.
    """

    directory: Path
    program: Program
    params: Any


def make(folder: Path, model: str, dtype: str) -> Tiny:
    """A model of `TINY` with random weights, those that `--load-format dummy` draws."""
    directory = tiny_models.write(folder, tiny_models.two_layers(TINY[model]))
    config = HybridConfig.from_directory(directory)
    program = Program(
        config,
        width=WIDTH,
        max_tokens=MAX_TOKENS,
        dtype=dtype,
        state_dtype=StateDtype.FLOAT32,
        faults=tuple(Fault),
    )
    return Tiny(directory, program, prepare(dummy_params(config, dtype=dtype, progress=False)))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The one with every kind of state, in float32, where nothing hides behind a rounding."""
    return make(tmp_path_factory.mktemp("tiny"), "tiny-q4", "float32")
