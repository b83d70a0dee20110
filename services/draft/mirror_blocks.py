"""The KV blocks of mirrors: taken as steps need them, kept where a correction may go back to, given back at the end. Pure.

A group that keeps all of a sequence holds the blocks of every computed token. A group with a window or chunks holds those from
the first token that the last confirmed one reads: corrections go no further back than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.cache.block_table import BlockTable
from common.cache.grouped_pool import HOLE, GroupedPool, PoolGroup


class MirrorBlocks:
    """Block tables of mirrors over `pool`: one table for each cache group, with holes where the group keeps nothing.

    Contexts are long and steps are short: what is done for each step looks at no more of a table than the step changes, where
    a group keeps all.
    """

    def __init__(self, pool: GroupedPool) -> None:
        self.pool = pool
        self.block_tokens = pool.block_tokens
        self._keeps_all = all(group.retention.keeps_all for group in pool.groups)
        self._late: list[tuple[int, list[BlockTable], int]] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest mirror that the pools hold."""
        return min(group.retention.longest(group.pool.num_blocks, self.block_tokens) for group in self.pool.groups)

    def new_tables(self) -> list[BlockTable]:
        return [BlockTable() for _ in self.pool.groups]

    def cover(self, tables: Sequence[BlockTable], start: int, end: int) -> None:
        """Give a mirror the blocks that a step reads and writes which computes its tokens [start, end).

        :raises OutOfBlocks: nothing has been taken then.
        """
        blocks = -(-end // self.block_tokens)
        if self._keeps_all and len(tables[0]) >= blocks:  # as a rule; then all groups' tables are as long
            return
        lacking = [self._lacking(group, table, start, blocks) for group, table in zip(self.pool.groups, tables, strict=True)]
        if not any(lacking):
            return
        for table, indices, fresh in zip(tables, lacking, self.pool.allocate(list(map(len, lacking))), strict=True):
            if indices:
                table += [HOLE] * (indices[-1] + 1 - len(table))
            for index, block in zip(indices, fresh, strict=True):
                table[index] = block

    def holds(self, tables: Sequence[BlockTable], position: int) -> bool:
        """Whether everything is there that the token at `position` reads of the tokens before it."""
        blocks = -(-position // self.block_tokens)
        groups = zip(self.pool.groups, tables, strict=True)
        return not any(self._lacking(group, table, position, blocks) for group, table in groups)

    def let_go(self, tables: Sequence[BlockTable], position: int) -> None:
        """Give back the blocks that no token from `position` on reads."""
        for group, table in zip(self.pool.groups, tables, strict=True):
            end = begin = min(group.retention.first_token(position) // self.block_tokens, len(table))
            while begin and table[begin - 1] != HOLE:
                begin -= 1
            if begin < end:
                group.pool.release(table[begin:end])
                table.let_go(begin, end)

    def borrow(self, tables: Sequence[BlockTable], position: int) -> list[BlockTable]:
        """Return tables with the full blocks before `position`, which stay those of `tables`."""
        return [BlockTable(table[: position // self.block_tokens]) for table in tables]

    def take_over(self, tables: Sequence[BlockTable], borrowed: Sequence[BlockTable], position: int) -> None:
        """From now on `borrowed` owns what it has borrowed of `tables`, of which only what is behind that is to be released."""
        end = position // self.block_tokens
        for group, table, own in zip(self.pool.groups, tables, borrowed, strict=True):
            if not group.retention.keeps_all:  # what was let go since then
                own.let_go(0, next((index for index in range(end) if table[index] != HOLE), end))

    def release(self, tables: list[BlockTable], after: int = -1, *, behind: int = 0) -> None:
        """Give back every block but the full ones of the first `behind` tokens, which are another table's. Harmless twice.
        after: a step that uses them, and may not have been submitted yet: its rows keep the tables, and the blocks are given
        back when it has run (`ended`)."""
        if after < 0:
            self.pool.release(self.behind(tables, behind))
            for table in tables:
                table.clear()
        elif any(tables):
            self._late.append((after, list(tables), behind))
            tables[:] = self.new_tables()

    def behind(self, tables: Sequence[BlockTable], position: int) -> list[list[int]]:
        """Return all blocks but the full ones before `position`."""
        return [table[position // self.block_tokens :] for table in tables]

    def ended(self, step: int) -> None:
        """A step has run, and all before it."""
        over = [late for late in self._late if late[0] <= step]
        self._late = [late for late in self._late if late[0] > step]
        for _, tables, behind in over:
            self.release(tables, behind=behind)

    @property
    def late(self) -> list[list[list[int]]]:
        """Blocks by group that are given back when a step has run."""
        return [self.behind(tables, behind) for _, tables, behind in self._late]

    def _lacking(self, group: PoolGroup, table: BlockTable, start: int, blocks: int) -> Sequence[int]:
        """Return the places among a table's first `blocks` in which a step lacks a block that computes tokens from `start`."""
        if group.retention.keeps_all:
            return range(len(table), blocks)
        first = group.retention.first_token(start) // self.block_tokens
        if len(table) >= blocks and HOLE not in table[first:blocks]:
            return ()
        return [index for index in range(first, blocks) if index >= len(table) or table[index] == HOLE]
