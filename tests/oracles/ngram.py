"""N-gram hashing in Python's unbounded integers: constants of a table, and its rows."""

from dataclasses import dataclass

GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64 - 1


@dataclass(frozen=True)
class Table:
    """Constants of the table of one layer; see `constants`."""

    multipliers: tuple[int, ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]
    num_rows: int


def splitmix64(value):
    """One output of the SplitMix64 generator for this seed value."""
    value = (value + GOLDEN) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def _is_prime(number):
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def constants(rank, vocab_size, *, ngram_size, heads, base, divisor, seed):
    """Return the table of the `rank`-th layer that has one."""
    half = max(1, ((2**63 - 1) // vocab_size) // 2)
    multipliers = tuple(
        2 * (splitmix64((seed + 10007 * rank + GOLDEN * (i + 1)) & WORD) % half) + 1
        for i in range(ngram_size)
    )
    per_layer = (ngram_size - 1) * heads
    primes, number = [], base
    while len(primes) < (rank + 1) * per_layer:
        if _is_prime(number):
            primes.append(number)
        number += 1
    moduli = tuple(primes[rank * per_layer :])
    offsets = tuple(sum(moduli[:i]) for i in range(per_layer))
    num_rows = -(-sum(moduli) // divisor) * divisor
    return Table(multipliers, moduli, offsets, num_rows)


def rows(ids, table, *, ngram_size, heads, eos):
    """Return the list of rows of each position, walking back token by token."""
    out = []
    for t in range(len(ids)):
        hashed, cut, row = ids[t] * table.multipliers[0], False, []
        for back in range(1, ngram_size):
            cut = cut or t - back < 0 or ids[t - back] == eos
            hashed ^= (eos if cut else ids[t - back]) * table.multipliers[back]
            for head in range((back - 1) * heads, back * heads):
                row.append(hashed % table.moduli[head] + table.offsets[head])
        out.append(row)
    return out
