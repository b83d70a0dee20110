"""The paged KV pool's bookkeeping: which block is whose. Pure; knows block ids, never bytes.

A block is in exactly one state, so `free + owned + leased + cached == total` always:

    owned    at least one sequence uses it (owner references > 0), leased or not
    leased   no sequence uses it, but a reader holds a lease on it
    cached   nobody holds it and it has a content hash: a later prompt may find it, and it is evicted in LRU order;
             or it was set aside: whoever did so may take it back, until it is evicted, behind all that have a hash
    free     none of these

Every block that `allocate` hands out has a new generation before the caller may write to it, and `fence` keeps others from
seeing it otherwise. A reader compares generations after its copy, so a copy of a block that was reused meanwhile is always
noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from typing import NamedTuple

import numpy as np

from common.cache.contents import PoolContents
from common.protocol.errors import OutOfBlocks
from common.protocol.messages import KvUsage


class ArrivedBlock(NamedTuple):
    """A block that KV was copied into, or is being copied into, for a sequence that is not here yet.

    is_owned: a copy writes it; else it was set aside with this generation.
    """

    block: int
    generation: int
    is_owned: bool


class BlockPool:
    """Reference counts, content addresses and generations of `num_blocks` blocks of `block_tokens` tokens each.

    `generations` is where readers look (a shared-memory segment's array, uint64); the pool writes each change through.
    `fence` orders what this thread writes before it and after it (see `common/transfer/fence.py`).
    `wipe`: clear a block's content, called as soon as nobody holds it; then nothing is ever cached, or found by its content.
    Taking and giving back are O(1) per block. Free blocks are reused last-in first-out, so that few pages are ever touched.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        generations: MutableSequence[int] | np.ndarray | None = None,
        fence: Callable[[], None] = lambda: None,
        *,
        wipe: Callable[[int], None] | None = None,
    ) -> None:
        assert num_blocks > 0 and block_tokens > 0
        assert generations is None or len(generations) == num_blocks
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._shared = generations
        self._fence = fence
        self._wipe = wipe
        self._generations = [0] * num_blocks if generations is None else [int(value) for value in generations]
        self._owners = [0] * num_blocks
        self._leases = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._aside: OrderedDict[int, None] = OrderedDict()  # in the order of `set_aside`
        self._num_owned = 0
        self._num_leased = 0
        self.contents: PoolContents | None = None
        """Who is told of blocks that can be found by content, if anybody is."""

    @property
    def keeps_content(self) -> bool:
        """Whether a block may be found by its content."""
        return self._wipe is None

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now: free and cached ones, also those that were set aside."""
        return len(self._free) + len(self._cached) + len(self._aside)

    @property
    def num_aside(self) -> int:
        """Blocks that were set aside."""
        return len(self._aside)

    def usage(self) -> KvUsage:
        return KvUsage(
            total=self.num_blocks,
            free=len(self._free),
            owned=self._num_owned,
            leased=self._num_leased,
            cached=len(self._cached) + len(self._aside),
        )

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner reference each, no hash and a new generation. Evicts cached blocks when it must.

        :raises OutOfBlocks: and takes nothing, when fewer than `count` are available.
        """
        if count > self.available:
            raise OutOfBlocks(needed=count, free=self.available)
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict_oldest()
            self._raise_generation(block)
            self._owners[block] = 1
            blocks.append(block)
        self._num_owned += count
        self._fence()  # the new generations come before anything that is written to the blocks
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more owner reference each. The blocks must not be free: take them from `match` or from their owner."""
        for block in blocks:
            if not self._owners[block]:
                self._leave_unowned(block)
                self._num_owned += 1
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner reference less each. Without owner and lease, a hashed block becomes cached, another one free.

        A chain is given back from its tail, so that eviction shortens chains instead of cutting their heads off.
        """
        for block in reversed(blocks):
            assert self._owners[block] > 0, f"block {block} released more often than taken"
            self._owners[block] -= 1
            if not self._owners[block]:
                self._num_owned -= 1
                self._enter_unowned(block)

    def set_aside(self, blocks: Iterable[int]) -> None:
        """Give up the only owner reference of blocks that nobody finds: they keep their content until others need them."""
        for block in blocks:
            assert self._owners[block] == 1 and not self._leases[block], f"block {block} is set aside by one of several"
            assert self._hashes[block] is None, f"block {block} has a hash, and can be found by it"
            self._owners[block] = 0
            self._num_owned -= 1
            self._aside[block] = None

    def take_back(self, block: int, generation: int) -> bool:
        """Own a block again that was set aside with this generation. False: it was given to others meanwhile."""
        if block not in self._aside or self._generations[block] != generation:
            return False
        del self._aside[block]
        self._owners[block] = 1
        self._num_owned += 1
        return True

    def take_back_all(self, arrived: Mapping[int, ArrivedBlock], begin: int, end: int) -> dict[int, int]:
        """Return those of the blocks at indices [begin, end) that are owned from now on: each one that `take_back` gives back,
        and those that were owned before."""
        aside, generations, owners, blocks = self._aside, self._generations, self._owners, dict[int, int]()
        for index, (block, generation, is_owned) in arrived.items():  # a thousand of them before a first token
            if not begin <= index < end:
                continue
            if not is_owned:
                if block not in aside or generations[block] != generation:
                    continue
                del aside[block]
                owners[block] = 1
                self._num_owned += 1
            blocks[index] = block
        return blocks

    def lease(self, blocks: Iterable[int]) -> None:
        """One more lease each: the blocks keep their content until `end_lease`, whatever their owners do."""
        for block in blocks:
            if not self._owners[block] and not self._leases[block]:
                self._leave_unowned(block)
                self._num_leased += 1
            self._leases[block] += 1

    def end_lease(self, blocks: Sequence[int]) -> None:
        """One lease less each."""
        for block in reversed(blocks):
            assert self._leases[block] > 0, f"the lease of block {block} ended more often than it was taken"
            self._leases[block] -= 1
            if not self._leases[block] and not self._owners[block]:
                self._num_leased -= 1
                self._enter_unowned(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Give a full block its content address. Where another block has it already, that one stays the one found. Nothing
        is published where blocks are wiped."""
        self.publish_all([(block, block_hash)])

    def publish_all(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """`publish` each of these blocks with its hash."""
        owners, leases, hashes, by_hash = self._owners, self._leases, self._hashes, self._by_hash
        found: list[tuple[int, bytes]] = []
        for block, block_hash in blocks:
            assert owners[block] or leases[block], f"block {block} published by nobody"
            held = hashes[block]
            if held is not None:
                assert held == block_hash, f"block {block} published with two contents"
            elif self._wipe is None and block_hash not in by_hash:
                by_hash[block_hash] = block
                hashes[block] = block_hash
                found.append((block, block_hash))
        if found and self.contents is not None:
            self.contents.stored(found)

    def find(self, block_hash: bytes) -> int:
        """Return the block of a hash, or -1. Not retained: do that at once."""
        return self._by_hash.get(block_hash, -1)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest leading part of the chain `hashes` that is held. Not retained: do that at once."""
        blocks = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def generations_of(self, blocks: Iterable[int]) -> list[int]:
        return [self._generations[block] for block in blocks]

    def drop_cached(self) -> None:
        """Forget everything that nobody holds."""
        while self._cached or self._aside:
            self._free.append(self._evict_oldest())

    def check(self) -> None:
        """Count everything again.

        :raises AssertionError: where a counter, an index or a generation is not what the blocks say.
        """
        free, cached, aside = set(self._free), set(self._cached), set(self._aside)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free | cached | aside) == len(free) + len(cached) + len(aside), "a block is in two of these"
        owned = leased = 0
        for block in range(self.num_blocks):
            owners, leases, block_hash = self._owners[block], self._leases[block], self._hashes[block]
            assert owners >= 0 and leases >= 0, f"block {block} has negative references"
            held = bool(owners or leases)
            owned += bool(owners)
            leased += bool(leases and not owners)
            unheld = block in free or block in cached or block in aside
            assert held != unheld, f"block {block} is in no state, or in two"
            assert (block in cached) == (not held and block_hash is not None), f"block {block} is cached without content"
            assert block not in aside or block_hash is None, f"block {block} is set aside and can be found"
            assert block_hash is None or self._by_hash.get(block_hash) == block, f"block {block} is not found by its hash"
            if self._shared is not None:
                assert int(self._shared[block]) == self._generations[block], f"readers see an old generation of block {block}"
        assert len(self._by_hash) == sum(block_hash is not None for block_hash in self._hashes), "a hash names no block"
        assert (owned, leased) == (self._num_owned, self._num_leased), "the counters are wrong"
        assert len(free) + owned + leased + len(cached) + len(aside) == self.num_blocks, "blocks leaked"

    def _leave_unowned(self, block: int) -> None:
        """`block` has no owner and gets one, or has neither owner nor lease and gets a lease."""
        if self._leases[block]:
            self._num_leased -= 1
            return
        assert self._hashes[block] is not None, f"block {block} is free and can't be held without allocating it"
        del self._cached[block]

    def _enter_unowned(self, block: int) -> None:
        """`block` has just lost its last owner, or its last lease while it had no owner."""
        if self._leases[block]:
            self._num_leased += 1
        elif self._hashes[block] is not None:
            self._cached[block] = None
        else:
            self._clear(block)
            self._free.append(block)

    def _clear(self, block: int) -> None:
        """Nobody will read `block` again."""
        if self._wipe is not None:
            self._raise_generation(block)  # whoever still reads it must not take what is left for KV
            self._fence()
            self._wipe(block)

    def _raise_generation(self, block: int) -> None:
        self._generations[block] += 1
        if self._shared is not None:
            self._shared[block] = self._generations[block]

    def _evict_oldest(self) -> int:
        if not self._cached:
            block, _ = self._aside.popitem(last=False)
            self._clear(block)
            return block
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hashes[block] = None
        if self.contents is not None:
            self.contents.removed(block)
        return block
