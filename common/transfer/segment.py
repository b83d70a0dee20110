"""A segment in this process's memory: blocks and generations as arrays over a file that other processes open, too."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from common.protocol.errors import ConfigError, TransportUnavailable
from common.transfer.block_locks import try_lock_alone
from common.transfer.segment_file import (
    DEVICE_MEMORY_BYTES,
    GENERATIONS_OFFSET,
    PREFIX,
    Header,
    make_segment,
    open_segment,
    path_of,
    reserve,
    same_file,
)


class Segment:
    """A mapped segment: `blocks` [num_blocks, block_bytes] uint8, `generations` [num_blocks] uint64, and `progress` [1] uint64,
    which `segment_file` explains.

    `blocks` is [num_blocks, 0] where they are not mapped: `device_memory` says how to reach them in a GPU's memory, or
    the segment is a store's, whose blocks have memory one by one (`back`, `unback`).
    Views of these arrays, numpy's or torch's, may outlive `close`: the memory goes with the last of them. What a reader opened
    is closed with its last reference, too.
    """

    blocks: np.ndarray
    generations: np.ndarray
    progress: np.ndarray

    def __init__(self, path: Path, fd: int, header: Header, *, owner: bool, sparse: bool = False) -> None:
        """Takes `fd` over. :raises OSError: it can't be mapped, and `fd` is still open."""
        self.path = path
        self.num_blocks = header.num_blocks
        self.block_bytes = header.block_bytes
        self.device_memory = header.device_memory
        self._header = header
        self._fd = fd
        self._owner = owner
        unmapped = sparse or bool(header.device_memory)
        size = header.blocks_offset if unmapped else header.file_bytes
        access = mmap.ACCESS_WRITE if owner else mmap.ACCESS_READ
        self._map: mmap.mmap | None = mmap.mmap(fd, size, access=access)
        self.generations = np.frombuffer(self._map, np.uint64, self.num_blocks, GENERATIONS_OFFSET)
        self.progress = np.frombuffer(self._map, np.uint64, 1, header.progress_offset)
        blocks = np.frombuffer(self._map, np.uint8)[header.blocks_offset :]
        self.blocks = blocks.reshape(self.num_blocks, 0 if unmapped else self.block_bytes)
        self._close_fd = weakref.finalize(self, os.close, fd)

    @property
    def name(self) -> str:
        return self.path.name.removeprefix(PREFIX)

    @classmethod
    def create(
        cls,
        directory: str | Path,
        name: str,
        *,
        num_blocks: int,
        block_bytes: int,
        fingerprint: str,
        device_memory: bytes = b"",
        sparse: bool = False,
    ) -> Segment:
        """A new segment that this process owns. Generations are 0, blocks read as 0, and all its memory is taken at once.

        device_memory: up to 72 bytes that tell readers how to reach blocks in a GPU's memory; empty: they are here.
        sparse: blocks have no memory until `back`; `block_bytes` must be whole pages.

        :raises ConfigError: `directory` is missing, not writable or too small, or the name is taken.
        """
        assert num_blocks > 0 and block_bytes > 0 and len(device_memory) <= DEVICE_MEMORY_BYTES
        assert not (sparse and block_bytes % mmap.PAGESIZE), "memory is taken and given back in pages"
        path = path_of(Path(directory), name)
        header = Header(num_blocks, block_bytes, device_memory)
        reserved = header.blocks_offset if sparse else header.file_bytes
        fd = make_segment(path, header, fingerprint, reserved_bytes=reserved)
        try:
            return cls(path, fd, header, owner=True, sparse=sparse)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise ConfigError(f"{path} can't be mapped: {error.strerror}", param="shm_dir") from error

    @classmethod
    def open(cls, directory: str | Path, name: str, *, fingerprint: str) -> Segment:
        """Map a segment of another process, to read.

        :raises TransportUnavailable: there is none, or it is not one this version can read.
        :raises StaleHandle: it holds the KV of another model or layout.
        """
        path = path_of(Path(directory), name)
        fd, header = open_segment(path, fingerprint, os.O_RDONLY)
        try:
            return cls(path, fd, header, owner=False)
        except OSError as error:
            os.close(fd)
            raise TransportUnavailable(f"{path} can't be mapped: {error.strerror}") from error

    def back(self, block: int) -> None:
        """Give one block of a sparse segment memory. It reads as 0 unless it had some before.

        :raises ConfigError: there is none left.
        """
        reserve(self._fd, self._offset(block), self.block_bytes, self.path.parent)

    def fill(self, block: int, content: bytes | memoryview) -> None:
        """Give one block of a sparse segment memory as `back` does, and write it. Blocks of memory that was never written
        are slow to copy to: Linux zeroes each page when it is touched.

        :raises ConfigError: there is none left. :raises OSError: it can't be written.
        """
        self.back(block)
        os.pwrite(self._fd, content[: self.block_bytes], self._offset(block))

    def unback(self, block: int) -> None:
        """Give the memory of one block back to the system. Whoever still reads it gets zeros, so raise its generation before.

        :raises BlockingIOError: a worker copies it just now; the block keeps its memory.
        :raises OSError: the file system can't do that; likewise.
        """
        offset = self._offset(block)
        with try_lock_alone(self._fd, offset, self.block_bytes), mmap.mmap(self._fd, self.block_bytes, offset=offset) as window:
            window.madvise(mmap.MADV_REMOVE)

    def read_block(self, block: int, into: bytearray | memoryview) -> None:
        """Copy the first `len(into)` bytes of a block out of the file, for an owner that does not map it.

        :raises OSError: it can't be read whole.
        """
        if os.preadv(self._fd, [into], self._offset(block)) != len(into):
            raise OSError(errno.EIO, "the segment is shorter than its header says")

    def write_block(self, block: int, data: bytearray) -> None:
        """Copy `data` to the beginning of a block that has memory. :raises OSError: it can't be written whole."""
        if os.pwrite(self._fd, data, self._offset(block)) != len(data):
            raise OSError(errno.EIO, "the segment can't be written")

    @property
    def memory_bytes(self) -> int:
        """What the file really takes now, header and generations included."""
        return 0 if self._map is None else 512 * os.fstat(self._fd).st_blocks

    def is_current(self) -> bool:
        """False once the file is gone or another took its name: the owner ended or started anew."""
        return self._map is not None and same_file(self._fd, self.path)

    def close(self) -> None:
        """Unmap; the owner also unlinks and unlocks. Harmless twice."""
        if self._map is None:
            return
        if self._owner:
            if self.is_current():
                self.path.unlink(missing_ok=True)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # the map keeps a duplicate of the descriptor, and the lock with it
        mapped, self._map = self._map, None
        self.blocks = np.empty((0, self.blocks.shape[1]), np.uint8)
        self.generations = self.progress = np.empty(0, np.uint64)
        self._close_fd()
        try:
            mapped.close()
        except BufferError:
            del mapped  # views are alive: the last of them unmaps it

    def _offset(self, block: int) -> int:
        assert 0 <= block < self.num_blocks
        return self._header.blocks_offset + block * self.block_bytes
