"""Fixtures of the tests of speculative decoding."""

from tests.oracles.fixtures import checkpoints as checkpoints
