"""Blocks of any size, copied to and from a kvstore's memory, have the checksums of the whole block."""

from __future__ import annotations

import numpy as np
import pytest

from common.transfer import checked_copies
from common.transfer.checked_copies import CopyIn, CopyOut, checksums_of, num_good
from common.transfer.checksums import crc32

PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_copies, "PIECE_BYTES", PIECE)


@pytest.fixture(params=[16, PIECE, PIECE + 1, 5 * PIECE + 3], ids=lambda size: f"{size}-bytes")
def memory(request: pytest.FixtureRequest) -> np.ndarray:
    """Wider than a block, as a store's slots may be."""
    return np.random.default_rng(request.param).integers(0, 256, (12, request.param + 7), np.uint8)[:, :-7]


def test_what_is_copied_has_the_checksums_of_the_whole_block(memory: np.ndarray) -> None:
    blocks, indices, part = [7, 3, 4, 5, 0, 11], [1, 2, 3, 0], range(1, 5)
    checksums = [crc32(memory[block].copy()) for block in blocks]
    rows = np.zeros((4, memory.shape[1]), np.uint8)
    assert CopyIn(memory, blocks, checksums)(rows, indices, part) == 4
    assert (rows[indices] == memory[blocks[1:5]]).all()
    assert checksums_of(rows, indices) == checksums[1:5]
    other = np.zeros_like(memory)
    assert CopyOut(other, blocks)(rows, indices, part) == checksums[1:5]
    assert (other[blocks[1:5]] == memory[blocks[1:5]]).all()
    assert not other[[block for block in range(12) if block not in blocks[1:5]]].any()


@pytest.mark.parametrize("bad", range(4))
def test_the_first_block_with_another_checksum_ends_what_is_good(memory: np.ndarray, bad: int) -> None:
    blocks = [2, 3, 9, 1]
    checksums = [crc32(memory[block].copy()) for block in blocks]
    memory[blocks[bad], -1] ^= 1
    rows = np.zeros((4, memory.shape[1]), np.uint8)
    assert CopyIn(memory, blocks, checksums)(rows, range(4), range(4)) == bad
    rows[:] = memory[blocks]
    assert num_good(rows, range(4), checksums) == bad
