"""The laws on models with full attention."""

import pytest

from serve.check import GIVEN, Drafting
from serve.check.process import golden_elsewhere
from tests.laws.law_tests import LawTests

CASES = [
    pytest.param(("tiny-dense", "bfloat16", 28, Drafting(GIVEN, 8)), id="tiny-dense-bfloat16"),
    pytest.param(("demo-dense", "float32", 10, Drafting("NEXTN", 4)), id="demo-dense-float32"),
    pytest.param(("demo-dense", "bfloat16", 7), id="demo-dense-bfloat16", marks=pytest.mark.full),
]


@pytest.mark.parametrize("run", CASES, indirect=True, scope="module")
class TestLaws(LawTests):
    """On each of them."""


@pytest.mark.parametrize("run", CASES[:1], indirect=True, scope="module")
def test_a_new_process_gives_the_same_bits(run):
    run.compare_with_process(golden_elsewhere(run.setting))
    assert run.process.status == "passed", run.process
    assert run.process.tokens > 100
