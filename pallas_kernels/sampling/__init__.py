"""Choosing a token from logits."""

from pallas_kernels.sampling.api import Sampling as Sampling
from pallas_kernels.sampling.api import choose as choose
from pallas_kernels.sampling.api import filtered_logits as filtered_logits
from pallas_kernels.sampling.api import likeliest as likeliest
from pallas_kernels.sampling.api import log_probabilities as log_probabilities
from pallas_kernels.sampling.api import top_tokens as top_tokens
from pallas_kernels.sampling.penalties import ENDS_OUTPUT as ENDS_OUTPUT
from pallas_kernels.sampling.penalties import GENERATED as GENERATED
from pallas_kernels.sampling.penalties import IN_PROMPT as IN_PROMPT
from pallas_kernels.sampling.penalties import Penalties as Penalties
from pallas_kernels.sampling.penalties import SlotHistory as SlotHistory
from pallas_kernels.sampling.penalties import count_tokens as count_tokens
from pallas_kernels.sampling.penalties import history_spec as history_spec
from pallas_kernels.sampling.penalties import penalized as penalized
from pallas_kernels.sampling.penalties import with_slot as with_slot
from pallas_kernels.sampling.penalties import with_tokens as with_tokens
