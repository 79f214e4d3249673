"""N-gram hash of the per-layer embedding."""

from pallas_kernels.ngram.tiled import check_bounds as check_bounds
from pallas_kernels.ngram.tiled import ngram_rows as ngram_rows
