"""The laws on models with sparse attention."""

import pytest

from serve.check import GIVEN, Drafting
from tests.laws.law_tests import LawTests

CASES = [
    pytest.param(("tiny-q4", "float32", 28, Drafting(GIVEN, 4)), id="tiny-q4-float32"),
    pytest.param(("demo", "float32", 7), id="demo-float32", marks=pytest.mark.full),
    pytest.param(("demo", "bfloat16", 10, Drafting("NEXTN", 4)), id="demo-bfloat16"),
]


@pytest.mark.parametrize("run", CASES, indirect=True, scope="module")
class TestLaws(LawTests):
    """On each of them."""
