"""Sparse-attention indexer in float64, one query at a time."""

import numpy as np


def pool(raw, ratio):
    """Return the mean of each complete run of `ratio` rows."""
    raw = np.asarray(raw, np.float64)
    return np.array([raw[i : i + ratio].mean(axis=0) for i in range(0, len(raw), ratio)])[
        : len(raw) // ratio
    ].reshape(len(raw) // ratio, raw.shape[1])


def score(q, pooled):
    """Return sum over heads of relu(q . k) / sqrt(D) for each query and group."""
    q, pooled = np.asarray(q, np.float64), np.asarray(pooled, np.float64)
    out = np.zeros((len(q), len(pooled)))
    for t, heads in enumerate(q):
        for group, key in enumerate(pooled):
            out[t, group] = sum(max(0.0, float(head @ key)) for head in heads)
    return out / np.sqrt(q.shape[2])


def choose(scores, position, ratio, budget_groups):
    """Return the set of groups that a query at `position` keeps."""
    candidates = range((position + 1) // ratio)
    ranked = sorted(candidates, key=lambda group: (-float(scores[group]), group))
    return set(ranked[:budget_groups])


def tokens(groups, position, ratio):
    """Return the set of tokens read: the groups' tokens and the unfinished group's."""
    chosen = {token for group in groups for token in range(group * ratio, (group + 1) * ratio)}
    return chosen | set(range((position + 1) // ratio * ratio, position + 1))
