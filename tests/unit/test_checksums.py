"""A block's checksum is the same whichever library computes it."""

from __future__ import annotations

import importlib
import random
import sys
import zlib

import numpy as np
import pytest

from common.transfer import checksums


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 15, 4095, 4096, 5121, 368_640, 1_000_003])
def test_it_is_that_of_zlib(num_bytes: int):
    data = random.Random(num_bytes).randbytes(num_bytes)
    expected = zlib.crc32(data)
    assert checksums.crc32(data) == expected
    assert checksums.crc32(bytearray(data)) == expected
    assert checksums.crc32(memoryview(data)) == expected
    assert checksums.crc32(np.frombuffer(data, np.uint8)) == expected


def test_rows_of_a_pool_are_taken_without_a_copy():
    blocks = np.random.default_rng(1).integers(0, 256, (5, 4096), np.uint8)
    assert [checksums.crc32(block) for block in blocks] == [zlib.crc32(block.tobytes()) for block in blocks]
    with pytest.raises((BufferError, ValueError)):
        checksums.crc32(blocks.T)


def test_without_isal_zlib_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "isal", None)
    try:
        importlib.reload(checksums)
        assert checksums.LIBRARY == "zlib"
        assert checksums.crc32(b"123456789") == 0xCBF43926
    finally:
        monkeypatch.undo()
        importlib.reload(checksums)
    assert checksums.crc32(b"123456789") == 0xCBF43926
