"""A model of two layers, linear and attention, and what is made of it without a device."""

import pytest

from serve.check import Setting
from tests import tiny_models


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    config = tiny_models.two_layers("q35_dense")
    return tiny_models.write(tmp_path_factory.mktemp("check") / "model", config)


@pytest.fixture(scope="session")
def setting(directory) -> Setting:
    """Its programs are compiled once for all tests."""
    return Setting(
        directory=str(directory),
        load_format="dummy",
        dtype="float32",
        compilation_cache_dir=str(directory / "compiled"),
    )
