"""A sequence's block table in one cache group, which says when it has changed other than by growing. Pure.

Whoever keeps a copy of a table elsewhere (a GPU's runner does) needs to know what is new of it. Tables grow by a block now and
then, and are changed otherwise only when blocks are exchanged. So a table has a version, which any such change renews: two
readings under one version differ only by what was appended, and by holes where blocks were let go.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Self, SupportsIndex

from common.cache.grouped_pool import HOLE

_versions = itertools.count(1)


class BlockTable(list[int]):
    """Block ids in the order of the sequence's tokens, `HOLE` where the group has none.

    version: positive, and no other table of this process has it.
    """

    __slots__ = ("version",)

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self.version = next(_versions)

    def let_go(self, begin: int, end: int) -> None:
        """Put holes into [begin, end), which no step from now on reads. The version stays."""
        super().__setitem__(slice(begin, end), [HOLE] * (end - begin))

    # what follows is not growth

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        self.version = next(_versions)

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        super().__delitem__(index)
        self.version = next(_versions)

    def __imul__(self, value: SupportsIndex) -> Self:
        self.version = next(_versions)
        return super().__imul__(value)

    def insert(self, index: SupportsIndex, value: int) -> None:
        super().insert(index, value)
        self.version = next(_versions)

    def pop(self, index: SupportsIndex = -1) -> int:
        self.version = next(_versions)
        return super().pop(index)

    def remove(self, value: int) -> None:
        super().remove(value)
        self.version = next(_versions)

    def clear(self) -> None:
        super().clear()
        self.version = next(_versions)

    def reverse(self) -> None:
        super().reverse()
        self.version = next(_versions)

    def sort(self, **options: Any) -> None:
        super().sort(**options)
        self.version = next(_versions)
