"""Requests in, tokens out."""

from serve.engine import Engine as Engine
from serve.errors import EngineDeadError as EngineDeadError
from serve.errors import StepError as StepError
from serve.sampling_params import SamplingParams as SamplingParams
