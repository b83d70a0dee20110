"""Which block goes first when the store is full: the one used least recently among those that nothing builds on. Pure.

A block without its predecessors can never be found, since lookups follow a chain from its head. So only leaves are evicted:
a chain loses its tail first, and a prefix that many chains share goes last. Stores of several models share a clock, which
says whose candidate was used less recently.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator


class LeafLru:
    """Blocks by hash, each with the hash of its predecessor. `clock` gives each use a number. O(log n) per call, amortised."""

    def __init__(self, clock: Iterator[int] | None = None) -> None:
        self._parent: dict[bytes, bytes] = {}
        self._children: dict[bytes, int] = {}  # counted for absent parents, too: they may come back
        self._held: dict[bytes, int] = {}
        self._used_at: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []  # candidates; entries that no longer hold are skipped
        self._clock = itertools.count() if clock is None else clock

    def __len__(self) -> int:
        return len(self._used_at)

    def add(self, block_hash: bytes, parent: bytes) -> None:
        """A new block after `parent` (empty: the first of a chain, or unknown)."""
        assert block_hash not in self._used_at
        self._parent[block_hash] = parent
        self._children[parent] = self._children.get(parent, 0) + 1
        self.use(block_hash)

    def remove(self, block_hash: bytes) -> None:
        """Forget a block, held or not."""
        del self._used_at[block_hash]
        self._held.pop(block_hash, None)
        parent = self._parent.pop(block_hash)
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self._offer(parent)

    def use(self, block_hash: bytes) -> None:
        """The block is now the one used last."""
        self._used_at[block_hash] = next(self._clock)
        self._offer(block_hash)

    def hold(self, block_hash: bytes) -> None:
        """Not to be evicted until as many `let_go`."""
        self._held[block_hash] = self._held.get(block_hash, 0) + 1

    def let_go(self, block_hash: bytes) -> None:
        self._held[block_hash] -= 1
        if not self._held[block_hash]:
            del self._held[block_hash]
            self._offer(block_hash)

    def pop(self) -> bytes | None:
        """Remove and return the block to evict. None: everything is held, or has descendants that are."""
        block_hash = self.candidate()
        if block_hash is not None:
            heapq.heappop(self._heap)
            self.remove(block_hash)
        return block_hash

    def candidate(self) -> bytes | None:
        """Return the block that `pop` would remove."""
        return None if self.oldest() is None else self._heap[0][1]

    def used_at(self, block_hash: bytes) -> int:
        """Return the clock's number of the block's last use."""
        return self._used_at[block_hash]

    def parent_of(self, block_hash: bytes) -> bytes:
        """Return the predecessor's hash that the block was added with."""
        return self._parent[block_hash]

    def oldest(self) -> int | None:
        """When the block that `pop` would return was used last, by the clock. None: it would return none."""
        while self._heap:
            used_at, block_hash = self._heap[0]
            if self._used_at.get(block_hash) == used_at and self._is_candidate(block_hash):
                return used_at
            heapq.heappop(self._heap)
        return None

    def _is_candidate(self, block_hash: bytes) -> bool:
        return block_hash in self._used_at and block_hash not in self._held and block_hash not in self._children

    def _offer(self, block_hash: bytes) -> None:
        if not self._is_candidate(block_hash):
            return
        heapq.heappush(self._heap, (self._used_at[block_hash], block_hash))
        if len(self._heap) > 64 + 4 * len(self._used_at):
            self._heap = [(used_at, known) for known, used_at in self._used_at.items() if self._is_candidate(known)]
            heapq.heapify(self._heap)
