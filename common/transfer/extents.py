"""Which stretches of a staging buffer are free. Pure; knows offsets, never bytes.

    take(blocks, block_bytes) ─► extents, in the order of the blocks ─► give_back
          └ there is no room for all of them: nothing is taken

Blocks of several sizes share the buffer. A block lies in one stretch; those of one request may lie in several.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

ALIGNMENT = 64
"""Extents begin at multiples of a cache line."""


class Extent(NamedTuple):
    """`num_blocks` blocks, one behind the other, from byte `offset` on; `num_bytes` are taken for them."""

    offset: int
    num_blocks: int
    num_bytes: int


class Extents:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes > 0 else []
        """(offset, bytes), by offset; no two of them touch."""

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, num_blocks: int, block_bytes: int) -> list[Extent] | None:
        """Return room for so many blocks, or None, with nothing taken, if there is not enough."""
        if num_blocks <= 0 or block_bytes <= 0:
            return None
        found: list[Extent] = []
        left = num_blocks
        for offset, size in self._free:
            fitting = min(left, size // block_bytes)
            if fitting:
                found.append(Extent(offset, fitting, min(size, -(-fitting * block_bytes // ALIGNMENT) * ALIGNMENT)))
                left -= fitting
            if not left:
                break
        if left:
            return None
        for extent in found:
            self._cut(extent)
        return found

    def give_back(self, extents: list[Extent]) -> None:
        """Free what `take` returned, once.

        :raises AssertionError: some of it is free already.
        """
        for extent in extents:
            self._join(extent.offset, extent.num_bytes)

    def check(self) -> None:
        """:raises AssertionError: free stretches overlap, touch, or lie outside the buffer."""
        end = -1
        for offset, size in self._free:
            assert size > 0 and offset > end, "free stretches overlap or touch"
            end = offset + size
        assert end <= self.num_bytes, "a free stretch lies outside the buffer"

    def _cut(self, extent: Extent) -> None:
        index = bisect.bisect_left(self._free, (extent.offset, 0))
        offset, size = self._free[index]
        assert offset == extent.offset and size >= extent.num_bytes
        rest = size - extent.num_bytes
        self._free[index : index + 1] = [(offset + extent.num_bytes, rest)] if rest else []

    def _join(self, offset: int, size: int) -> None:
        index = bisect.bisect_left(self._free, (offset, 0))
        begin, end, first, last = offset, offset + size, index, index
        if index < len(self._free):
            behind, behind_size = self._free[index]
            assert end <= behind, "an extent was given back twice"
            if behind == end:
                end, last = behind + behind_size, index + 1
        if index:
            before, before_size = self._free[index - 1]
            assert before + before_size <= offset, "an extent was given back twice"
            if before + before_size == offset:
                begin, first = before, index - 1
        self._free[first:last] = [(begin, end - begin)]
