"""Gated delta rule, one token at a time in float64, from the paper's recurrence."""

import numpy as np


def recurrence(q, k, v, g, beta, state):
    """Return outputs [T, Hv, dv] and the last state [Hv, dk, dv] of one sequence."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    num_rows, num_value_heads, value_dim = v.shape
    key_dim = q.shape[2]
    repeats = num_value_heads // q.shape[1]
    state = state.copy()
    o = np.zeros((num_rows, num_value_heads, value_dim))
    for t in range(num_rows):
        for head in range(num_value_heads):
            raw_q, raw_k = q[t, head // repeats], k[t, head // repeats]
            unit_q = raw_q / np.sqrt(raw_q @ raw_q + 1e-6) / np.sqrt(key_dim)
            unit_k = raw_k / np.sqrt(raw_k @ raw_k + 1e-6)
            decayed = np.exp(g[t, head]) * state[head]
            delta = beta[t, head] * (v[t, head] - decayed.T @ unit_k)
            state[head] = decayed + np.outer(unit_k, delta)
            o[t, head] = state[head].T @ unit_q
    return o, state
