"""Qwen hybrid language models as pure functions over parameters and explicit state."""
