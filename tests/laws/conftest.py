"""One run of the laws for all tests of a model."""

import pytest

from serve.check import LawRun, golden_runs, make_cases, run_laws, speculations
from tests.laws.settings import one_program, setting_of

# So that failures of the shared tests say what they compared.
pytest.register_assert_rewrite("tests.laws.law_tests")


@pytest.fixture(scope="module")
def run(request, tmp_path_factory) -> LawRun:
    """Golden runs, schedules and scores of a model: (its name, dtype, number of schedules, engines
    that draft)."""
    model, dtype, num_schedules, *draftings = request.param
    setting = setting_of(model, dtype, tmp_path_factory.mktemp("models"))
    with one_program():
        golden = golden_runs(setting, make_cases(setting))
    return run_laws(
        setting,
        num_schedules=num_schedules,
        speculations=speculations(draftings),
        golden=golden,
    )
