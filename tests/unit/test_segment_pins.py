"""A worker pins what of a kvstore's segment has all its memory, and lets go of it when the store wants some."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable, Iterator

import pytest

from common.transfer import mapping, segment_pins
from common.transfer.pinned_memory import PinnedMemory
from common.transfer.segment import Segment
from common.transfer.shm import StoreTransport
from common.transfer.store_segment import StoreSegment
from tests.fixtures.owned_segment import opened, owned_segment

BLOCK = 16 * mmap.PAGESIZE
EXTENT = 4


class Driver(PinnedMemory):
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        super().__init__(self.pinned.__setitem__, self.pinned.__delitem__)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_pins, "EXTENT_BYTES", EXTENT * BLOCK)
    monkeypatch.setattr(segment_pins, "PAUSE_S", 0.0)
    monkeypatch.setattr(segment_pins, "QUIET_S", 0.0)


@pytest.fixture
def owned() -> Iterator[Segment]:
    with owned_segment(num_blocks=18, block_bytes=BLOCK) as made:
        yield made


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def segment(owned: Segment, driver: Driver) -> StoreSegment:
    return opened(owned, driver)


def write(owned: Segment, *blocks: int, granted: bool = True) -> None:
    for block in blocks:
        owned.fill(block, bytes(BLOCK))
        owned.generations[block] += granted


def extents(segment: StoreSegment, driver: Driver) -> list[int]:
    assert segment._mapped is not None
    return sorted((address - segment._mapped.ctypes.data) // (EXTENT * BLOCK) for address in driver.pinned)


def look(segment: StoreSegment) -> None:
    segment.map_granted(lambda: False)


def test_extents_with_all_their_memory_are_pinned(owned: Segment, segment: StoreSegment, driver: Driver) -> None:
    write(owned, 0, 1, 2, 4, 5, 6, 7, 9, 16, 17)
    look(segment)
    assert extents(segment, driver) == [1, 4]
    assert sorted(driver.pinned.values()) == [2 * BLOCK, 4 * BLOCK], "the last one is shorter"
    write(owned, 3)
    look(segment)
    assert extents(segment, driver) == [0, 1, 4]


def test_memory_that_was_taken_ahead_is_pinned_before_it_is_granted(
    owned: Segment, segment: StoreSegment, driver: Driver
) -> None:
    write(owned, *range(9), granted=False)
    look(segment)
    assert extents(segment, driver) == [0, 1]
    owned.back(9)  # memory that nobody has written
    owned.back(10)
    owned.back(11)
    look(segment)
    assert extents(segment, driver) == [0, 1]


def test_pinning_takes_no_memory(owned: Segment, segment: StoreSegment, driver: Driver) -> None:
    write(owned, 0, 2, 4, 5, 6, 7, 10)
    before = owned.memory_bytes
    look(segment)
    assert owned.memory_bytes == before and extents(segment, driver) == [1]


def test_the_store_takes_no_memory_that_is_pinned(owned: Segment, segment: StoreSegment, driver: Driver) -> None:
    write(owned, *range(5))
    look(segment)
    owned.unback(4)
    with pytest.raises(BlockingIOError):
        owned.unback(2)
    look(segment)
    assert extents(segment, driver) == [0], "nobody said that it is wanted"


def test_everything_is_let_go_where_the_store_wants_memory(
    owned: Segment, segment: StoreSegment, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(owned, *range(12))
    look(segment)
    assert extents(segment, driver) == [0, 1, 2]
    assert segment._pins is not None
    segment._pins._quiet_s = 3600.0
    owned.progress[0] += 1
    look(segment)
    assert extents(segment, driver) == []
    owned.unback(5)
    look(segment)
    assert extents(segment, driver) == [], "not at once again"
    segment._pins._quiet_until = 0.0
    look(segment)
    assert extents(segment, driver) == [0, 2]
    write(owned, 5)
    look(segment)
    assert extents(segment, driver) == [0, 1, 2]


def test_it_says_when_there_is_more_than_it_may_pin_at_once(
    owned: Segment, segment: StoreSegment, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(owned, *range(8))
    with monkeypatch.context() as short:
        short.setattr(segment_pins, "BUSY_S", 0.0)
        assert segment.map_granted(lambda: False)
        assert not segment.map_granted(lambda: True), "nobody wants it to go on"
        assert extents(segment, driver) == []
    assert not segment.map_granted(lambda: False)
    assert extents(segment, driver) == [0, 1]


def test_each_time_it_waits_longer(owned: Segment, segment: StoreSegment) -> None:
    pins = segment._pins
    assert pins is not None
    pins._quiet_s = 1000.0
    waited = []
    for _ in range(4):
        owned.progress[0] += 1
        look(segment)
        waited.append(pins._quiet_s)
    assert waited == [2000, 3600, 3600, 3600]


def test_nothing_stays_pinned_of_a_segment_that_is_gone(owned: Segment, segment: StoreSegment, driver: Driver) -> None:
    write(owned, *range(4))
    look(segment)
    assert driver.pinned
    owned.close()
    look(segment)
    assert not driver.pinned


def test_it_is_unpinned_before_it_is_unmapped(owned: Segment, driver: Driver) -> None:
    write(owned, *range(4))
    segment = opened(owned, driver)
    look(segment)
    assert driver.pinned
    del segment
    gc.collect()
    assert not driver.pinned
    owned.unback(0)  # and unlocked


def test_nothing_stays_pinned_where_nobody_looks_any_more(
    owned: Segment, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that maps ends where Linux can't, and the store's wish for memory would be heard by nobody."""
    monkeypatch.setattr(mapping, "EVERY_S", 0.01)
    transport = StoreTransport(owned.path.parent, driver)
    write(owned, *range(8))
    with transport.lend("s", "f", BLOCK, [7], [1]):
        pass
    wait_until(lambda: len(driver.pinned) == 2)
    monkeypatch.setattr(mapping, "_POPULATE_READ", 12345)
    write(owned, 9)
    wait_until(lambda: not driver.pinned)
    transport._mapping._thread.join(5)
    assert not transport._mapping._thread.is_alive()
    owned.unback(0)
    transport.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_asked_for_where_it_was_refused(owned: Segment, segment: StoreSegment, driver: Driver) -> None:
    driver.give_up()
    write(owned, *range(8))
    look(segment)
    assert not driver.pinned
    owned.unback(0)
