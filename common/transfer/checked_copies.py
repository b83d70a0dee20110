"""Copies between a worker's blocks and a kvstore's memory, with the checksums of what was copied.

Two megabytes are copied at a time, and their checksums are computed while they are in a cache. The C library copies more than
that past the caches, which is slower for one core and leaves the checksum to memory. Smaller pieces would have more calls ask
for the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from common.transfer.base import copy_blocks
from common.transfer.block_memory import Fill, Take
from common.transfer.checksums import crc32

PIECE_BYTES = 2 << 20
"""Copied before, or after, their checksums are computed."""


def copying_in(memory: np.ndarray, blocks: Sequence[int], checksums: Sequence[int]) -> Fill:
    """Return what fills a worker's blocks with `memory[blocks]`; good are those that have these checksums."""

    def fill(rows: np.ndarray, indices: Sequence[int], part: range) -> int:
        for mine, theirs in _pieces(indices, part, rows.shape[1]):
            own = indices[mine]
            found = _copy(memory, blocks[theirs], rows, own, (rows, own))
            for i, (is_now, should_be) in enumerate(zip(found, checksums[theirs], strict=True)):
                if is_now != should_be:
                    return mine.start + i
        return len(part)

    return fill


def copying_out(memory: np.ndarray, blocks: Sequence[int]) -> Take[list[int]]:
    """Return what copies a worker's blocks to `memory[blocks]`, and gives their checksums."""

    def take(rows: np.ndarray, indices: Sequence[int], part: range) -> list[int]:
        checksums: list[int] = []
        for mine, theirs in _pieces(indices, part, rows.shape[1]):
            own = indices[mine]
            checksums += _copy(rows, own, memory, blocks[theirs], (rows, own))
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


def _copy(
    source: np.ndarray,
    source_blocks: Sequence[int],
    target: np.ndarray,
    target_blocks: Sequence[int],
    own: tuple[np.ndarray, Sequence[int]],
) -> list[int]:
    """`target[target_blocks] = source[source_blocks]`; return the checksums of the worker's side: rows, indices."""
    (rows, indices), checksums = own, [0] * len(source_blocks)
    for start in range(0, source.shape[1], PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        copy_blocks(source[:, piece], source_blocks, target[:, piece], target_blocks)
        checksums = [crc32(rows[index, piece], before) for index, before in zip(indices, checksums, strict=True)]
    return checksums


def _pieces(indices: Sequence[int], part: range, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Return slices of `indices` of a piece each, or of a block, and where they are in the list that `part` is a part of."""
    size = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, len(indices), size):
        end = min(start + size, len(indices))
        yield slice(start, end), slice(part.start + start, part.start + end)
