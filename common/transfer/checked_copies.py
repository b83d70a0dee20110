"""Copies between a worker's blocks and a kvstore's memory, with the checksums of what was copied.

A few megabytes are copied at a time, and their checksums are computed while they are in a cache. Few calls do that, each of
which lets other threads run meanwhile: the interpreter's lock is what many threads would wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from common.transfer.base import copy_blocks
from common.transfer.block_memory import Fill, Take
from common.transfer.checksums import crc32

CACHED_BYTES = 4 << 20
"""Copied before, or after, their checksums are computed."""


def copying_in(memory: np.ndarray, blocks: Sequence[int], checksums: Sequence[int]) -> Fill:
    """Return what fills a worker's blocks with `memory[blocks]`; good are those that have these checksums."""

    def fill(rows: np.ndarray, indices: Sequence[int], part: range) -> int:
        done = 0
        for mine, theirs in _pieces(indices, part, rows.shape[1]):
            copy_blocks(memory, blocks[theirs], rows, indices[mine])
            good = num_good(rows, indices[mine], checksums[theirs])
            done += good
            if good < mine.stop - mine.start:
                break
        return done

    return fill


def copying_out(memory: np.ndarray, blocks: Sequence[int]) -> Take[list[int]]:
    """Return what copies a worker's blocks to `memory[blocks]`, and gives their checksums."""

    def take(rows: np.ndarray, indices: Sequence[int], part: range) -> list[int]:
        checksums: list[int] = []
        for mine, theirs in _pieces(indices, part, rows.shape[1]):
            checksums += checksums_of(rows, indices[mine])
            copy_blocks(rows, indices[mine], memory, blocks[theirs])
        return checksums

    return take


def checksums_of(rows: np.ndarray, indices: Sequence[int]) -> list[int]:
    """Return the checksums of rows[indices]."""
    return [crc32(rows[index]) for index in indices]


def num_good(rows: np.ndarray, indices: Sequence[int], checksums: Sequence[int]) -> int:
    """Return how many of rows[indices], from the first on, have these checksums."""
    for i, (index, checksum) in enumerate(zip(indices, checksums, strict=True)):
        if crc32(rows[index]) != checksum:
            return i
    return len(indices)


def _pieces(indices: Sequence[int], part: range, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Return slices of `indices` that a cache holds, and where they are in the list that `part` is a part of."""
    size = max(1, CACHED_BYTES // row_bytes)
    for start in range(0, len(indices), size):
        end = min(start + size, len(indices))
        yield slice(start, end), slice(part.start + start, part.start + end)
