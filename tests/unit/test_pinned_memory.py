"""What is pinned is known by its addresses, and stays pinned while it is used."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from common.protocol.errors import TransportUnavailable
from common.transfer.pinned_memory import PinnedMemory


class Driver:
    def __init__(self, limit: int = 1 << 40) -> None:
        self.pinned: dict[int, int] = {}
        self.limit = limit
        self.calls = 0

    def register(self, address: int, num_bytes: int) -> None:
        self.calls += 1
        if sum(self.pinned.values()) + num_bytes > self.limit:
            raise TransportUnavailable("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY")
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def memory(driver: Driver) -> PinnedMemory:
    return PinnedMemory(driver.register, driver.unregister)


def pinned(memory: PinnedMemory, *addresses: int, num_bytes: int = 10) -> list[bool]:
    with memory.used(np.array(addresses, np.int64), num_bytes) as found:
        return found.tolist()


def test_whole_blocks_count(memory: PinnedMemory, driver: Driver) -> None:
    assert pinned(memory, 0, 100) == [False, False]
    assert memory.pin(200, 50)
    assert memory.pin(100, 50)
    assert pinned(memory, 90, 95, 100, 140, 141, 150, 199, 200, 240, 250) == [
        *[False] * 2,
        True,
        True,
        *[False] * 3,
        True,
        True,
        False,
    ]
    assert pinned(memory) == []
    assert memory.num_bytes == 100 and driver.pinned == {100: 50, 200: 50}
    memory.unpin(100)
    memory.unpin(100)
    memory.unpin(7)
    assert pinned(memory, 100, 200) == [False, True] and driver.pinned == {200: 50}


def test_a_block_across_two_ranges_is_not_pinned(memory: PinnedMemory) -> None:
    """One copy may not cross what was pinned apart."""
    memory.pin(100, 50)
    memory.pin(150, 50)
    assert pinned(memory, 100, 145, 150) == [True, False, True]


def test_what_is_used_is_unpinned_afterwards(memory: PinnedMemory, driver: Driver) -> None:
    memory.pin(100, 50)
    memory.pin(200, 50)
    with memory.used(np.array([100, 110, 300], np.int64), 10) as found:
        assert found.tolist() == [True, True, False]
        waits = threading.Thread(target=memory.unpin, args=(100,))
        waits.start()
        memory.unpin(200)
        time.sleep(0.05)
        assert driver.pinned == {100: 50}
        assert pinned(memory, 100) == [False], "nobody begins to use it any more"
    waits.join(5)
    assert driver.pinned == {}


def test_after_a_refusal_nothing_more_is_asked_for() -> None:
    driver = Driver(limit=60)
    memory = PinnedMemory(driver.register, driver.unregister)
    assert [memory.pin(address, 50) for address in (0, 100, 200)] == [True, False, False]
    assert driver.calls == 2 and memory.refused
    assert pinned(memory, 0, 100) == [True, False], "what is pinned is used"
    memory.unpin(0)
    assert driver.pinned == {}


def test_a_gpu_that_hangs_is_not_waited_for(memory: PinnedMemory, driver: Driver) -> None:
    memory.pin(100, 50)
    with memory.used(np.array([100], np.int64), 10):
        waits = threading.Thread(target=memory.unpin, args=(100,))
        waits.start()
        memory.give_up()
        waits.join(5)
        assert not waits.is_alive() and driver.pinned == {100: 50}
    assert not memory.pin(200, 50)
