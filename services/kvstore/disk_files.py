"""KV blocks in flat files on disk: a file of slots for each fingerprint. Every call blocks, and belongs in a thread.

    <identity>.blocks:   slot 0 · slot 1 · …        a slot: header (64 bytes) · block · padding to a page

A slot says by itself what it holds: whose block (identity), which one (hash), how long, and its CRC-32. A reader compares all
of it with what it expects and computes the CRC-32 again, so that a write that was torn, a file that was truncated or
overwritten, and an index that names the wrong slot all end the same way: the block is not there.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.transfer.checksums import crc32
from services.kvstore.disk_index import DiskFile

SUFFIX = ".blocks"
HEADER_BYTES = 64
_MAGIC = b"PSKVBLK1"
_HEADER = struct.Struct("<8sQI16s16s8x")  # magic, block bytes, checksum, identity, hash; a CRC-32 of it all follows


class DamagedBlock(Exception):
    """A slot does not hold the block that it should."""


def slot_bytes_of(block_bytes: int) -> int:
    """Return the size of a slot for blocks of this size: whole pages, since space is given back in pages."""
    return -(-(HEADER_BYTES + block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


class SlotFile:
    """The open file of one `DiskFile`."""

    def __init__(self, folder: Path, file: DiskFile) -> None:
        """:raises OSError: it can't be opened or made."""
        self.path = folder / f"{file.identity.hex()}{SUFFIX}"
        self._file = file
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    @property
    def num_slots(self) -> int:
        """Slots that the file is long enough for."""
        return os.fstat(self._fd).st_size // self._file.slot_bytes

    def write(self, slot: int, block_hash: bytes, checksum: int, block: bytearray) -> None:
        """:raises OSError: it could not be written whole; ENOSPC: the disk is full."""
        header = self._header(block_hash, checksum)
        padding = bytes(self._file.slot_bytes - HEADER_BYTES - len(block))
        _whole(os.pwritev, self._fd, [header, block, padding], slot * self._file.slot_bytes)

    def read(self, slot: int, block_hash: bytes, checksum: int, into: bytearray) -> None:
        """Read a block of `len(into)` bytes. :raises OSError: it can't be read. :raises DamagedBlock: it is not this block."""
        header = bytearray(HEADER_BYTES)
        if _whole(os.preadv, self._fd, [header, into], slot * self._file.slot_bytes) < HEADER_BYTES + len(into):
            raise DamagedBlock("the file is truncated")
        if header != self._header(block_hash, checksum):
            raise DamagedBlock("the slot holds another block, or a part of one")
        if crc32(into) != checksum:
            raise DamagedBlock("the checksum is wrong")

    def clear(self, slots: Sequence[int]) -> None:
        """Give the disk space of slots back. :raises OSError: the file system can't do that; the space stays taken."""
        size, length = self._file.slot_bytes, os.fstat(self._fd).st_size
        for first, count in _stretches(sorted(slots)):
            begin, end = first * size, min((first + count) * size, length)
            if begin >= end:
                continue
            if end == length:
                os.ftruncate(self._fd, begin)
                length = begin
                continue
            with mmap.mmap(self._fd, end - begin, offset=begin) as window:
                window.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        """Close and unlink."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _header(self, block_hash: bytes, checksum: int) -> bytes:
        digest = hashlib.blake2b(block_hash, digest_size=16).digest()
        fields = _HEADER.pack(_MAGIC, self._file.block_bytes, checksum, self._file.identity, digest)
        return fields + crc32(fields).to_bytes(4, "little")


def _stretches(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, number) of slots that lie side by side; `slots` are in order."""
    start = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            yield slots[start], i - start
            start = i


def _whole(call: Callable[[int, list[memoryview], int], int], fd: int, parts: Sequence[bytes | bytearray], offset: int) -> int:
    """Repeat a system call until all parts are copied, or it copies nothing; return the number of bytes."""
    left = [memoryview(part) for part in parts if len(part)]
    total = 0
    while left:
        done = call(fd, left, offset + total)
        if not done:
            break
        total += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
    return total
