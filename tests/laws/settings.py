"""Models that the laws are tested on, and how their golden runs are compiled faster."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from serve.check import Setting
from serve.engine_config import EngineConfig
from serve.model_path import resolve_model_path
from tests import tiny_models

DTYPES = ("float32", "bfloat16")
# Two layers each, to be compiled in seconds.
TINY = {"tiny-q4": "q4_all", "tiny-dense": "q35_dense"}


def setting_of(model: str, dtype: str, folder: Path) -> Setting:
    """A packaged model, or one of two layers with random weights, made in the folder."""
    if model not in TINY:
        return Setting(directory=str(resolve_model_path(model)), dtype=dtype)
    config = tiny_models.two_layers(TINY[model])
    directory = tiny_models.write(folder / model, config)
    return Setting(directory=str(directory), load_format="dummy", dtype=dtype)


@contextlib.contextmanager
def one_program() -> Iterator[None]:
    """Compile engines for the widest step only: half the time, and the same bits by law."""
    widest = property(lambda config: (config.max_rows,))
    with mock.patch.object(EngineConfig, "row_buckets", widest):
        yield
