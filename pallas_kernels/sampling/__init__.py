"""Choosing a token from logits."""

from pallas_kernels.sampling.api import Sampling as Sampling
from pallas_kernels.sampling.api import choose as choose
from pallas_kernels.sampling.api import filtered_logits as filtered_logits
from pallas_kernels.sampling.api import log_probability as log_probability
