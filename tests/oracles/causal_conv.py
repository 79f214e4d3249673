"""Depthwise causal convolution in float64, element by element."""

import numpy as np


def convolve(x, weight, dilation, tail):
    """Return y[t, c] = sum over taps back in time; row t - lag comes from the tail if negative."""
    x, weight, tail = (np.asarray(a, np.float64) for a in (x, weight, tail))
    num_rows, num_channels = x.shape
    num_taps = weight.shape[1]
    y = np.zeros((num_rows, num_channels))
    for t in range(num_rows):
        for tap in range(num_taps):
            source = t - (num_taps - 1 - tap) * dilation
            row = x[source] if source >= 0 else tail[len(tail) + source]
            y[t] += weight[:, tap] * row
    return y
