"""A pytest plugin that changes the code under test, and notes the first test that fails.

python -m pytest -p tests.mutants.plugin --mutant NAME --note FILE ...
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

_patch = pytest.MonkeyPatch()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--mutant` and `--note`."""
    parser.addoption("--mutant", default="", help="name of the deliberate bug; none by default")
    parser.addoption("--note", type=Path, help="where to note the first failure")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Apply the mutant once every module is loaded, through the checks of the test run.

    Imported here for that reason: a plugin is loaded before they are installed.
    """
    name = session.config.getoption("--mutant")
    if name:
        mutants = importlib.import_module("tests.mutants.mutants")
        mutants.BY_NAME[name].apply(_patch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """Note the first failure."""
    report = yield
    note = item.config.getoption("--note")
    if note is not None and report.failed and not note.exists():
        assert call.excinfo is not None
        crash = getattr(report.longrepr, "reprcrash", None)
        message = str(call.excinfo.value) or getattr(crash, "message", "")
        kind = call.excinfo.type.__name__
        note.write_text(json.dumps({"test": item.nodeid, "kind": kind, "message": message}))
    return report


def pytest_unconfigure() -> None:
    """Undo the change."""
    _patch.undo()
