"""Blocks of a kvstore are mapped before they are copied: those that have memory, and no others."""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Iterator

import numpy as np
import pytest

from common.transfer import mapping, store_segment
from common.transfer.block_locks import try_lock_alone
from common.transfer.segment import Segment
from common.transfer.shm import StoreTransport
from common.transfer.store_segment import StoreSegment
from tests.fixtures.owned_segment import opened, owned_segment

PAGES = 512
BLOCK = PAGES * mmap.PAGESIZE


@pytest.fixture
def owned() -> Iterator[Segment]:
    with owned_segment(num_blocks=32, block_bytes=BLOCK) as made:
        yield made


@pytest.fixture
def segment(owned: Segment) -> StoreSegment:
    return opened(owned)


def grant(owned: Segment, block: int, *, written: bool = True) -> None:
    if written:
        owned.fill(block, bytes(BLOCK))
    owned.generations[block] += 1


def is_mapped(segment: StoreSegment, block: int) -> bool:
    """Whether reading every page of a block causes no faults, but for a few of others. 32 or more if it was not mapped."""
    assert segment._mapped is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    segment._mapped[block, :: mmap.PAGESIZE].sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 8


def never() -> bool:
    return False


def test_what_was_granted_is_mapped(owned: Segment, segment: StoreSegment) -> None:
    for block in (3, 4, 9):
        grant(owned, block)
    segment.map_granted(never)
    assert all(is_mapped(segment, block) for block in (3, 4, 9))
    grant(owned, 20)
    segment.map_granted(never)
    assert is_mapped(segment, 20)


def test_holes_stay_holes(owned: Segment, segment: StoreSegment) -> None:
    before = owned.memory_bytes
    for block in range(32):
        grant(owned, block, written=block % 3 == 0)
    segment.map_granted(never)
    assert owned.memory_bytes == before + 11 * BLOCK


@pytest.mark.parametrize("way", ["mincore", "lseek"])
def test_only_written_memory_counts(owned: Segment, segment: StoreSegment, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for by either of two system calls: one costs as much as the rest of the file is long, the other may not tell."""
    monkeypatch.setattr(mapping, "_tells_residents", lambda: way == "mincore")
    owned.fill(0, bytes(BLOCK))
    owned.back(1)
    owned.write_block(1, bytearray(b"x"))
    owned.back(2)
    owned.fill(4, bytes(BLOCK))
    before, whole = owned.memory_bytes, []
    for block in range(6):
        offset = owned._offset(block)
        assert segment._mapped is not None
        whole.append(mapping.map_written(owned._fd, offset, BLOCK, segment._mapped[block].ctypes.data))
    assert whole == [True, False, False, False, True, False]
    assert owned.memory_bytes == before


def test_mincore_tells_here() -> None:
    assert mapping._tells_residents()


def test_a_block_that_is_written_later_is_mapped_then(
    owned: Segment, segment: StoreSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_segment, "AHEAD_BYTES", 2 * BLOCK)
    grant(owned, 0)
    grant(owned, 1, written=False)
    segment.map_granted(never)
    owned.fill(1, bytes(BLOCK))
    segment.map_granted(never)
    assert is_mapped(segment, 0) and is_mapped(segment, 1)


def test_what_is_never_written_is_not_looked_at_for_ever(
    owned: Segment, segment: StoreSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_segment, "MAX_LOOKS", 3)
    looked = list[slice]()
    monkeypatch.setattr(segment, "_map_blocks", lambda part: bool(looked.append(part)))
    grant(owned, 5, written=False)
    for _ in range(6):
        segment.map_granted(never)
    assert len(looked) == 3


def test_a_block_whose_memory_is_being_taken_is_left_alone(owned: Segment, segment: StoreSegment) -> None:
    grant(owned, 2)
    with try_lock_alone(owned._fd, owned._offset(2), BLOCK):
        segment.map_granted(never)
    assert not is_mapped(segment, 2)


def test_it_ends_between_two_pieces(owned: Segment, segment: StoreSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_segment, "AHEAD_BYTES", BLOCK)
    for block in range(4):
        grant(owned, block)
    answers = iter([False, True])
    segment.map_granted(lambda: next(answers))
    assert np.flatnonzero(segment._seen).tolist() == [0]


def test_a_transport_maps_in_the_background_until_it_is_closed(owned: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "EVERY_S", 0.01)
    transport = StoreTransport(owned.path.parent)
    grant(owned, 7)
    with transport.lend("s", "f", BLOCK, [7], [1]):
        pass
    grant(owned, 8)
    segment, deadline = transport._segments.get("s", "f"), time.monotonic() + 5
    while not segment._seen[8] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_mapped(segment, 8)
    transport.close()
    transport.close()
    assert not transport._mapping._thread.is_alive()


def test_where_linux_can_not_it_is_one_line_in_the_log(
    owned: Segment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapping, "EVERY_S", 0.01)
    monkeypatch.setattr(mapping, "_POPULATE_READ", 12345)
    transport = StoreTransport(owned.path.parent)
    grant(owned, 7)
    with transport.lend("s", "f", BLOCK, [7], [1]) as lent:
        assert lent.shape == (32, BLOCK)
    transport._mapping._thread.join(5)
    assert not transport._mapping._thread.is_alive(), "it has given up"
    assert os.strerror(22) in caplog.text
    with transport.lend("s", "f", BLOCK, [7], [1]) as lent:
        assert not lent[7].any()
    transport.close()
