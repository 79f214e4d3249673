"""Depthwise causal convolution."""

from pallas_kernels.causal_conv.reference import causal_conv as causal_conv
from pallas_kernels.causal_conv.tiled import conv_rows as conv_rows
