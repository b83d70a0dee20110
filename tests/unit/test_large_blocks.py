"""Large blocks pass by the copy engine alone where a kvstore's memory is pinned, by the stage's slots where it is not, and both
in one call where some of it is."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from common.protocol.errors import TransportUnavailable
from common.transfer import direct_copies
from common.transfer.checked_copies import CopyIn, CopyOut
from common.transfer.checksums import crc32
from common.transfer.host_stage import DIRECT_BYTES, HostStage
from common.transfer.pinned_memory import PinnedMemory

BLOCK = DIRECT_BYTES
NUM_BLOCKS = 12
PINNED = {"none": range(0), "all": range(NUM_BLOCKS), "every other": range(0, NUM_BLOCKS, 2), "the first": range(3)}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pool(device: str) -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BLOCKS, BLOCK), dtype=torch.uint8).to(device)


@pytest.fixture
def memory() -> np.ndarray:
    """A kvstore's, in pages."""
    memory = np.frombuffer(mmap.mmap(-1, NUM_BLOCKS * BLOCK), np.uint8).reshape(NUM_BLOCKS, BLOCK)
    memory[:] = np.random.default_rng(3).integers(0, 256, memory.shape, np.uint8)
    return memory


@pytest.fixture
def stage(pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostStage]:
    monkeypatch.setattr(direct_copies, "PART_BYTES", 4 * BLOCK)
    made = HostStage([pool], 8 * BLOCK)
    assert made._large is not None
    if made.pinned is None:  # host memory in the GPU's place
        made._large.pinned = PinnedMemory(lambda address, num_bytes: None, lambda address: None)
    made.check()
    yield made
    assert made.num_free_slots == made.num_slots
    made.close()


@pytest.fixture(params=PINNED)
def pinned(request: pytest.FixtureRequest, stage: HostStage, memory: np.ndarray) -> Iterator[str]:
    assert stage.pinned is not None
    for block in PINNED[request.param]:
        assert stage.pinned.pin(memory[block].ctypes.data, BLOCK)
    yield request.param
    for block in PINNED[request.param]:
        stage.pinned.unpin(memory[block].ctypes.data)


def sums(memory: np.ndarray, blocks: Sequence[int]) -> list[int]:
    return [crc32(memory[block].copy()) for block in blocks]


MINE, THEIRS = [3, 4, 5, 0, 9, 11, 1, 2, 8], [7, 2, 0, 1, 10, 6, 5, 4, 3]


@pytest.mark.usefixtures("pinned")
def test_blocks_come_in(stage: HostStage, pool: torch.Tensor, memory: np.ndarray):
    expected = pool.cpu().numpy().copy()
    expected[MINE] = memory[THEIRS]
    assert stage.groups[0].write(MINE, CopyIn(memory, THEIRS, sums(memory, THEIRS))) == len(MINE)
    assert (pool.cpu().numpy() == expected).all()


@pytest.mark.usefixtures("pinned")
def test_blocks_go_out(stage: HostStage, pool: torch.Tensor, memory: np.ndarray):
    expected, content = memory.copy(), pool.cpu().numpy().copy()
    expected[THEIRS] = content[MINE]
    found = stage.groups[0].read(MINE, CopyOut(memory, THEIRS))
    assert [checksum for part in found for checksum in part] == sums(content, MINE)
    assert (memory == expected).all() and (pool.cpu().numpy() == content).all()


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("bad", [[0], [1], [4, 2], [8], [7, 8], [5, 6]])
def test_all_before_the_first_bad_block_are_there(stage: HostStage, pool: torch.Tensor, memory: np.ndarray, bad: list[int]):
    checksums = sums(memory, THEIRS)
    for position in bad:
        memory[THEIRS[position], 1000] ^= 1
    others = [block for block in range(NUM_BLOCKS) if block not in MINE]
    content = pool.cpu().numpy()[others]
    first = min(bad)
    assert stage.groups[0].write(MINE, CopyIn(memory, THEIRS, checksums)) == first
    assert (pool.cpu().numpy()[MINE[:first]] == memory[THEIRS[:first]]).all()
    assert (pool.cpu().numpy()[others] == content).all()


def test_pinned_memory_passes_no_slot(stage: HostStage, pinned: str, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    through = list[int]()
    large = stage._large
    assert large is not None
    in_ring = large._in_ring
    monkeypatch.setattr(
        large, "_in_ring", lambda pool, blocks, copy: through.extend(copy.blocks) or in_ring(pool, blocks, copy)
    )
    stage.groups[0].write(MINE, CopyIn(memory, THEIRS, sums(memory, THEIRS)))
    assert through == [block for block in THEIRS if block not in PINNED[pinned]]


def test_copies_of_many_requests_do_not_mix(stage: HostStage, pool: torch.Tensor, memory: np.ndarray):
    """Their copies are launched in the same streams."""
    assert stage.pinned is not None
    stage.pinned.pin(memory.ctypes.data, memory.nbytes)
    content = pool.cpu().numpy().copy()
    into, out = range(NUM_BLOCKS // 2), range(NUM_BLOCKS // 2, NUM_BLOCKS)

    def fetch(block: int) -> bool:
        return stage.groups[0].write([block], CopyIn(memory, [block], sums(memory, [block]))) == 1

    def offer(block: int) -> bool:
        return stage.groups[0].read([block], CopyOut(memory, [block])) == [sums(content, [block])]

    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            assert all([*threads.map(fetch, into), *threads.map(offer, out)])
    found = pool.cpu().numpy()
    assert (found[into] == memory[into]).all() and (memory[out] == content[out]).all() and (found[out] == content[out]).all()
    stage.pinned.unpin(memory.ctypes.data)


def test_copies_out_of_a_gpu_are_made_in_turn(stage: HostStage, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    """Those into it side by side: a request waits for them, and they don't slow each other down."""
    assert stage.pinned is not None
    stage.pinned.pin(memory.ctypes.data, memory.nbytes)
    copy, running, most = direct_copies.DirectCopies._in_parts, list[str](), dict[str, int]()
    both = threading.Barrier(2)

    def noting(self: direct_copies.DirectCopies, *given: Any) -> Any:
        operation = given[-1]
        running.append(operation)
        most[operation] = max(most.get(operation, 0), running.count(operation))
        if operation == "write":
            both.wait(10)
        else:
            time.sleep(0.05)
        try:
            return copy(self, *given)
        finally:
            running.remove(operation)

    monkeypatch.setattr(direct_copies.DirectCopies, "_in_parts", noting)
    blocks = range(NUM_BLOCKS)
    with ThreadPoolExecutor(2) as threads:
        out = [threads.submit(stage.groups[0].read, blocks, CopyOut(memory, blocks)) for _ in range(2)]
        sums = [one.result(30)[0] for one in out]
        into = [threads.submit(stage.groups[0].write, blocks, CopyIn(memory, blocks, sums[0])) for _ in range(2)]
        assert [one.result(30) for one in into] == [NUM_BLOCKS, NUM_BLOCKS]
    assert sums[0] == sums[1] and most == {"read": 1, "write": 2}
    stage.pinned.unpin(memory.ctypes.data)  # or the next memory at this address can't be pinned


@pytest.mark.usefixtures("pinned")
def test_a_driver_without_batches_makes_a_copy_at_a_time(
    stage: HostStage, pool: torch.Tensor, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    assert stage._large is not None
    if (driver := stage._large._ring.driver) is not None:
        monkeypatch.setattr(driver, "copy_batch", lambda *_: False)
    assert stage.groups[0].write(MINE, CopyIn(memory, THEIRS, sums(memory, THEIRS))) == len(MINE)
    assert (pool.cpu().numpy()[MINE] == memory[THEIRS]).all()


def test_an_engine_that_fails_is_an_error(stage: HostStage, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    assert stage.pinned is not None and stage._large is not None
    stage.pinned.pin(memory.ctypes.data, memory.nbytes)

    def fails(*_: object) -> None:
        raise TransportUnavailable("CUDA error 700")

    with monkeypatch.context() as broken:
        broken.setattr(stage._large._ring, "copy_each", fails)
        for copy in (CopyIn(memory, THEIRS, sums(memory, THEIRS)), CopyOut(memory, THEIRS)):
            with pytest.raises(TransportUnavailable, match="700"):
                stage.large(stage.groups[0].pool, MINE, copy)
    assert stage.groups[0].write(MINE, CopyIn(memory, THEIRS, sums(memory, THEIRS))) == len(MINE)
    stage.pinned.unpin(memory.ctypes.data)  # nobody uses it any more


def test_nothing_is_pinned_where_checksums_are_wrong(stage: HostStage, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    assert stage._large is not None
    monkeypatch.setattr(stage._large._direct, "checksums", lambda pool, blocks: np.ones(len(blocks), np.int64))
    stage.check()
    assert stage.pinned is None and stage.groups[0].pinned is None
    assert stage.groups[0].write(MINE, CopyIn(memory, THEIRS, sums(memory, THEIRS))) == len(MINE)


def test_nothing_is_pinned_where_that_is_not_wanted(pool: torch.Tensor):
    stage = HostStage([pool], 8 * BLOCK, pins=False)
    stage.check()
    assert stage.pinned is None
    stage.close()
