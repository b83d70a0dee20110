"""Shared-memory segments: read by other processes, never wrong, and gone when their owner is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.cache.pool import BlockPool
from common.protocol.errors import ConfigError, StaleHandle, TransportUnavailable
from common.transfer import shm
from common.transfer.base import RemoteBlocks, copy_blocks, runs
from common.transfer.memory import Faults, MemoryFabric, MemoryTransport
from common.transfer.segment import Segment
from common.transfer.segment_file import sweep
from common.transfer.shm import ShmTransport

OWNER = """
import sys, time
from common.transfer.segment import Segment
segment = Segment.create(sys.argv[1], "other", num_blocks=4, block_bytes=1000, fingerprint="m")
segment.blocks[2] = 42
segment.generations[2] = 7
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    made = Segment.create(tmp_path, "one", num_blocks=8, block_bytes=100, fingerprint="m")
    yield made
    made.close()


@pytest.fixture
def owner_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def read(transport: ShmTransport, name: str, blocks: list[int], generations: list[int], *, fingerprint: str = "m"):
    into = np.zeros((len(blocks), 100), np.uint8)
    transport.read(RemoteBlocks(transport.host, name, fingerprint, blocks, generations), into, range(len(blocks)))
    return into


def test_a_reader_gets_what_the_owner_wrote(tmp_path: Path, segment: Segment):
    pool = BlockPool(8, 16, segment.generations)
    blocks = pool.allocate(3)
    for block in blocks:
        segment.blocks[block] = block + 1
    transport = ShmTransport(tmp_path)
    got = read(transport, "one", blocks, pool.generations_of(blocks))
    assert got[:, 0].tolist() == got[:, -1].tolist() == [block + 1 for block in blocks]
    transport.close()


def test_a_block_reused_before_the_copy_is_stale(tmp_path: Path, segment: Segment):
    pool = BlockPool(8, 16, segment.generations)
    blocks = pool.allocate(2)
    generations = pool.generations_of(blocks)
    pool.release(blocks)
    assert read(ShmTransport(tmp_path), "one", blocks, generations).shape == (2, 100), "free, but not reused: still right"
    pool.allocate(1)
    with pytest.raises(StaleHandle, match="reused"):
        read(ShmTransport(tmp_path), "one", blocks, generations)


def test_a_block_reused_during_the_copy_is_stale(tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch):
    pool = BlockPool(8, 16, segment.generations)
    blocks = pool.allocate(2)
    generations = pool.generations_of(blocks)

    def slow_copy(source: np.ndarray, source_blocks: list[int], target: np.ndarray, target_blocks: list[int]) -> int:
        pool.release(blocks)
        pool.allocate(1)
        return copy_blocks(source, source_blocks, target, target_blocks)

    monkeypatch.setattr(shm, "copy_blocks", slow_copy)
    with pytest.raises(StaleHandle, match="reused"):
        read(ShmTransport(tmp_path), "one", blocks, generations)


def test_a_racing_writer_never_makes_a_reader_believe_torn_bytes(tmp_path: Path):
    """The owner reuses one block as fast as it can, and hands out a handle once it has written."""
    segment = Segment.create(tmp_path, "race", num_blocks=1, block_bytes=1 << 16, fingerprint="m")
    pool = BlockPool(1, 16, segment.generations)
    stop = threading.Event()
    handles: list[int] = []
    handed_out = threading.Event()

    def write() -> None:
        while not stop.is_set():
            (block,) = pool.allocate(1)
            (generation,) = pool.generations_of([block])
            segment.blocks[block] = generation % 251
            handles.append(generation)
            handed_out.set()
            stop.wait(0.001)
            pool.release([block])

    writer = threading.Thread(target=write)
    writer.start()
    assert handed_out.wait(10)
    transport = ShmTransport(tmp_path)
    into = np.zeros((1, 1 << 16), np.uint8)
    good = 0
    try:
        for _ in range(500):
            generation = handles[-1]
            try:
                transport.read(RemoteBlocks(transport.host, "race", "m", [0], [generation]), into, [0])
            except StaleHandle:
                continue
            good += 1
            assert np.unique(into).tolist() == [generation % 251]
    finally:
        stop.set()
        writer.join()
        transport.close()
        segment.close()
    assert good


def test_another_process_can_be_read(tmp_path: Path, owner_process: subprocess.Popen[str]):
    with pytest.raises(StaleHandle, match="bytes"):
        read(ShmTransport(tmp_path), "other", [2], [7])
    transport = ShmTransport(tmp_path)
    into = np.zeros((3, 1000), np.uint8)
    assert transport.read(RemoteBlocks(transport.host, "other", "m", [2], [7]), into, [1]) == 1000
    assert into.sum(axis=1).tolist() == [0, 42_000, 0]


def test_a_killed_owner_is_swept_and_a_live_one_is_not(tmp_path: Path, owner_process: subprocess.Popen[str], segment: Segment):
    assert sweep(tmp_path) == []
    owner_process.send_signal(signal.SIGKILL)
    owner_process.wait()
    assert sweep(tmp_path) == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["penstock-one"]
    assert segment.is_current()


def test_a_name_that_a_live_worker_owns_is_refused(tmp_path: Path, segment: Segment):
    with pytest.raises(ConfigError, match="another worker_id"):
        Segment.create(tmp_path, "one", num_blocks=1, block_bytes=1, fingerprint="m")
    assert segment.is_current()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_restarted_owner_takes_its_name_back_and_readers_notice(tmp_path: Path, owner_process: subprocess.Popen[str]):
    transport = ShmTransport(tmp_path)
    into = np.zeros((1, 1000), np.uint8)
    transport.read(RemoteBlocks(transport.host, "other", "m", [2], [7]), into, [0])
    owner_process.kill()
    owner_process.wait()
    again = Segment.create(tmp_path, "other", num_blocks=4, block_bytes=1000, fingerprint="m")
    with pytest.raises(StaleHandle):
        transport.read(RemoteBlocks(transport.host, "other", "m", [2], [7]), into, [0])
    again.close()


def test_close_leaves_no_file_and_is_harmless_twice(tmp_path: Path, segment: Segment):
    segment.close()
    segment.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TransportUnavailable):
        read(ShmTransport(tmp_path), "one", [0], [0])


def test_views_may_outlive_the_segment(tmp_path: Path, segment: Segment):
    segment.blocks[1] = 9
    view = segment.blocks[1]
    segment.close()
    assert view.sum() == 900
    Segment.create(tmp_path, "one", num_blocks=1, block_bytes=1, fingerprint="m").close()


def test_a_reader_cannot_write(tmp_path: Path, segment: Segment):
    reader = Segment.open(tmp_path, "one", fingerprint="m")
    with pytest.raises(ValueError, match="read-only"):
        reader.blocks[0] = 1
    reader.close()
    assert segment.is_current(), "a reader's close unlinks nothing"


def test_another_models_segment_is_stale(tmp_path: Path, segment: Segment):
    with pytest.raises(StaleHandle, match="another model"):
        Segment.open(tmp_path, segment.name, fingerprint="n")


@pytest.mark.parametrize(
    ("offset", "data"),
    [(0, b"GARBAGE!"), (8, b"\xff\xff\xff\xff"), (16, b"\xff" * 8), (32, b"\x01")],
    ids=["magic", "version", "num_blocks", "offset"],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, segment: Segment, offset: int, data: bytes):
    with segment.path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    with pytest.raises(TransportUnavailable):
        Segment.open(tmp_path, "one", fingerprint="m")


def test_a_cut_file_is_refused(tmp_path: Path, segment: Segment):
    os.truncate(segment.path, 10)
    with pytest.raises(TransportUnavailable, match="not a Penstock segment"):
        Segment.open(tmp_path, "one", fingerprint="m")
    os.truncate(segment.path, 4096 + 800)


@pytest.mark.parametrize("name", ["", "../one", "a/b", "a b", "x" * 129])
def test_a_name_from_the_wire_cannot_leave_the_directory(tmp_path: Path, name: str):
    with pytest.raises(TransportUnavailable):
        Segment.open(tmp_path, name, fingerprint="m")


def test_another_host_is_out_of_reach(tmp_path: Path, segment: Segment):
    with pytest.raises(TransportUnavailable, match="host"):
        ShmTransport(tmp_path).read(RemoteBlocks("elsewhere", "one", "m", [], []), np.zeros((0, 100), np.uint8), [])


@pytest.mark.parametrize(("blocks", "generations"), [([8], [0]), ([-1], [0]), ([0, 1], [0])])
def test_a_handle_that_makes_no_sense_is_stale(tmp_path: Path, segment: Segment, blocks: list[int], generations: list[int]):
    with pytest.raises(StaleHandle):
        read(ShmTransport(tmp_path), segment.name, blocks, generations)


def test_too_little_shared_memory_says_what_to_do(tmp_path: Path):
    blocks = shutil.disk_usage(tmp_path).total // (1 << 20)
    with pytest.raises(ConfigError, match="shm_size"):
        Segment.create(tmp_path, "big", num_blocks=blocks + 1, block_bytes=1 << 20, fingerprint="m")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_says_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match="shm_dir"):
        Segment.create(tmp_path / "none", "a", num_blocks=1, block_bytes=1, fingerprint="m")
    with pytest.raises(ConfigError, match="shm_dir"):
        shm.host_id(tmp_path / "none")


def test_host_ids_tell_two_filesystems_apart(tmp_path: Path):
    assert shm.host_id(tmp_path) == shm.host_id(tmp_path) != shm.host_id("/proc")


def test_consecutive_blocks_are_one_copy():
    assert list(runs([3, 4, 5, 9, 10], [0, 1, 2, 3, 5])) == [(3, 0, 3), (9, 3, 1), (10, 5, 1)]
    assert list(runs([], [])) == []


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (Faults(fail_every=2), TransportUnavailable),
        (Faults(truncate_every=2), TransportUnavailable),
        (Faults(stale_every=2), StaleHandle),
    ],
)
def test_the_fake_transport_fails_when_it_is_told_to(faults: Faults, error: type[Exception]):
    fabric, slept = MemoryFabric(), []
    fabric.add("h", "s", "m", np.full((4, 10), 5, np.uint8), np.ones(4, np.uint64))
    transport = MemoryTransport(fabric, faults, sleep=slept.append)
    into = np.zeros((2, 10), np.uint8)
    for _ in range(2):
        assert transport.read(RemoteBlocks("h", "s", "m", [1, 2], [1, 1]), into, [0, 1]) == 20
        with pytest.raises(error, match="injected"):
            transport.read(RemoteBlocks("h", "s", "m", [1, 2], [1, 1]), into, [0, 1])
    fabric.remove("h", "s")
    with pytest.raises(TransportUnavailable, match="no segment"):
        transport.read(RemoteBlocks("h", "s", "m", [1], [1]), into, [0])
    assert slept == []
