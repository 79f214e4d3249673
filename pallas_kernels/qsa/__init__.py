"""Qwen Sparse Attention: pooled index keys, group selection, attention over what was chosen."""

from pallas_kernels.qsa import reference as reference
from pallas_kernels.qsa.tiled import Selection as Selection
from pallas_kernels.qsa.tiled import pool_raw_keys as pool_raw_keys
from pallas_kernels.qsa.tiled import select_tokens as select_tokens
from pallas_kernels.qsa.tiled import sparse_attention as sparse_attention
