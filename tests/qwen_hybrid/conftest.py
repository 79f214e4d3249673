"""Fixtures of the model tests."""

from tests.oracles.fixtures import checkpoints as checkpoints
