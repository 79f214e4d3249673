"""Free lists: named cases, and random operations beside a set of the free ids."""

import pytest

from cache import FreeList


def test_gives_the_lowest_free_ids_first():
    pool = FreeList(3, 5)
    assert pool.take(2) == [3, 4]
    assert pool.take(3) == [5, 6, 7]
    pool.give([6, 4])
    assert pool.take(1) == [4]
    assert (pool.num_free, pool.num_taken) == (1, 4)


def test_takes_all_or_nothing():
    pool = FreeList(0, 2)
    with pytest.raises(ValueError, match="3 ids wanted, 2 free"):
        pool.take(3)
    assert (pool.num_free, pool.num_taken) == (2, 0)
    assert pool.take(0) == []


@pytest.mark.parametrize("ids", [[2], [0, 0], [0, 7], [-1]])
def test_refuses_ids_it_did_not_give(ids):
    pool = FreeList(0, 4)
    pool.take(2)
    with pytest.raises(ValueError, match="not taken from this pool"):
        pool.give(ids)
    assert (pool.num_free, pool.num_taken) == (2, 2)
    pool.check()


def test_refuses_to_take_an_id_back_twice():
    pool = FreeList(0, 4)
    ids = pool.take(2)
    pool.give(ids)
    with pytest.raises(ValueError, match="not taken from this pool"):
        pool.give(ids)


def test_an_empty_pool_and_one_of_negative_size():
    pool = FreeList(0, 0)
    pool.check()
    with pytest.raises(ValueError, match="1 ids wanted, 0 free"):
        pool.take(1)
    with pytest.raises(ValueError, match="a pool cannot hold -1 ids"):
        FreeList(0, -1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._taken.add(pool._free[0]), "free and taken"),
        (lambda pool: pool._free.pop(), "lost"),
        (lambda pool: pool._taken.pop(), "lost"),
    ],
)
def test_check_finds_what_is_wrong(spoil, message):
    pool = FreeList(0, 4)
    pool.take(2)
    spoil(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_random_operations_beside_a_set(rng):
    first, count = 5, 23
    pool, free = FreeList(first, count), set(range(first, first + count))
    held: list[int] = []
    for _ in range(2000):
        if rng.random() < 0.5:
            wanted = int(rng.integers(0, 8))
            if wanted > len(free):
                with pytest.raises(ValueError, match="ids wanted"):
                    pool.take(wanted)
            else:
                expected = sorted(free)[:wanted]
                assert pool.take(wanted) == expected
                free -= set(expected)
                held += expected
        else:
            rng.shuffle(held)
            cut = int(rng.integers(0, len(held) + 1))
            back, held = held[:cut], held[cut:]
            pool.give(back)
            free |= set(back)
        pool.check()
        assert (pool.num_free, pool.num_taken) == (len(free), count - len(free))
