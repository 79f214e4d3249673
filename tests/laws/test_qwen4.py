"""The laws on models with sparse attention."""

import pytest

from tests.laws.law_tests import LawTests
from tests.laws.settings import DTYPES

CASES = [
    pytest.param(("tiny-q4", "float32", 21), id="tiny-q4-float32"),
    *(pytest.param(("demo", dtype, 7), id=f"demo-{dtype}") for dtype in DTYPES),
]


@pytest.mark.parametrize("run", CASES, indirect=True, scope="module")
class TestLaws(LawTests):
    """On each of them."""
