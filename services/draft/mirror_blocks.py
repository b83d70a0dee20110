"""The KV blocks of mirrors: taken as steps need them, kept where a correction may go back to, given back at the end. Pure.

A group that keeps all of a sequence holds the blocks of every computed token. A group with a window or chunks holds those from
the first token that the last confirmed one reads: corrections go no further back than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.cache.block_table import BlockTable
from common.cache.grouped_pool import HOLE, GroupedPool


class MirrorBlocks:
    """Block tables of mirrors over `pool`: one table for each cache group, with holes where the group keeps nothing."""

    def __init__(self, pool: GroupedPool) -> None:
        self.pool = pool
        self.block_tokens = pool.block_tokens
        self._late: list[tuple[int, list[BlockTable]]] = []

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
        firsts = self._firsts(start)
        if all(len(table) >= blocks and HOLE not in table[first:blocks] for table, first in zip(tables, firsts, strict=True)):
            return  # as a rule
        lacking = [
            [index for index in range(first, blocks) if index >= len(table) or table[index] == HOLE]
            for table, first in zip(tables, firsts, strict=True)
        ]
        for table, indices, fresh in zip(tables, lacking, self.pool.allocate([len(one) for one in lacking]), strict=True):
            if indices:
                table += [HOLE] * (indices[-1] + 1 - len(table))
            for index, block in zip(indices, fresh, strict=True):
                table[index] = block

    def holds(self, tables: Sequence[BlockTable], position: int) -> bool:
        """Whether everything is there that the token at `position` reads of the tokens before it."""
        end = -(-position // self.block_tokens)
        return all(
            len(table) >= end and HOLE not in table[first:end]
            for table, first in zip(tables, self._firsts(position), strict=True)
        )

    def let_go(self, tables: Sequence[BlockTable], position: int) -> None:
        """Give back the blocks that no token from `position` on reads."""
        for group, table, first in zip(self.pool.groups, tables, self._firsts(position), strict=True):
            end = begin = min(first, len(table))
            while begin and table[begin - 1] != HOLE:
                begin -= 1
            if begin < end:
                group.pool.release(table[begin:end])
                table.let_go(begin, end)

    def release(self, tables: list[BlockTable], after: int = -1) -> None:
        """Give back every block. Harmless twice. after: a step that uses them, and may not have been submitted yet: its rows
        keep the tables, and the blocks are given back when it has run (`ended`)."""
        if after < 0:
            self.pool.release([list(table) for table in tables])
            for table in tables:
                table.clear()
        elif any(tables):
            self._late.append((after, list(tables)))
            tables[:] = self.new_tables()

    def ended(self, step: int) -> None:
        """A step has run, and all before it."""
        over = [tables for after, tables in self._late if after <= step]
        self._late = [(after, tables) for after, tables in self._late if after > step]
        for tables in over:
            self.release(tables)

    @property
    def late(self) -> list[list[BlockTable]]:
        """Tables whose blocks are given back when a step has run."""
        return [tables for _, tables in self._late]

    def _firsts(self, position: int) -> list[int]:
        """Return, for each group, the index of the first block that the token at `position` reads."""
        return [group.retention.first_token(position) // self.block_tokens for group in self.pool.groups]
