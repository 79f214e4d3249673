"""Gated delta rule as sealed states and a log."""

from pallas_kernels.gated_delta_net.reference import gated_delta_rule as gated_delta_rule
from pallas_kernels.gated_delta_net.state_dtype import StateDtype as StateDtype
from pallas_kernels.gated_delta_net.tiled import GdnLog as GdnLog
from pallas_kernels.gated_delta_net.tiled import LogInputs as LogInputs
from pallas_kernels.gated_delta_net.tiled import log_step as log_step
