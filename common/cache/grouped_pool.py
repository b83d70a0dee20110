"""The block pools of a model's cache groups. Pure; knows block ids, never bytes.

A group's blocks have a size of their own, so each group has a pool of its own, with its own ids. A sequence has a block table
for each group. Index i of every table is the block of the same tokens; -1 is a hole: the group has let go of that block, or has
never needed it. The invariant of a pool holds for each group by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.cache.pool import ArrivedBlock as ArrivedBlock  # who fills block tables takes all from here
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL, Retention
from common.protocol.errors import OutOfBlocks
from common.protocol.messages import KvUsage

HOLE = -1

Tables = Sequence[Sequence[int]]
"""A block table for each group; holes are skipped."""


Arrived = Sequence[dict[int, ArrivedBlock]]
"""Of each group: blocks by their index in the block table."""


class PoolGroup(NamedTuple):
    pool: BlockPool
    retention: Retention = KEEP_ALL


class GroupedPool:
    """One pool for each of `groups`, in the order of the layout. All have blocks of as many tokens."""

    def __init__(self, *groups: PoolGroup) -> None:
        assert groups and len({group.pool.block_tokens for group in groups}) == 1
        self.groups = groups
        self.block_tokens = groups[0].pool.block_tokens
        self.keeps_content = all(group.pool.keeps_content for group in groups)

    @property
    def available(self) -> int:
        """Blocks that every group could hand out now."""
        return min(group.pool.available for group in self.groups)

    def usage(self) -> KvUsage:
        """Return the blocks of all groups together; where there are several groups, also those of each."""
        usages = [group.pool.usage() for group in self.groups]
        if len(usages) == 1:
            return usages[0]
        total, free, owned, leased, cached = (
            sum(getattr(usage, state) for usage in usages) for state in ("total", "free", "owned", "leased", "cached")
        )
        return KvUsage(total=total, free=free, owned=owned, leased=leased, cached=cached, groups=usages)

    def allocate(self, counts: Sequence[int]) -> list[list[int]]:
        """Allocate `counts[i]` blocks of group i; see `BlockPool.allocate`.

        :raises OutOfBlocks: a group has too few; nothing has been taken then.
        """
        for group, count in zip(self.groups, counts, strict=True):
            if count > group.pool.available:
                raise OutOfBlocks(needed=count, free=group.pool.available)
        return [group.pool.allocate(count) if count else [] for group, count in zip(self.groups, counts, strict=True)]

    def retain(self, tables: Tables) -> None:
        self._each(BlockPool.retain, tables)

    def release(self, tables: Tables) -> None:
        self._each(BlockPool.release, tables)

    def lease(self, tables: Tables) -> None:
        self._each(BlockPool.lease, tables)

    def end_lease(self, tables: Tables) -> None:
        self._each(BlockPool.end_lease, tables)

    def match(self, hashes: Sequence[bytes], own: Tables = (), num_own: int = 0) -> list[list[int]]:
        """Return tables of the longest leading part of the chain `hashes` after which a sequence can go on.

        Every group must have all that the token behind that part reads. A group's table holds those blocks, and holes before
        them. `own`: tables whose first `num_own` blocks the sequence has already, and which the pools need not find. Nothing
        is retained: do that at once. All tables are empty where nothing is found behind `num_own`.
        """
        end = len(hashes)
        chains: list[list[int]] = []
        for index, (pool, retention) in enumerate(self.groups):
            chains.append([*own[index][:num_own]] if num_own else [])
            if retention.keeps_all:
                chains[-1] += pool.match(hashes[num_own:end])
                end = len(chains[-1])
        before = -1
        while before != end and end > num_own:
            before = end
            for (pool, retention), chain in zip(self.groups, chains, strict=True):
                if not retention.keeps_all:
                    end = self._usable(pool, retention, hashes, chain, end)
        if end <= num_own:
            return [[] for _ in self.groups]
        for (pool, retention), chain in zip(self.groups, chains, strict=True):
            if not retention.keeps_all:
                first = self._first_block(retention, end)
                chain[:first] = [HOLE] * min(first, num_own)
                chain += [pool.find(hashes[i]) if i >= first else HOLE for i in range(num_own, end)]
        return [chain[:end] for chain in chains]

    def check(self) -> None:
        """:raises AssertionError: see `BlockPool.check`."""
        for group in self.groups:
            group.pool.check()

    def _each(self, act: Callable[[BlockPool, Sequence[int]], None], tables: Tables) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            act(group.pool, table if group.retention.keeps_all else [block for block in table if block != HOLE])

    def _first_block(self, retention: Retention, num_blocks: int) -> int:
        return retention.first_token(num_blocks * self.block_tokens) // self.block_tokens

    def _usable(self, pool: BlockPool, retention: Retention, hashes: Sequence[bytes], own: Sequence[int], end: int) -> int:
        """Return the largest number of blocks, at most `end`, after which the group has what the next token reads."""
        while end > len(own):
            first, i = self._first_block(retention, end), end - 1
            while i >= first and (own[i] if i < len(own) else pool.find(hashes[i])) != HOLE:
                i -= 1
            if i < first:
                return end
            end = i  # whatever reads up to a later block reads this one, too
        return end
