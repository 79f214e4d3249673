"""Mixture of experts."""

from pallas_kernels.moe import reference as reference
from pallas_kernels.moe.tiled import expert_mix as expert_mix
from pallas_kernels.moe.tiled import route as route
