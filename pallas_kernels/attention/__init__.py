"""Attention over paged keys and values."""

from pallas_kernels.attention.reference import (
    attention_probabilities as attention_probabilities,
)
from pallas_kernels.attention.reference import masked_attention as masked_attention
from pallas_kernels.attention.tiled import SPAN as SPAN
from pallas_kernels.attention.tiled import paged_attention as paged_attention
