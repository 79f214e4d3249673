"""Fixtures of the DSpark tests."""

from pathlib import Path

import pytest

from tests.spec.dspark.cases import CASES, Case, case_of


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the drafters' directories are written."""
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="session", params=CASES)
def case(request: pytest.FixtureRequest, drafts: Path) -> Case:
    """Each small drafter."""
    return case_of(request.param, drafts)
