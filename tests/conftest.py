"""The strict mode of the test run, and how tests that need an accelerator are chosen."""

import random

import jax
import numpy as np
import pytest
from jaxtyping import install_import_hook

from tests import typecheck

# Shapes and dtypes named in annotations are checked in the test run only. The rest of `serve`
# takes what users give and answers bad input with its own messages, so it is left alone.
CHECKED_PACKAGES = ["pallas_kernels", "qwen_hybrid", "spec", "serve.runner", "serve.sampling"]
_hook = install_import_hook(CHECKED_PACKAGES, f"{typecheck.__name__}.checker")

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser: pytest.Parser):
    """Add `--device` and `--full`."""
    parser.addoption("--device", action="store_true", help="run the tests that need an accelerator")
    parser.addoption("--full", action="store_true", help="run the cases that the cover leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Skip tests marked `device` or `full` unless they were asked for."""
    for mark, why in (("device", "needs an accelerator"), ("full", "not in the cover")):
        if config.getoption(f"--{mark}"):
            continue
        skip = pytest.mark.skip(reason=f"{why}: pass --{mark}")
        for item in items:
            if mark in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Start every test from the same global random state."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a generator with a fixed seed."""
    return np.random.default_rng(0)
