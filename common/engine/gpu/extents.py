"""Parts of an array, handed out and taken back: a buddy allocator.

Sizes are powers of two, and a part's start is a multiple of its size. Parts that are taken largest first from an empty array
leave no gaps: they fit whenever their sizes add up to no more than the array's.
"""

from __future__ import annotations

from typing import NamedTuple

UNIT = 16
"""Elements of the smallest extent."""


class Extent(NamedTuple):
    start: int
    size: int


def rounded(count: int) -> int:
    """Return the size of the extent that holds `count` elements: less than twice that many, or `UNIT`."""
    return max(UNIT, 1 << (count - 1).bit_length()) if count > 0 else UNIT


class Extents:
    """Of an array of `capacity` elements, a multiple of `UNIT`."""

    def __init__(self, capacity: int) -> None:
        if capacity % UNIT or capacity < UNIT:
            raise ValueError(f"{capacity} elements are not a number of extents of {UNIT}")
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Take everything back."""
        self._free: dict[int, set[int]] = {UNIT << order: set() for order in range((self.capacity // UNIT).bit_length())}
        start = 0
        for size in reversed(self._free):
            if self.capacity & size:
                self._free[size].add(start)
                start += size

    def take(self, count: int) -> Extent | None:
        """Return an extent that holds `count` elements; None if there is none."""
        size = wanted = rounded(count)
        while not self._free.get(size):
            if size not in self._free:
                return None
            size *= 2
        start = self._free[size].pop()
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        return Extent(start, wanted)

    def give(self, extent: Extent) -> None:
        """Take an extent back."""
        start, size = extent
        while (buddy := start ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            start = min(start, buddy)
            size *= 2
        self._free[size].add(start)
