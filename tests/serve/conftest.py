"""One small engine for every test of a module, which must end idle."""

import pytest

from tests import tiny_models
from tests.serve.engines import Gate, settle, start


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    config = tiny_models.two_layers("q35_dense")
    return tiny_models.write_with_tokenizer(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="module")
def shared_engine(directory):
    with start(directory) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    settle(shared_engine)


@pytest.fixture
def no_steps(engine, monkeypatch):
    """The engine, failing at any device work."""

    def run(work):
        raise AssertionError("device work for a request that is refused")

    monkeypatch.setattr(engine.core.runner, "run", run)
    return engine


@pytest.fixture
def gate(engine, monkeypatch):
    gate = Gate(engine, monkeypatch)
    yield gate
    gate.open()
    settle(engine)
