"""Fixtures of the oracle tests."""

from tests.oracles.fixtures import checkpoints as checkpoints
