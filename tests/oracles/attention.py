"""Masked softmax attention in float64, one query head at a time."""

import numpy as np


def attend(q, k, v, mask, scale):
    """Return [T, N, H]; a query that may read nothing gets zeros."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    mask = np.asarray(mask)
    num_rows, num_heads, head_dim = q.shape
    heads_per_kv = num_heads // k.shape[1]
    o = np.zeros((num_rows, num_heads, head_dim))
    for t in range(num_rows):
        seen = np.flatnonzero(mask[t])
        if not seen.size:
            continue
        for head in range(num_heads):
            kv_head = head // heads_per_kv
            scores = k[seen, kv_head] @ q[t, head] * scale
            weights = np.exp(scores - scores.max())
            o[t, head] = weights @ v[seen, kv_head] / weights.sum()
    return o
