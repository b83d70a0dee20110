"""A worker's KV blocks as copies to and from a kvstore see them: as rows of host memory, wherever the blocks are.

    write   fill(rows, indices, part): content is put into rows[indices] ─► the blocks hold it
    read    the blocks' content is in rows[indices] ─► take(rows, indices, part)

In host memory the rows are the blocks themselves, and one call is made for all of them. Blocks of a GPU pass through pinned
memory (`host_stage.py`), a part at a time, and `fill` or `take` is called in several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from common.transfer.pinned_memory import PinnedMemory

T = TypeVar("T")

Fill = Callable[[np.ndarray, Sequence[int], range], int]
"""`fill(rows, indices, part)` puts content into rows[indices]: that of the blocks at the positions `part` of the list that was
given. rows: uint8 [num_rows, block_bytes]. Returns how many of them, from the first on, are good."""
Take = Callable[[np.ndarray, Sequence[int], range], T]
"""`take(rows, indices, part)` uses the content of blocks, likewise. The rows are its own only until it returns."""


class BlockMemory(Protocol):
    """The blocks of one cache group. Safe to call from several threads.

    num_at_once: blocks that one call should be given at least, if there are so many, to be as fast as it can be.
    pinned: where a kvstore's memory is to be pinned to be copied without the host's help; None: nowhere.
    """

    num_blocks: int
    block_bytes: int
    num_at_once: int

    @property
    def pinned(self) -> PinnedMemory | None: ...

    def read(self, blocks: Sequence[int], take: Take[T]) -> list[T]:
        """Give the content of `blocks` to `take`, in parts; return what it returned, in the order of the parts. Blocks.

        Whatever is raised, nothing uses the blocks any more once this has ended.

        :raises TransportUnavailable: the memory can't be reached. What `take` raises is raised, too.
        """
        ...

    def write(self, blocks: Sequence[int], fill: Fill) -> int:
        """Have `fill` give new content to `blocks`, in parts; return how many of them, from the first on, have it. Blocks.

        The others hold anything, all of them where this raises. Otherwise as `read`.
        """
        ...


class HostBlocks:
    """Blocks in host memory, uint8 [num_blocks, block_bytes]; [num_blocks, 0] where they are in memory that nothing reaches."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.num_blocks, self.block_bytes = blocks.shape
        self.num_at_once = 1
        self.pinned: PinnedMemory | None = None
        self._blocks = blocks

    def read(self, blocks: Sequence[int], take: Take[T]) -> list[T]:
        """See `BlockMemory.read`."""
        return [take(self._blocks, blocks, range(len(blocks)))] if blocks else []

    def write(self, blocks: Sequence[int], fill: Fill) -> int:
        """See `BlockMemory.write`."""
        return fill(self._blocks, blocks, range(len(blocks))) if blocks else 0
