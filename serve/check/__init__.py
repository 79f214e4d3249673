"""The laws of docs/design.md, checked on a model and a device."""

from serve.check.cases import make_cases as make_cases
from serve.check.explain import explain as explain
from serve.check.golden import golden_runs as golden_runs
from serve.check.laws import LawRun as LawRun
from serve.check.laws import run_laws as run_laws
from serve.check.report import table as table
from serve.check.setting import Setting as Setting
from serve.check.speculation import GIVEN as GIVEN
from serve.check.speculation import Drafting as Drafting
from serve.check.speculation import Speculation as Speculation
from serve.check.speculation import speculations as speculations
