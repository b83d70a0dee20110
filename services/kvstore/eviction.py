"""Which block goes first when the store is full: that of the least worth, which is by recency, frequency and cost. Pure.

    worth at a use = level + (1 + hits) · cost          level: the worth of what was given up last

This is GreedyDual-Size with frequency (Cherkasova 1998): the level rises with each block that is given up, so what is not used
again loses its lead, at equal cost after as many turnovers of the store as it had hits. The cost of a model's blocks is the
time that computing a byte of them again takes, over the mean of all models in the store.

A block without its predecessors can never be found, since lookups follow a chain from its head. So only leaves are evicted:
a chain loses its tail first, and a prefix that many chains share goes last. Stores of several models share a clock, which
says whose candidate is worth less.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Set
from typing import NamedTuple

import msgspec

from services.kvstore.owners import Owners

MAX_HITS = 255
_MOST_HITS = 7
"""More hits do not count: a prefix that is out of use would stay for days."""
_MOST_DOUBLINGS = 2
"""A model's cost counts in powers of two, from a quarter of the mean to four times as much. Speeds are measured, and blocks of
equal worth go by recency: a cost that wavers would break that."""
_HYSTERESIS = 0.75
"""Doublings by which a cost must have changed before it counts."""


class Rank(NamedTuple):
    """Orders candidates: the least goes. `number`: of the use that gave it its worth."""

    worth: float
    number: int


_Heap = list[tuple[float, int, bytes]]
"""Worth, number and hash of candidates."""


class EvictionClock:
    """What orders of several models share."""

    def __init__(self) -> None:
        self.level = 0.0
        self.numbers = itertools.count()
        self.orders: list[LeafOrder] = []

    def weigh(self) -> None:
        """A cost has changed."""
        known = [order for order in self.orders if order.seconds_per_byte > 0]
        mean = math.fsum(math.log2(order.seconds_per_byte) for order in known) / max(len(known), 1)
        for order in known:
            doublings = math.log2(order.seconds_per_byte) - mean
            if abs(doublings - math.log2(order.cost)) > _HYSTERESIS:
                order.cost = 2.0 ** min(max(round(doublings), -_MOST_DOUBLINGS), _MOST_DOUBLINGS)


class _Block(msgspec.Struct, gc=False):
    parent: bytes
    owner: bytes
    hits: int
    worth: float = 0.0
    number: int = 0


class LeafOrder:
    """Blocks of one size by hash, each with the hash of its predecessor and its owner. O(log n) per call, amortised; `pop` and
    `first` look at each owner besides. `block_bytes`: what a block takes of its owner's share."""

    def __init__(self, clock: EvictionClock | None = None, owners: Owners[bytes] | None = None, block_bytes: int = 1) -> None:
        self.seconds_per_byte = 0.0
        self.cost = 1.0
        self._blocks: dict[bytes, _Block] = {}
        self._children: dict[bytes, int] = {}  # counted for absent parents, too: they may come back
        self._held: dict[bytes, int] = {}
        self._heaps: dict[bytes, _Heap] = {}  # candidates of each owner; entries that no longer hold are skipped
        self._clock = clock or EvictionClock()
        self._owners = owners
        self.block_bytes = block_bytes
        self.num_by_owner: dict[bytes, int] = {}
        """Blocks of each owner that has some."""
        self._clock.orders.append(self)

    def __len__(self) -> int:
        return len(self._blocks)

    def measured(self, seconds: float) -> None:
        """Computing a block again takes so long; 0: it is not known."""
        if seconds > 0 and seconds / self.block_bytes != self.seconds_per_byte:
            self.seconds_per_byte = seconds / self.block_bytes
            self._clock.weigh()

    def close(self) -> None:
        """Everything is gone."""
        for block_hash in list(self._blocks):
            self.remove(block_hash)
        self._clock.orders.remove(self)
        self._clock.weigh()

    def add(
        self,
        block_hash: bytes,
        parent: bytes,
        owner: bytes = b"",
        *,
        hits: int = 0,
        worth: float | None = None,
        held: bool = False,
    ) -> None:
        """A new block after `parent` (empty: the first of a chain, or unknown). hits, worth: of a run before. held: whether
        `hold` applies to it from the beginning."""
        assert block_hash not in self._blocks
        if held:
            self.hold(block_hash)
        block = self._blocks[block_hash] = _Block(parent, owner, hits)
        self._children[parent] = self._children.get(parent, 0) + 1
        self.num_by_owner[owner] = self.num_by_owner.get(owner, 0) + 1
        if self._owners is not None:
            self._owners.take(owner, self.block_bytes)
        if worth is None:
            self.touch(block_hash)
        else:
            block.worth, block.number = worth, next(self._clock.numbers)
            self._offer(block_hash)

    def remove(self, block_hash: bytes) -> None:
        """Forget a block, held or not."""
        block = self._blocks.pop(block_hash)
        self._held.pop(block_hash, None)
        self.num_by_owner[block.owner] -= 1
        if not self.num_by_owner[block.owner]:
            del self.num_by_owner[block.owner]
        if self._owners is not None:
            self._owners.give(block.owner, self.block_bytes)
        self._children[block.parent] -= 1
        if not self._children[block.parent]:
            del self._children[block.parent]
            self._offer(block.parent)

    def use(self, block_hashes: Iterable[bytes]) -> None:
        """A request found these blocks; the last of them is the one used last."""
        owners = {self._update_worth(block_hash, hits=1).owner for block_hash in block_hashes}
        if self._owners is not None:
            for owner in owners:
                self._owners.use(owner)

    def touch(self, block_hash: bytes) -> None:
        """The block is now the one used last."""
        block = self._update_worth(block_hash, hits=0)
        if self._owners is not None:
            self._owners.use(block.owner)

    def _update_worth(self, block_hash: bytes, hits: int) -> _Block:
        """Compute a block's worth anew, as the one used last; return the block."""
        block = self._blocks[block_hash]
        block.hits = min(block.hits + hits, MAX_HITS)
        block.worth = self._clock.level + (1 + min(block.hits, _MOST_HITS)) * self.cost
        block.number = next(self._clock.numbers)
        self._offer(block_hash)
        return block

    def hold(self, block_hash: bytes) -> None:
        """Not to be evicted until as many `let_go`."""
        self._held[block_hash] = self._held.get(block_hash, 0) + 1

    def let_go(self, block_hash: bytes) -> None:
        self._held[block_hash] -= 1
        if not self._held[block_hash]:
            del self._held[block_hash]
            self._offer(block_hash)

    def pop(self, owners: Set[bytes] | None = None) -> bytes | None:
        """Remove and return the block to evict of these owners; None: of all. None: everything is held, or has descendants
        that are."""
        heap = self._heap_of(owners)
        if heap is None:
            return None
        worth, _, block_hash = heapq.heappop(heap)
        self._clock.level = max(self._clock.level, worth)
        self.remove(block_hash)
        return block_hash

    def first(self, owners: Set[bytes] | None = None) -> Rank | None:
        """Return the rank of the block that `pop` would remove. None: there is none."""
        heap = self._heap_of(owners)
        return None if heap is None else Rank(heap[0][0], heap[0][1])

    def rank_of(self, block_hash: bytes) -> Rank:
        """Return the block's rank, whether or not it may be evicted now."""
        block = self._blocks[block_hash]
        return Rank(block.worth, block.number)

    def hits_of(self, block_hash: bytes) -> int:
        """Return how often the block was found."""
        return self._blocks[block_hash].hits

    def owner_of(self, block_hash: bytes) -> bytes:
        """Return the owner that the block was added with."""
        return self._blocks[block_hash].owner

    def parent_of(self, block_hash: bytes) -> bytes:
        """Return the predecessor's hash that the block was added with."""
        return self._blocks[block_hash].parent

    def _heap_of(self, owners: Set[bytes] | None) -> _Heap | None:
        """Return the heap that begins with the candidate of least rank."""
        best: _Heap | None = None
        for owner in list(self._heaps) if owners is None else owners:
            heap = self._heaps.get(owner)
            if heap is None:
                continue
            while heap and not self._holds(heap[0]):
                heapq.heappop(heap)
            if not heap:
                del self._heaps[owner]
            elif best is None or heap[0] < best[0]:
                best = heap
        return best

    def _holds(self, entry: tuple[float, int, bytes]) -> bool:
        block = self._blocks.get(entry[2])
        return block is not None and block.number == entry[1] and self._is_candidate(entry[2])

    def _is_candidate(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks and block_hash not in self._held and block_hash not in self._children

    def _offer(self, block_hash: bytes) -> None:
        if not self._is_candidate(block_hash):
            return
        block = self._blocks[block_hash]
        heap = self._heaps.get(block.owner)
        if heap is None:
            heap = self._heaps[block.owner] = []
        heapq.heappush(heap, (block.worth, block.number, block_hash))
        if len(heap) > 64 + 4 * len(self._blocks):
            own = ((key, known) for key, known in self._blocks.items() if known.owner == block.owner)
            heap[:] = [(known.worth, known.number, key) for key, known in own if self._is_candidate(key)]
            heapq.heapify(heap)
