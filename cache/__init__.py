"""Host-side bookkeeping of blocks and state slots."""

from cache.pools import FreeList as FreeList
