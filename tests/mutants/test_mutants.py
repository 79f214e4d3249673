"""A few deliberate bugs, the cheapest ones; `make mutants` runs them all."""

import pytest

from tests.mutants.mutants import BY_NAME, MUTANTS
from tests.mutants.run import judge
from tests.source_tree import ROOT, sources

CHEAPEST = (
    "next slot leaks",
    "ties to the higher group",
    "seal at a schedule's row",
    "NaN-unsafe mask, attention",
)


@pytest.mark.parametrize("name", CHEAPEST)
def test_the_suite_kills(name):
    verdict = judge(BY_NAME[name])
    assert verdict.verdict == "killed", verdict


def test_every_mutant_names_tests_that_exist():
    assert len(BY_NAME) == len(MUTANTS)
    texts = {s.path.as_posix(): (ROOT / s.path).read_text() for s in sources("tests")}
    for mutant in MUTANTS:
        assert mutant.killers
        for killer in mutant.killers:
            path, _, test = killer.partition("::")
            assert f"def {test.partition('[')[0]}" in texts[path], killer


def test_the_list_holds_what_the_design_names():
    for words in (
        "beta rounded in one path",
        "taps reversed",
        "seal a row early",
        "seal at a schedule's row",
        "commit off by one",
        "u unrounded in prefill",
        "ties to the higher group",
        "split K by row count",
        "product tiled by row count",
        "stale sealed slot",
        "ring a row short",
        "empty lane writes",
        "u unrounded in its group",
        "fold of the other block",
        "reads before the write",
        "spans by program",
        "seal in another order",
        "NaN of a later row",
        "bits truncated",
        "NaN-unsafe mask",
        "neighbour leak",
        "noise by place in the batch",
        "gate sum restarted",
    ):
        assert any(words in name for name in BY_NAME), words
