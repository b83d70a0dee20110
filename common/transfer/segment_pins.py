"""Which memory of a kvstore's segment a worker with a GPU has pinned, and when it lets go of it.

A block that loses its memory would leave the GPU with the old pages, so what is pinned is locked (`block_locks`), and the
store can't take it. When it wants to, it says so in the segment (`progress` counts how often), and all of it is let go. It is
pinned again when the store has wanted nothing for a while, longer each time.

    a store takes memory ahead ─► extents are looked at in their order ─┐
    a block's memory was written ─► its extent is looked at ────────────┴─► all of it has memory ─► locked, pinned
    the store wants memory ─► unpinned, unlocked ─► nothing is pinned for `QUIET_S`, twice as long the next time
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable

import numpy as np

from common.transfer.block_locks import HeldLocks
from common.transfer.mapping import map_pages, map_written
from common.transfer.pinned_memory import PinnedMemory
from common.transfer.segment_file import Header

EXTENT_BYTES = 2 << 20
"""Pinned at once: whole blocks, one at least. The driver launches nothing meanwhile, for some 0.3 ms."""
PAUSE_S = 0.002
"""Between two of them: 32 MiB at once, one after the other, kept launches waiting for 3 to 28 ms (H200)."""
BUSY_S = 0.25
"""One call of `update` pins for so long: other segments are waiting."""
QUIET_S, MAX_QUIET_S = 30.0, 3600.0
"""Nothing is pinned for so long after the store has wanted memory: the first time, and at most."""


class SegmentPins:
    """Extents of `blocks`, the mapping of a segment's blocks [num_blocks, block_bytes]. One thread at a time."""

    def __init__(self, fd: int, header: Header, blocks: np.ndarray, memory: PinnedMemory) -> None:
        """Keeps a descriptor of its own. :raises OSError: there is none."""
        self._header, self._blocks, self._memory = header, blocks, memory
        self._locks = HeldLocks(fd)
        self._fd = fd
        self._size = max(1, EXTENT_BYTES // header.block_bytes)
        self._pinned: set[int] = set()
        self._candidates: set[int] = set()
        self._next = 0  # all extents before it were pinned once
        self._wanted = self._read_wanted()
        self._quiet_s, self._quiet_until = QUIET_S, 0.0

    def written(self, blocks: slice) -> None:
        """These blocks' memory was written: look at their extents again."""
        self._candidates.update(range(blocks.start // self._size, -(-blocks.stop // self._size)))

    def update(self, stopped: Callable[[], bool]) -> bool:
        """Pin what has all its memory; let go of everything where the store wants some. Return whether it
        stopped early, with more to pin. :raises OSError: see `map_written`."""
        now, wanted = time.monotonic(), self._read_wanted()
        if wanted != self._wanted:
            self._wanted = wanted
            self._candidates |= self._pinned
            self.let_go()
            self._quiet_until, self._quiet_s = now + self._quiet_s, min(2 * self._quiet_s, MAX_QUIET_S)
        if now < self._quiet_until or self._memory.refused:
            return False

        def goes_on() -> bool:
            return not stopped() and time.monotonic() < now + BUSY_S and self._read_wanted() == self._wanted

        for extent in sorted(self._candidates):
            if not goes_on():
                return not stopped()
            self._candidates.discard(extent)
            self._pin(extent)
        while self._next * self._size < self._header.num_blocks:
            if not goes_on():
                return not stopped()
            if not self._pin(self._next):
                break
            self._next += 1
        return False

    def let_go(self, pause_s: float = PAUSE_S / 4) -> None:
        """Unpin and unlock everything. Copies that use it are waited for."""
        for extent in list(self._pinned):
            offset, num_bytes = self._range(extent)
            self._memory.unpin(self._address(offset))
            self._locks.unlock(offset, num_bytes)
            self._pinned.discard(extent)
            time.sleep(pause_s)

    def close(self) -> None:
        """Harmless twice."""
        self.let_go(pause_s=0)
        self._locks.close()

    def _pin(self, extent: int) -> bool:
        """Whether an extent is pinned now."""
        if extent in self._pinned:
            return True
        offset, num_bytes = self._range(extent)
        try:
            self._locks.lock(offset, num_bytes)
        except BlockingIOError:  # the store takes a block's memory just now
            return False
        kept = False
        try:
            if map_written(self._fd, offset, num_bytes, self._address(offset)):
                map_pages(self._address(offset), num_bytes, to_write=True)  # the driver holds its lock while it does that
                kept = self._memory.pin(self._address(offset), num_bytes)
        finally:
            if not kept:
                self._locks.unlock(offset, num_bytes)
        if kept:
            self._pinned.add(extent)
            time.sleep(PAUSE_S)
        return kept

    def _range(self, extent: int) -> tuple[int, int]:
        """Return the offset in the file and the bytes of an extent."""
        first = extent * self._size
        count = min(self._size, self._header.num_blocks - first)
        return self._header.blocks_offset + first * self._header.block_bytes, count * self._header.block_bytes

    def _address(self, offset: int) -> int:
        return self._blocks.ctypes.data + offset - self._header.blocks_offset

    def _read_wanted(self) -> int:
        raw = os.pread(self._fd, 8, self._header.progress_offset)
        return struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
