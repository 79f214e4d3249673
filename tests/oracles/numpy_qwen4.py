"""The layers that only `qwen4_exp` has, in float64 NumPy: streams, n-gram embedding, QSA."""

import math

import numpy as np
from jaxtyping import Bool, Float, Int

from tests.oracles.numpy_layers import Weights, causal_conv, rms_norm, rope, sigmoid, silu

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def hyper_read(
    streams: Float[np.ndarray, "T nD"], w: Weights, config: dict
) -> tuple[Float[np.ndarray, "T D"], Float[np.ndarray, "T nD"]]:
    """Mix the normalised streams into one row; also return the normalised streams."""
    n = config["hc_count"]
    normed = rms_norm(streams, w["hc_norm.weight"], config["rms_norm_eps"], groups=n)
    low = silu(normed @ w["input_mix_weight_down.weight"].T / n)
    mix = sigmoid(low @ w["input_mix_weight_up.weight"].T)
    return (mix * normed).reshape(len(streams), n, -1).mean(1), normed


def hyper_add(
    streams: Float[np.ndarray, "T nD"],
    normed: Float[np.ndarray, "T nD"],
    y: Float[np.ndarray, "T D"],
    w: Weights,
    config: dict,
) -> Float[np.ndarray, "T nD"]:
    """Add `y` to every stream with that stream's own strength, between 0 and 2."""
    inject = 2 * sigmoid(normed @ w["block_inject_weight.weight"].T / config["hc_count"])
    return streams + (inject[:, :, None] * y[:, None, :]).reshape(streams.shape)


def splitmix64(value: int) -> int:
    """Scramble 64 bits."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes_from(base: int, count: int) -> list[int]:
    """List the first `count` primes that are at least `base`."""
    found, candidate = [], base
    while len(found) < count:
        if candidate > 1 and all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
        candidate += 1
    return found


def hash_constants(config: dict, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Compute multipliers, moduli and row offsets of the PLE layer of that rank."""
    size, heads = config["ngram_size"], (config["ngram_size"] - 1) * config["heads_per_ngram"]
    half = max(1, (2**63 - 1) // config["vocab_size"] // 2)
    seed = config["seed"] + 10007 * rank
    multipliers = [
        2 * (splitmix64((seed + _GAMMA * (i + 1)) & _MASK) % half) + 1 for i in range(size)
    ]
    primes = _primes_from(config["ngram_vocab_size_base"], (rank + 1) * heads)[rank * heads :]
    offsets = [sum(primes[:head]) for head in range(heads)]
    return multipliers, primes, offsets


def ngram_rows(ids: Int[np.ndarray, " T"], config: dict, rank: int) -> Int[np.ndarray, "T N"]:
    """Look up the table row of every n-gram head for every token, in exact integers."""
    eos = config["eos_token_id"]
    eos = eos[0] if isinstance(eos, list) else eos
    multipliers, primes, offsets = hash_constants(config, rank)
    size, heads = config["ngram_size"], config["heads_per_ngram"]
    rows = np.zeros((len(ids), len(primes)), np.int64)
    for t in range(len(ids)):
        mixed, cut = int(ids[t]) * multipliers[0], False
        for back in range(1, size):
            cut = cut or t < back or int(ids[t - back]) == eos
            mixed ^= (eos if cut else int(ids[t - back])) * multipliers[back]
            for head in range((back - 1) * heads, back * heads):
                rows[t, head] = mixed % primes[head] + offsets[head]
    return rows


def per_layer_embedding(
    streams: Float[np.ndarray, "T nD"],
    ids: Int[np.ndarray, " T"],
    w: Weights,
    config: dict,
    rank: int,
) -> Float[np.ndarray, "T nD"]:
    """Compute what a PLE layer adds to the streams."""
    n, D, eps = config["hc_count"], config["hidden_size"], config["rms_norm_eps"]
    T = len(ids)
    table = w["ple_embedding.ngram_embedding.weight"]
    embedding = table[ngram_rows(ids, config, rank)].reshape(T, -1)
    key = rms_norm(embedding @ w["key_proj.weight"].T, w["norm_key.weight"], eps, groups=n)
    query = rms_norm(streams, w["norm_query.weight"], eps, groups=n)
    score = (key * query).reshape(T, n, D).sum(-1) / math.sqrt(D)
    score = np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6))
    value = embedding @ w["value_proj.weight"].T
    gated = (sigmoid(score)[:, :, None] * value[:, None, :]).reshape(T, n * D)
    normed = rms_norm(gated, w["norm_conv.weight"], eps, groups=n)
    conv = causal_conv(normed, w["conv1d.weight"][:, 0], dilation=config["ngram_size"])
    return gated + silu(conv)


def qsa_group_scores(
    x: Float[np.ndarray, "T D"], w: Weights, config: dict, *, positions: Int[np.ndarray, " T"]
) -> Float[np.ndarray, "T G"]:
    """Score every complete group for every query, future groups included."""
    N, H, ratio = (config[f"indexer_{key}"] for key in ("n_heads", "head_dim", "compress_ratio"))
    T, eps = len(x), config["rms_norm_eps"]
    projected = x @ w["index_qk_proj.weight"].T
    q = rms_norm(projected[:, : N * H].reshape(T, N, H), w["q_layernorm.weight"], eps)
    q = rope(q, positions, config)
    num_groups = T // ratio
    raw = projected[: num_groups * ratio, N * H :].reshape(num_groups, ratio, H)
    pooled = rms_norm(raw.mean(1), w["k_layernorm.weight"], eps)
    # A group turns as its first token does.
    k = rope(pooled[:, None], positions[: num_groups * ratio : ratio], config)[:, 0]
    return np.maximum(np.einsum("tnh,gh->tng", q, k), 0).sum(1) / math.sqrt(H)


def qsa_token_mask(scores: Float[np.ndarray, "T G"], config: dict) -> Bool[np.ndarray, "T T"]:
    """Keep the best groups that are complete at each query, and the unfinished tail.

    Groups are ordered by score descending, then by index ascending.
    """
    T, ratio = len(scores), config["indexer_compress_ratio"]
    budget = config["indexer_budget"] // ratio
    mask = np.zeros((T, T), bool)
    for t in range(T):
        complete = (t + 1) // ratio
        for group in np.argsort(-scores[t, :complete], kind="stable")[:budget]:
            mask[t, group * ratio : (group + 1) * ratio] = True
        mask[t, complete * ratio : t + 1] = True
    return mask


def smallest_gap(scores: Float[np.ndarray, "T G"], config: dict) -> float:
    """Find the smallest score difference between a group kept and a group dropped."""
    ratio = config["indexer_compress_ratio"]
    budget = config["indexer_budget"] // ratio
    gaps: list[float] = [np.inf]
    for t in range(len(scores)):
        ranked = np.sort(scores[t, : (t + 1) // ratio])[::-1]
        if len(ranked) > budget:
            gaps.append(float(ranked[budget - 1] - ranked[budget]))
    return min(gaps)
