"""A kvstore's segment as its workers use it: blocks are copied through a mapping of the file, or through the file itself.

A store takes memory from one model and gives it to another block by block. A mapping of a block that has lost its memory would
take new memory when it is touched, past the store's capacity, or end the process (SIGBUS) where there is none left. So blocks
are touched only while they are kept (`block_locks`):

    worker   lock, shared ─► compare generations ─► copy ─► compare generations ─► unlock
    store    raise the generation ─► lock, exclusive, without waiting ─► take the memory ─► unlock

Whichever locks first: either the worker finds another generation and touches nothing, or the store leaves the block its memory.

Blocks that are small, or of a store that names no generations, or where there are no such locks, are copied by system calls.
Reading a block without memory gives zeros then, which the generation gives away, and writing it fails with an error. But the
kernel lets one writer of a file in at a time, and copies page by page.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common.protocol.errors import StaleHandle, TransportUnavailable
from common.transfer.base import check_handle, compare_generations, copy_blocks, runs
from common.transfer.block_locks import can_lock, lock_to_copy
from common.transfer.mapping import map_written
from common.transfer.pinned_memory import PinnedMemory
from common.transfer.segment_file import GENERATIONS_OFFSET, open_segment, path_of, same_file
from common.transfer.segment_pins import SegmentPins

MAX_MAPPED_AHEAD = 1 << 20
"""Segments of more blocks are not mapped ahead: it would take milliseconds to look for what was granted."""
MAX_LOOKS = 40
"""So often a block that was granted is looked at until it is written: ten seconds, a lease's time."""
AHEAD_BYTES = 32 << 20
"""Mapped ahead at once, in some 2 ms, while the store can't take these blocks' memory."""
MIN_MAPPED_BYTES = 64 << 10
"""Smaller blocks are copied through the file: a lock takes as long as a system call that copies one."""


def slot_bytes(block_bytes: int) -> int:
    """What a store keeps a block in: whole pages, since memory is taken and given back in pages."""
    return -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class StoreSegment:
    """Another process's segment. The file is closed with the last reference, so threads may go on with what they have."""

    def __init__(
        self,
        directory: str | Path,
        name: str,
        *,
        fingerprint: str,
        fence: Callable[[], None],
        pinned: PinnedMemory | None = None,
    ) -> None:
        """`pinned`: where the memory is to be pinned. :raises TransportUnavailable, StaleHandle: see `open_segment`."""
        self.path = path_of(Path(directory), name)
        self._fd, self._header = open_segment(self.path, fingerprint, os.O_RDWR)
        self._fence = fence
        weakref.finalize(self, os.close, self._fd)
        self._mapped = self._map()
        """uint8 [num_blocks, bytes of a slot]; None where blocks are copied through the file."""
        self._seen = np.zeros(self._header.num_blocks if self.lends else 0, np.uint64)
        """Generations of blocks when they were mapped; 0: they were not, or nobody was ever granted them."""
        self._looks = np.zeros(len(self._seen), np.uint8)
        self._pins = self._open_pins(pinned)

    def _open_pins(self, memory: PinnedMemory | None) -> SegmentPins | None:
        if memory is None or self._mapped is None:
            return None
        try:
            pins = SegmentPins(self._fd, self._header, self._mapped, memory)
        except OSError:  # descriptors are used up
            return None
        weakref.finalize(self, pins.close).atexit = False  # before the mapping goes, which it keeps; a process ends without it
        return pins

    def is_current(self) -> bool:
        """False once the file is gone or another took its name."""
        return same_file(self._fd, self.path)

    @property
    def lends(self) -> bool:
        """Whether blocks can be touched in memory. Otherwise they are copied by `read` and `write`."""
        return self._mapped is not None

    @contextmanager
    def lend(self, row_bytes: int, blocks: Sequence[int], generations: Sequence[int]) -> Iterator[np.ndarray]:
        """Give the memory of all blocks [num_blocks, row_bytes], of which the caller touches `blocks` while it has it.
        Only where this segment `lends`.

        :raises StaleHandle: before or after, a block has another generation, or they are not of this size.
        :raises TransportUnavailable: the file is shorter than its header says.
        """
        assert self._mapped is not None
        self._check(row_bytes, blocks, generations)
        with self._kept(blocks):
            compare_generations(self._generations_of(blocks), blocks, generations)
            yield self._mapped[:, :row_bytes]
            self._fence()  # the copy comes before the generations are read
            compare_generations(self._generations_of(blocks), blocks, generations)

    def map_granted(self, stopped: Callable[[], bool]) -> bool:
        """Map the memory of blocks that were granted since the last call, if they have some, so that copying them does not;
        have it pinned, or let it go (`segment_pins`). Return whether that stopped early, with more to pin.

        Returns early when it is `stopped`. Call it in one thread.

        :raises OSError: Linux can't, or the file can't be read.
        """
        if not 0 < len(self._seen) <= MAX_MAPPED_AHEAD:
            return False
        if self._pins is not None and not self.is_current():  # nobody reads it any more
            self.let_go()
            return False
        raw = os.pread(self._fd, self._seen.nbytes, GENERATIONS_OFFSET)
        current = np.frombuffer(raw[: len(raw) // 8 * 8], np.uint64)
        changed = np.flatnonzero(current != self._seen[: len(current)]).tolist()
        step = max(1, AHEAD_BYTES // self._header.block_bytes)
        for first, _, count in runs(changed, changed):
            for start in range(first, first + count, step):
                if stopped():
                    return False
                part = slice(start, min(start + step, first + count))
                self._looks[part] += 1
                if self._map_blocks(part) or self._looks[part].min() >= MAX_LOOKS:
                    self._seen[part], self._looks[part] = current[part], 0
        return self._pins is not None and self._pins.update(stopped)

    def let_go(self) -> None:
        """Have nothing pinned any more. Call it in the thread of `map_granted`."""
        if self._pins is not None:
            self._pins.let_go()

    def _map_blocks(self, part: slice) -> bool:
        """Whether all of these blocks have memory that was written, which is mapped now. :raises OSError: see `map_granted`."""
        assert self._mapped is not None
        offset, end = self._offset(part.start), self._offset(part.stop)
        address = self._mapped.ctypes.data + offset - self._header.blocks_offset
        try:
            with lock_to_copy(self._fd, [(offset, end - offset)]):
                is_whole = map_written(self._fd, offset, end - offset, address)
        except BlockingIOError:  # the store is taking a block's memory
            return False
        if is_whole and self._pins is not None:
            self._pins.written(part)
        return is_whole

    def read(self, blocks: Sequence[int], generations: Sequence[int], into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """Copy blocks to `into[into_blocks]` [num_blocks, block_bytes]; returns bytes.

        :raises StaleHandle: a block has another generation after the copy, or they are not of this size.
        :raises TransportUnavailable: the file is shorter than its header says.
        """
        row_bytes = into.shape[1]
        if self.lends:
            with self.lend(row_bytes, blocks, generations) as lent:
                return copy_blocks(lent, blocks, into, into_blocks)
        self._check(row_bytes, blocks, generations)
        for block, row, count in self._stretches(blocks, into_blocks, row_bytes):
            self._whole(os.preadv, into[row : row + count], block)
        self._fence()  # the copy comes before the generations are read
        compare_generations(self._generations_of(blocks), blocks, generations)
        return len(blocks) * row_bytes

    def write(
        self, source: np.ndarray, source_blocks: Sequence[int], blocks: Sequence[int], generations: Sequence[int] = ()
    ) -> None:
        """Copy `source[source_blocks]` to blocks that the store granted. `generations`: those of the grant; () where it names
        none.

        :raises StaleHandle: there are no such blocks, or not of this size, or they are somebody else's by now.
        :raises TransportUnavailable: there is no memory, or the file is shorter than its header says.
        """
        row_bytes = source.shape[1]
        if generations and self.lends:
            with self.lend(row_bytes, blocks, generations) as lent:
                copy_blocks(source, source_blocks, lent, blocks)
            return
        self._check(row_bytes, blocks)
        for block, row, count in self._stretches(blocks, source_blocks, row_bytes):
            self._whole(os.pwritev, source[row : row + count], block)

    def _check(self, row_bytes: int, blocks: Sequence[int], generations: Sequence[int] | None = None) -> None:
        """:raises StaleHandle: there are no such blocks, or not of this size."""
        check_handle(self._header.num_blocks, blocks, generations)
        stride = self._header.block_bytes
        if stride not in (row_bytes, slot_bytes(row_bytes)) or self._header.device_memory:
            raise StaleHandle(f"{self.path} has blocks of {stride} bytes, not {row_bytes}")

    def _map(self) -> np.ndarray | None:
        header = self._header
        if header.block_bytes < MIN_MAPPED_BYTES or header.device_memory or not can_lock(self._fd):
            return None
        try:
            mapped = mmap.mmap(self._fd, header.file_bytes)
        except OSError:  # address space may be limited
            return None
        blocks = np.frombuffer(mapped, np.uint8)[header.blocks_offset :]
        return blocks.reshape(header.num_blocks, header.block_bytes)

    @contextmanager
    def _kept(self, blocks: Sequence[int]) -> Iterator[None]:
        """Have the store take no memory from these blocks meanwhile: those that have some can be touched.

        :raises StaleHandle: it takes it just now. :raises TransportUnavailable: the file was cut, or can't be opened anew.
        """
        header, ordered = self._header, sorted(set(blocks))
        ranges = [(self._offset(block), count * header.block_bytes) for block, _, count in runs(ordered, ordered)]
        try:
            with lock_to_copy(self._fd, ranges):
                if os.fstat(self._fd).st_size < header.file_bytes:
                    raise TransportUnavailable(f"{self.path} is shorter than its header says")
                yield
        except BlockingIOError:
            raise StaleHandle(f"a block of {self.path} is losing its memory") from None
        except OSError as error:
            raise TransportUnavailable(f"{self.path} can't be copied: {error.strerror}") from error

    def _stretches(self, blocks: Sequence[int], rows: Sequence[int], row_bytes: int) -> Iterable[tuple[int, int, int]]:
        """Return (first block, first row, number) of what one system call can copy each."""
        assert len(blocks) == len(rows)
        whole = self._header.block_bytes == row_bytes
        return runs(blocks, rows) if whole else zip(blocks, rows, [1] * len(rows), strict=True)

    def _offset(self, block: int) -> int:
        return self._header.blocks_offset + block * self._header.block_bytes

    def _whole(self, call: Callable[[int, list[memoryview], int], int], rows: np.ndarray, block: int) -> None:
        left, offset = rows.reshape(-1).data, self._offset(block)
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
        first, last = min(blocks), max(blocks)
        raw = os.pread(self._fd, 8 * (last - first + 1), GENERATIONS_OFFSET + 8 * first)
        found = np.frombuffer(raw[: len(raw) // 8 * 8], np.uint64)
        if len(found) <= last - first:
            raise TransportUnavailable(f"{self.path} is shorter than its header says")
        return found[np.array(blocks, np.int64) - first].tolist()
