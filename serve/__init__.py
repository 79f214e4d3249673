"""Requests in, tokens out."""

from serve.engine import Engine as Engine
from serve.sampling_params import SamplingParams as SamplingParams
