"""Root-mean-square norms."""

from pallas_kernels.norm.api import gated_rms_norm as gated_rms_norm
from pallas_kernels.norm.api import grouped_rms_norm as grouped_rms_norm
from pallas_kernels.norm.api import inverse_length as inverse_length
from pallas_kernels.norm.api import rms_norm as rms_norm
