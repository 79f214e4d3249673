"""The laws on models with full attention."""

import pytest

from serve.check.process import golden_elsewhere
from tests.laws.law_tests import LawTests
from tests.laws.settings import DTYPES

CASES = [
    pytest.param(("tiny-dense", "bfloat16", 21), id="tiny-dense-bfloat16"),
    *(pytest.param(("demo-dense", dtype, 7), id=f"demo-dense-{dtype}") for dtype in DTYPES),
]


@pytest.mark.parametrize("run", CASES, indirect=True, scope="module")
class TestLaws(LawTests):
    """On each of them."""


@pytest.mark.parametrize("run", CASES[:1], indirect=True, scope="module")
def test_a_new_process_gives_the_same_bits(run):
    run.compare_with_process(golden_elsewhere(run.setting))
    assert run.process.status == "passed", run.process
    assert run.process.tokens > 100
