"""Mixture of experts in float64, one row at a time."""

import numpy as np


def choose(logits, top_k, renormalize):
    """Return weights [T, k] and ids [T, k], best expert first, ties to the lower id."""
    logits = np.asarray(logits, np.float64)
    weights, ids = [], []
    for row in logits:
        probabilities = np.exp(row - row.max())
        probabilities /= probabilities.sum()
        best = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k]
        chosen = probabilities[best]
        weights.append(chosen / chosen.sum() if renormalize else chosen)
        ids.append(best)
    return np.array(weights), np.array(ids)


def mix(x, weights, ids, gate_up, down):
    """Return sum_k weight_k * down(silu(gate x) * up x) of each row's experts."""
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    width = down.shape[2]
    out = np.zeros(x.shape)
    for t, row in enumerate(x):
        for weight, expert in zip(weights[t], ids[t], strict=True):
            gate = gate_up[expert, :width] @ row
            up = gate_up[expert, width:] @ row
            out[t] += weight * (down[expert] @ (gate / (1.0 + np.exp(-gate)) * up))
    return out
