"""Fixtures that a `conftest.py` takes over by importing them."""

import pytest

from tests.oracles.recipe import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoint directories of the small configurations, shared by the whole session."""
    return Checkpoints(tmp_path_factory.getbasetemp() / "checkpoints")
