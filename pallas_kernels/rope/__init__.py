"""Rotary position embedding."""

from pallas_kernels.rope.api import rope as rope
