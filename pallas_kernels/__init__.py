"""Kernels and their plain twins: arrays in, arrays out, no knowledge of models."""
