"""Copies between a worker's blocks and a kvstore's memory, with the checksums of what was copied.

    CopyIn     a kvstore's memory ─► rows; good are those whose checksums are right
    CopyOut    rows ─► a kvstore's memory, and their checksums

After `prepare`, one call of compiled code copies all blocks that it is given and computes their checksums, so that many
threads can do it side by side. Otherwise two megabytes are copied at a time, and their checksums are computed while they are in
a cache. The C library copies more than that past the caches, which is slower for one core and leaves the checksum to memory.
Smaller pieces would have more calls ask for the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.runtime import logs
from common.transfer.base import copy_blocks
from common.transfer.checksums import crc32, crc32_address

log = logs.get("transfer")

PIECE_BYTES = 2 << 20
"""Copied before, or after, their checksums are computed."""

_Copies = Callable[[np.ndarray, Sequence[int], np.ndarray, Sequence[int], bool], list[int]]
_compiled: _Copies | None = None


@dataclass(frozen=True)
class CopyIn:
    """Fills a worker's blocks with `memory[blocks]`; good are those that have these checksums: a `Fill`."""

    memory: np.ndarray
    blocks: Sequence[int]
    checksums: Sequence[int]

    def __call__(self, rows: np.ndarray, indices: Sequence[int], part: range) -> int:
        theirs = slice(part.start, part.stop)
        found = _copy(self.memory, self.blocks[theirs], rows, indices, of_target=True)
        for i, (is_now, should_be) in enumerate(zip(found, self.checksums[theirs], strict=True)):
            if is_now != should_be:
                return i
        return len(part)


@dataclass(frozen=True)
class CopyOut:
    """Copies a worker's blocks to `memory[blocks]`, and gives their checksums: a `Take`."""

    memory: np.ndarray
    blocks: Sequence[int]

    def __call__(self, rows: np.ndarray, indices: Sequence[int], part: range) -> list[int]:
        return _copy(rows, indices, self.memory, self.blocks[part.start : part.stop], of_target=False)


def prepare() -> bool:
    """Compile what copies without the interpreter, or load it; it takes seconds where it was never compiled. Return whether
    there is such code: for this processor, with Numba and ISA-L."""
    global _compiled
    if _compiled is None:
        _compiled = _compiled_copies()
    return _compiled is not None


def checksums_of(rows: np.ndarray, indices: Sequence[int]) -> list[int]:
    """Return the checksums of rows[indices]."""
    return [crc32(rows[index]) for index in indices]


def num_good(rows: np.ndarray, indices: Sequence[int], checksums: Sequence[int]) -> int:
    """Return how many of rows[indices], from the first on, have these checksums."""
    for i, (index, checksum) in enumerate(zip(indices, checksums, strict=True)):
        if crc32(rows[index]) != checksum:
            return i
    return len(indices)


def _compiled_copies() -> _Copies | None:
    address = crc32_address()
    if not address:
        return None
    try:
        from common.ops.kv.checked_copy_numba import checked_copies
    except ImportError:
        return None

    def copy(
        source: np.ndarray, source_blocks: Sequence[int], target: np.ndarray, target_blocks: Sequence[int], changes: bool
    ) -> list[int]:
        found = np.empty(len(source_blocks), np.int64)
        places = (
            (rows.ctypes.data, rows.strides[0], np.asarray(blocks, np.int64))
            for rows, blocks in ((source, source_blocks), (target, target_blocks))
        )
        checked_copies(*next(places), *next(places), source.shape[1], found, address, changes)
        return found.tolist()

    sample, other = np.arange(256, dtype=np.uint8)[None], np.zeros((1, 256), np.uint8)
    if copy(sample, [0], other, [0], True) != [crc32(sample[0])] or (sample != other).any():
        log.warning("compiled_copies_unavailable", reason="a checksum was wrong", consequence="KV is copied more slowly")
        return None
    return copy


def _copy(
    source: np.ndarray, source_blocks: Sequence[int], target: np.ndarray, target_blocks: Sequence[int], *, of_target: bool
) -> list[int]:
    """`target[target_blocks] = source[source_blocks]`; return the checksums of what was copied. of_target: they are computed of
    the target, else of the source, which must be the side that nobody else writes to."""
    if _compiled is not None:
        return _compiled(source, source_blocks, target, target_blocks, of_target)
    checksums: list[int] = []
    rows, indices = (target, target_blocks) if of_target else (source, source_blocks)
    for blocks in _pieces(len(indices), source.shape[1]):
        found = [0] * len(indices[blocks])
        for start in range(0, source.shape[1], PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            copy_blocks(source[:, piece], source_blocks[blocks], target[:, piece], target_blocks[blocks])
            found = [crc32(rows[index, piece], before) for index, before in zip(indices[blocks], found, strict=True)]
        checksums += found
    return checksums


def _pieces(num_blocks: int, block_bytes: int) -> Iterator[slice]:
    """Return slices of a list of blocks, of a piece each, or of a block."""
    size = max(1, PIECE_BYTES // block_bytes)
    return (slice(start, start + size) for start in range(0, num_blocks, size))
