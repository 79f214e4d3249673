"""A row's bits depend on the row alone: not on its place in the tile, its neighbours or the call.

Each row-wise operator runs inside `map_tiles`, as the model runs it. The 16 rows of one tile are
fed once as they stand; then rotated by every shift, alone among rows of NaN, and as the first of 1
to 48 rows. Programs of three sizes are used: XLA compiles each on its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense import InputMajor, dense, linear
from pallas_kernels.moe import expert_mix, route
from pallas_kernels.ngram import ngram_rows
from pallas_kernels.norm import gated_rms_norm, grouped_rms_norm, inverse_length, rms_norm
from pallas_kernels.rope import rope
from pallas_kernels.rows import TILE_ROWS, map_tiles
from pallas_kernels.sampling import (
    GENERATED,
    Penalties,
    Sampling,
    choose,
    filtered_logits,
    log_probabilities,
    penalized,
)
from qwen_hybrid.step import COMPILER_OPTIONS
from tests.pallas_kernels.paged import same_bits

SMALL, LARGE = 3 * TILE_ROWS, TILE_ROWS * TILE_ROWS
WIDTH, HEADS, VOCAB, EXPERTS = 96, 3, 200, 6
EPS = 1e-6

Rows = Any


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _weight(seed: int, *shape: int, dtype) -> jax.Array:
    return jnp.asarray(_normal(seed, *shape) / np.sqrt(shape[-1]), dtype)


def _matrix(seed: int, *shape: int, dtype) -> InputMajor:
    return InputMajor(_weight(seed, *shape, dtype=dtype).swapaxes(-1, -2))


def _wide(dtype) -> np.ndarray:
    return _normal(0, TILE_ROWS, WIDTH).astype(dtype)


def _norms(dtype) -> tuple[Callable, Rows]:
    weight = _weight(1, WIDTH, dtype=dtype)

    def fn(x):
        heads = x.reshape(x.shape[0], HEADS, -1)
        return (
            rms_norm(x, weight, EPS),
            rms_norm(heads, weight[: heads.shape[-1]], EPS),
            grouped_rms_norm(x, weight, 4, EPS),
            inverse_length(heads),
        )

    return fn, (_wide(dtype),)


def _gated_norms(dtype) -> tuple[Callable, Rows]:
    weight = _weight(1, WIDTH // HEADS, dtype=jnp.float32)

    def fn(x, z):
        return tuple(gated_rms_norm(x, z, weight, EPS, f) for f in (jax.nn.silu, jax.nn.sigmoid))

    heads = (TILE_ROWS, HEADS, WIDTH // HEADS)
    return fn, (_normal(2, *heads), _normal(3, *heads).astype(dtype))


def _rope(dtype) -> tuple[Callable, Rows]:
    position = np.arange(5, 5 + 997 * TILE_ROWS, 997, dtype=np.int32)
    x = _normal(4, TILE_ROWS, HEADS, WIDTH // HEADS).astype(dtype)
    return lambda x, p: (rope(x, p, rotary_dim=8, theta=1e7),), (x, position)


def _products(dtype) -> tuple[Callable, Rows]:
    long, short = _matrix(5, 70, WIDTH, dtype=dtype), _matrix(6, 1, WIDTH, dtype=dtype)
    return lambda x: (dense(x, long), linear(x, long), dense(x, short)), (_wide(dtype),)


def _large_product(dtype) -> tuple[Callable, Rows]:
    weight = _matrix(7, 640, 512, dtype=dtype)
    return lambda x: (dense(x, weight),), (_normal(8, TILE_ROWS, 512).astype(dtype),)


def _mlp(dtype) -> tuple[Callable, Rows]:
    """A norm, three products and what XLA may fuse between them."""
    norm, gate = _weight(1, WIDTH, dtype=dtype), _matrix(9, 40, WIDTH, dtype=dtype)
    up, down = _matrix(10, 40, WIDTH, dtype=dtype), _matrix(11, WIDTH, 40, dtype=dtype)

    def fn(x):
        h = rms_norm(x, norm, EPS)
        inner = jax.nn.silu(linear(h, gate).astype(jnp.float32))
        inner = inner * linear(h, up).astype(jnp.float32)
        y = linear(inner.astype(x.dtype), down)
        return ((x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype),)

    return fn, (_wide(dtype),)


def _experts(dtype) -> tuple[Callable, Rows]:
    router = _matrix(12, EXPERTS, WIDTH, dtype=dtype)
    gate_up = _matrix(13, EXPERTS, 20, WIDTH, dtype=dtype)
    down = _matrix(14, EXPERTS, WIDTH, 10, dtype=dtype)

    def fn(x, live):
        weight, expert = route(dense(x, router), top_k=3, renormalize=True)
        return expert_mix(x, weight, expert, live, gate_up, down), weight, expert

    return fn, (_wide(dtype), np.ones(TILE_ROWS, bool))


def _ngram(dtype) -> tuple[Callable, Rows]:
    del dtype
    fn = functools.partial(
        ngram_rows,
        multipliers=(23703573157769, 20109073645365, 8052911324071),
        moduli=(20000003, 20000023, 20000033, 20000047),
        offsets=(0, 20000003, 40000026, 60000059),
        heads_per_ngram=2,
        eos=7,
    )
    ids = np.random.default_rng(15).integers(0, 1 << 18, (3, TILE_ROWS)).astype(np.int32)
    ids[1, ::5] = 7
    rows = (*ids, np.arange(TILE_ROWS, dtype=np.int32))
    return lambda a, b, c, position: (fn((a, b, c), position),), rows


def _sampling(dtype) -> tuple[Callable, Rows]:
    del dtype
    rng = np.random.default_rng(16)
    parameters = (
        rng.choice([0.0, 0.7, 1.0, 1.5], TILE_ROWS).astype(np.float32),
        rng.choice([0, 1, 20], TILE_ROWS).astype(np.int32),
        rng.choice([1.0, 0.9, 0.4], TILE_ROWS).astype(np.float32),
        rng.choice([0.0, 0.1], TILE_ROWS).astype(np.float32),
        rng.integers(0, 1 << 32, (TILE_ROWS, 2)).astype(np.uint32),
    )

    def fn(logits, position, *fields):
        parameters = Sampling(*fields)
        token = choose(logits, parameters, position)
        return token, log_probabilities(logits, token[:, None]), filtered_logits(logits, parameters)

    position = np.arange(3, 3 + TILE_ROWS, dtype=np.int32)
    return fn, (3 * _normal(17, TILE_ROWS, VOCAB), position, *parameters)


def _penalties(dtype) -> tuple[Callable, Rows]:
    del dtype
    rng = np.random.default_rng(18)
    marks = rng.integers(0, 4 * GENERATED, (TILE_ROWS, VOCAB)).astype(np.int32)
    bias = _normal(19, TILE_ROWS, VOCAB)
    fields = (
        rng.choice([0.7, 1.0, 1.4], TILE_ROWS).astype(np.float32),
        rng.choice([-1.0, 0.0, 0.3], TILE_ROWS).astype(np.float32),
        rng.choice([-1.0, 0.0, 0.7], TILE_ROWS).astype(np.float32),
        rng.integers(0, 20, TILE_ROWS).astype(np.int32),
        rng.random(TILE_ROWS) < 0.7,
    )

    def fn(logits, position, marks, bias, *fields):
        return (penalized(logits, marks, bias, Penalties(*fields), position),)

    position = np.arange(TILE_ROWS, dtype=np.int32)
    return fn, (3 * _normal(20, TILE_ROWS, VOCAB), position, marks, bias, *fields)


OPERATORS = {
    "norms": _norms,
    "gated norms": _gated_norms,
    "rope": _rope,
    "products": _products,
    "large product": _large_product,
    "mlp": _mlp,
    "experts": _experts,
    "ngram": _ngram,
    "sampling": _sampling,
    "penalties": _penalties,
}
# The same in every activation type.
ONE_TYPE = {"ngram", "sampling", "penalties"}
CASES = [
    (name, dtype)
    for name in OPERATORS
    for dtype in ("float32", "bfloat16")
    if dtype == "float32" or name not in ONE_TYPE
]


def _poisoned(a: np.ndarray) -> np.ndarray:
    """The same rows full of NaN, every other one live; integers come from the row before."""
    if a.dtype == bool:
        return np.arange(len(a)) % 2 == 0
    if jnp.issubdtype(a.dtype, jnp.floating):
        return np.full_like(a, np.nan)
    return np.roll(a, 1, axis=0)


def _from_row(a: np.ndarray, row: int) -> np.ndarray:
    """The rows from `row` on poisoned."""
    return np.concatenate([a[:row], _poisoned(a)[row:]])


def _only_row(a: np.ndarray, row: int) -> np.ndarray:
    """All rows poisoned but one."""
    out = _poisoned(a)
    out[row] = a[row]
    return out


def _tiles(make: Callable[[np.ndarray, int], np.ndarray], rows: Rows, count: int) -> Rows:
    """Several tiles, the i-th made by `make(array, i)`."""
    return jax.tree.map(lambda a: np.concatenate([make(a, i) for i in range(count)]), rows)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_row_depends_on_itself_alone(name: str, dtype: str):
    fn, tile = OPERATORS[name](jnp.dtype(dtype))
    program = jax.jit(functools.partial(map_tiles, fn), compiler_options=COMPILER_OPTIONS)

    def run(rows: Rows, num_rows: int) -> Any:
        out = program(jnp.asarray(num_rows, jnp.int32), *jax.tree.map(jnp.asarray, rows))
        return jax.tree.map(np.asarray, out)

    def cut(tree: Any, rows: Any) -> Any:
        return jax.tree.map(lambda a: a[rows], tree)

    three = _tiles(lambda a, i: np.roll(a, -5 * i, axis=0), tile, SMALL // TILE_ROWS)
    full = run(three, SMALL)
    expected = cut(full, slice(TILE_ROWS))

    rotated = run(_tiles(lambda a, i: np.roll(a, i, axis=0), tile, TILE_ROWS), LARGE)
    place = np.arange(TILE_ROWS)
    for shift in range(TILE_ROWS):
        same_bits(cut(rotated, shift * TILE_ROWS + (place + shift) % TILE_ROWS), expected)

    alone = run(_tiles(_only_row, tile, TILE_ROWS), LARGE)
    same_bits(cut(alone, place * (TILE_ROWS + 1)), expected)

    for num_rows in range(1, SMALL + 1):
        rows = jax.tree.map(lambda a, n=num_rows: _from_row(a, n), three)
        same_bits(cut(run(rows, num_rows), slice(num_rows)), cut(full, slice(num_rows)))

    for num_rows in range(1, TILE_ROWS + 1):
        rows = jax.tree.map(lambda a, n=num_rows: _from_row(a, n), tile)
        same_bits(cut(run(rows, num_rows), slice(num_rows)), cut(full, slice(num_rows)))
