"""Which names mean which directories."""

import pathlib

import pytest

from serve import model_path
from serve.model_path import resolve_model_path


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """Lay a package's data out under a temporary folder."""
    for name in model_path.PACKAGED_MODELS:
        (tmp_path / "demos" / name).mkdir(parents=True)
        (tmp_path / "demos" / name / "config.json").write_text("{}")
    monkeypatch.setattr(model_path.resources, "files", lambda package: tmp_path)
    return tmp_path / "demos"


@pytest.mark.parametrize("name", ["demo", "demo-dense"])
def test_bare_names_mean_the_package_even_beside_a_folder(packaged, name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path(name) == packaged / name
    with pytest.raises(FileNotFoundError, match="no config.json in"):
        resolve_model_path(f"./{name}")


@pytest.mark.parametrize("name", ["demo-moe", "Demo", "Qwen/Some-Model", "qwen3.5", ""])
def test_other_names_are_refused(packaged, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        resolve_model_path(name or "absent")
    assert str(error.value) == (
        f"no model directory {name or 'absent'!r}; the only bare names are demo and demo-dense, "
        "and nothing is downloaded"
    )


def test_directories(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json in"):
        resolve_model_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_path(tmp_path) == tmp_path
    assert resolve_model_path(str(tmp_path)) == tmp_path
    with pytest.raises(NotADirectoryError, match="is a file; a model is a directory"):
        resolve_model_path(tmp_path / "config.json")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve_model_path("~/model") == tmp_path / "model"


def test_a_package_without_its_data_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(model_path.resources, "files", lambda package: pathlib.Path(tmp_path))
    with pytest.raises(FileNotFoundError, match="the package came without its model 'demo'"):
        resolve_model_path("demo")
