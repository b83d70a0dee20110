"""How fast the kvstore's disk tier reads and writes, beside what the disk gives to a plain copy (as `dd` makes it)."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from common.transfer.checksums import crc32
from common.transfer.segment import Segment
from common.transfer.store_segment import slot_bytes
from services.kvstore.disk_folder import Copy, DiskFolder
from services.kvstore.promotion import NUM_THREADS, READ_BYTES
from services.kvstore.write_back import WRITE_BYTES

BLOCK_BYTES = 368_640
"""A block of SmolLM2-135M: 16 tokens of 30 layers in bfloat16."""
COPY_BYTES = 4 << 20
NUM_SLOTS = 64


class Rates(NamedTuple):
    """MB/s, with an empty page cache for reads; writes include the time until they are on the disk."""

    plain_read: float
    tier_read: float
    tier_read_cached: float
    plain_write: float
    tier_write: float


def measure(folder: Path, total_bytes: int) -> Rates:
    """Copy `total_bytes` of random bytes in `folder`, plainly and as blocks."""
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        plain_write, plain_read = _plain(Path(directory) / "plain", total_bytes)
        return Rates(plain_read, *_tier(Path(directory) / "kv", total_bytes, plain_write))


def drop_cache(folder: Path) -> None:
    """Have the system forget what it keeps in memory of the files in `folder`."""
    for path in folder.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _plain(path: Path, total_bytes: int) -> tuple[float, float]:
    chunk = random.Random(1).randbytes(COPY_BYTES)
    count = total_bytes // COPY_BYTES
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    began = time.perf_counter()
    for _ in range(count):
        os.write(fd, chunk)
    os.fsync(fd)
    wrote_s = time.perf_counter() - began
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(fd, 0, os.SEEK_SET)
    into = bytearray(COPY_BYTES)
    began = time.perf_counter()
    for _ in range(count):
        os.readv(fd, [into])
    read_s = time.perf_counter() - began
    os.close(fd)
    path.unlink()
    return count * COPY_BYTES / wrote_s / 1e6, count * COPY_BYTES / read_s / 1e6


def _tier(path: Path, total_bytes: int, plain_write: float) -> tuple[float, float, float, float]:
    """Read, read from the page cache, `plain_write`, write."""
    count = total_bytes // BLOCK_BYTES
    with _memory() as (segment, checksums):
        folder = DiskFolder.open(path, capacity_bytes=2 * total_bytes, clock=time.monotonic, active_s=1.0)
        file = folder.file("bench", BLOCK_BYTES)
        assert file is not None
        copies: list[Copy] = []
        for number in range(count):
            block_hash, slot = b"%016d" % number, number % NUM_SLOTS
            block = folder.index.reserve(file, block_hash, b"", checksums[slot])
            assert block is not None
            copies.append(Copy(file, block_hash, block, segment, slot))
        began = time.perf_counter()
        for batch in _batches(copies, WRITE_BYTES):
            outcome, saved = folder.write(batch, [], [], folder.index.take_changes())
            assert outcome.done == len(batch) and saved, outcome
            for copy in batch:
                folder.index.commit(file, copy.block_hash)
        folder.write([], [], [], folder.index.take_changes())
        os.sync()
        write = count * BLOCK_BYTES / (time.perf_counter() - began) / 1e6
        drop_cache(path)
        cold, warm = (_read(folder, copies) for _ in range(2))
        folder.close()
    return cold, warm, plain_write, write


def _read(folder: DiskFolder, copies: list[Copy]) -> float:
    """As `Promotion` does it."""
    began = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for batch in _batches(copies, READ_BYTES):
            size = -(-len(batch) // NUM_THREADS)
            parts = [batch[start : start + size] for start in range(0, len(batch), size)]
            for part, outcome in zip(parts, threads.map(folder.read, parts), strict=True):
                assert outcome.done == len(part), outcome
    return len(copies) * BLOCK_BYTES / (time.perf_counter() - began) / 1e6


def _batches(copies: list[Copy], size_bytes: int) -> Iterator[list[Copy]]:
    step = size_bytes // BLOCK_BYTES
    return (copies[start : start + step] for start in range(0, len(copies), step))


@contextmanager
def _memory() -> Iterator[tuple[Segment, list[int]]]:
    """A store's shared memory with random blocks, and their checksums."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        segment = Segment.create(
            directory, "bench", num_blocks=NUM_SLOTS, block_bytes=slot_bytes(BLOCK_BYTES), fingerprint="bench", sparse=True
        )
        checksums: list[int] = []
        for slot in range(NUM_SLOTS):
            block = bytearray(random.Random(slot).randbytes(BLOCK_BYTES))
            segment.back(slot)
            segment.write_block(slot, block)
            checksums.append(crc32(block))
        try:
            yield segment, checksums
        finally:
            segment.close()
