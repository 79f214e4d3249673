"""The command line over the toy engine."""

import pytest

from serve.cli import terminal
from tests.serve.cli.toy import ToyEngine


@pytest.fixture
def toy(monkeypatch):
    """The toy engine in the place of the real one."""
    monkeypatch.setattr(terminal, "Engine", ToyEngine)
    monkeypatch.setattr(ToyEngine, "most_under_way", 0)
    monkeypatch.setattr(ToyEngine, "after_pieces", None)
    return ToyEngine


@pytest.fixture(autouse=True)
def no_settings_of_the_developer(monkeypatch):
    """No option comes from the environment that the tests run in."""
    for name in ("QWEN_HYBRID_CONFIG", "QWEN_HYBRID_MODEL", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
