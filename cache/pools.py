"""Free lists of numbered things: blocks of keys and values, slots of sealed states."""


class FreeList:
    """Hands out ids; the caller owns an id from `take` until `give`.

    Ids are given out lowest first, so that a run can be repeated.
    """

    def __init__(self, first: int, count: int):
        """Own the ids `first ... first + count - 1`, all free.

        Raises:
          ValueError: a negative count.
        """
        if count < 0:
            raise ValueError(f"a pool cannot hold {count} ids")
        self._ids = range(first, first + count)
        self._free = list(reversed(self._ids))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Ids that `take` can still give."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Ids that somebody owns."""
        return len(self._taken)

    def take(self, count: int) -> list[int]:
        """Take ids.

        Raises:
          ValueError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise ValueError(f"{count} ids wanted, {len(self._free)} free")
        ids = [self._free.pop() for _ in range(count)]
        self._taken.update(ids)
        return ids

    def give(self, ids: list[int]) -> None:
        """Give ids back.

        Raises:
          ValueError: an id that is not taken, twice in the list included; nothing is given back.
        """
        if len(set(ids)) != len(ids) or not self._taken.issuperset(ids):
            raise ValueError(f"not taken from this pool: {sorted(ids)}")
        self._taken.difference_update(ids)
        self._free.extend(ids)
        self._free.sort(reverse=True)

    def check(self) -> None:
        """Raise AssertionError unless every id is either free or taken, once."""
        assert len(self._free) == len(set(self._free)), "an id is free twice"
        assert set(self._free).isdisjoint(self._taken), "an id is free and taken"
        assert set(self._free) | self._taken == set(self._ids), "an id is lost"
