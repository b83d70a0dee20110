"""A kvstore's segment as its workers use it: blocks are copied through the file, and never mapped.

A store takes memory from one model and gives it to another block by block. A mapping of a block that has lost its memory would
take new memory when it is touched, past the store's capacity, or end the process (SIGBUS) where there is none left. Reading
the file gives zeros instead, which the generation then gives away, and writing it fails with an error.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from common.protocol.errors import StaleHandle, TransportUnavailable
from common.transfer.base import check_handle, compare_generations, runs
from common.transfer.segment_file import GENERATIONS_OFFSET, open_segment, path_of, same_file


def slot_bytes(block_bytes: int) -> int:
    """What a store keeps a block in: whole pages, since memory is taken and given back in pages."""
    return -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class StoreSegment:
    """Another process's segment. The file is closed with the last reference, so threads may go on with what they have."""

    def __init__(self, directory: str | Path, name: str, *, fingerprint: str, fence: Callable[[], None]) -> None:
        """:raises TransportUnavailable, StaleHandle: see `open_segment`."""
        self.path = path_of(Path(directory), name)
        self._fd, self._header = open_segment(self.path, fingerprint, os.O_RDWR)
        self._fence = fence
        weakref.finalize(self, os.close, self._fd)

    def is_current(self) -> bool:
        """False once the file is gone or another took its name."""
        return same_file(self._fd, self.path)

    def read(self, blocks: Sequence[int], generations: Sequence[int], into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """Copy blocks to `into[into_blocks]` [num_blocks, block_bytes]; returns bytes.

        :raises StaleHandle: a block has another generation after the copy, or they are not of this size.
        :raises TransportUnavailable: the file is shorter than its header says.
        """
        check_handle(self._header.num_blocks, blocks, generations)
        for offset, row, count in self._stretches(blocks, into_blocks, into.shape[1]):
            self._whole(os.preadv, into[row : row + count], offset)
        self._fence()  # the copy comes before the generations are read
        compare_generations(self._generations_of(blocks), blocks, generations)
        return len(blocks) * into.shape[1]

    def write(self, source: np.ndarray, source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy `source[source_blocks]` to blocks that the store granted.

        :raises StaleHandle: there are no such blocks, or not of this size. :raises TransportUnavailable: there is no memory.
        """
        check_handle(self._header.num_blocks, blocks)
        for offset, row, count in self._stretches(blocks, source_blocks, source.shape[1]):
            self._whole(os.pwritev, source[row : row + count], offset)

    def _stretches(self, blocks: Sequence[int], rows: Sequence[int], row_bytes: int) -> list[tuple[int, int, int]]:
        """(file offset, first row, rows) of what one system call can copy."""
        stride = self._header.block_bytes
        if stride not in (row_bytes, slot_bytes(row_bytes)) or self._header.device_memory:
            raise StaleHandle(f"{self.path} has blocks of {stride} bytes, not {row_bytes}")
        assert len(blocks) == len(rows)
        found = runs(blocks, rows) if stride == row_bytes else zip(blocks, rows, [1] * len(rows), strict=True)
        return [(self._header.blocks_offset + first * stride, row, count) for first, row, count in found]

    def _whole(self, call: Callable[[int, list[memoryview], int], int], rows: np.ndarray, offset: int) -> None:
        left = rows.reshape(-1).data
        while left:
            try:
                done = call(self._fd, [left], offset)
            except OSError as error:
                raise TransportUnavailable(f"{self.path} can't be copied: {error.strerror}") from error
            if not done:
                raise TransportUnavailable(f"{self.path} is shorter than its header says")
            left, offset = left[done:], offset + done

    def _generations_of(self, blocks: Sequence[int]) -> list[int]:
        if not blocks:
            return []
        first = min(blocks)
        raw = os.pread(self._fd, 8 * (max(blocks) - first + 1), GENERATIONS_OFFSET + 8 * first)
        found = np.frombuffer(raw[: len(raw) // 8 * 8], np.uint64)
        if len(found) <= max(blocks) - first:
            raise TransportUnavailable(f"{self.path} is shorter than its header says")
        return [int(found[block - first]) for block in blocks]
