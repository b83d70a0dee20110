"""Blocks of any size, copied to and from a kvstore's memory, have the checksums of the whole block."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from common.transfer import checked_copies
from common.transfer.checked_copies import CopyIn, CopyOut, checksums_of, num_good
from common.transfer.checksums import crc32

PIECE = 64


@pytest.fixture(autouse=True, params=["compiled", "not compiled"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_copies, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(checked_copies, "_compiled", None)
    if request.param == "compiled" and not checked_copies.prepare():
        pytest.skip("no compiled copies for this processor")


@pytest.fixture(params=[16, PIECE, PIECE + 1, 5 * PIECE + 3, 3 * 2048 + 77, 200_000], ids=lambda size: f"{size}-bytes")
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


@pytest.mark.parametrize("offset", [0, 1, 16, 63])
def test_rows_may_begin_anywhere(offset: int) -> None:
    source = np.random.default_rng(offset).integers(0, 256, 70_000 + offset, np.uint8)[offset:].reshape(1, 70_000)
    room = np.zeros(70_300, np.uint8)
    target = room[100 + offset : 70_100 + offset].reshape(1, 70_000)
    assert CopyOut(target, [0])(source, [0], range(1)) == [crc32(source[0])]
    assert (target == source).all()
    assert not room[: 100 + offset].any() and not room[70_100 + offset :].any()
    assert checksums_of(target, [0]) == [crc32(source[0])]


def test_what_is_written_has_the_checksum_although_the_source_changes() -> None:
    """A writer whose grant is over may still write to a block that is read."""
    size = 1 << 17 if checked_copies._compiled is None else 1 << 20  # a copy takes some milliseconds
    source, target, stop = np.zeros((1, size), np.uint8), np.zeros((1, size), np.uint8), threading.Event()

    def write() -> None:
        for value in itertools.cycle(range(256)):
            source[:] = value
            if stop.is_set():
                return

    with ThreadPoolExecutor(1) as writer:
        writer.submit(write)
        try:
            for _ in range(200):
                assert checked_copies._copy(source, [0], target, [0], of_target=True) == [crc32(target[0])]
        finally:
            stop.set()
