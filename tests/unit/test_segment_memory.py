"""Shared memory that runs out is an error before anything is written, and never the end of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from common.engine.load.open import open_engine
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError, StaleHandle, TransportUnavailable
from common.transfer.base import RemoteBlocks
from common.transfer.block_locks import can_lock, lock_to_copy, try_lock_alone
from common.transfer.segment import Segment
from common.transfer.segment_file import check_room, room_bytes
from common.transfer.shm import ShmTransport, StoreTransport
from common.transfer.store_segment import slot_bytes
from services.decode.config import DecodeConfig
from tests.fixtures.tmpfs import small_tmpfs

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "shm", size=8 * MIB) as directory:
        yield directory


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[Segment]:
    made = Segment.create(tmp_path, "kv", num_blocks=64, block_bytes=16 * PAGE, fingerprint="m", sparse=True)
    yield made
    made.close()


def test_a_segment_takes_all_its_memory_at_once_and_is_private(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path, "one", num_blocks=64, block_bytes=MIB // 4, fingerprint="m")
    assert segment.memory_bytes >= 16 * MIB
    assert segment.path.stat().st_mode & 0o777 == 0o600
    assert not segment.blocks.any()
    segment.close()


def test_a_second_segment_that_does_not_fit_is_refused_though_the_first_was_never_touched(tmpfs: Path) -> None:
    first = Segment.create(tmpfs, "a", num_blocks=5, block_bytes=MIB, fingerprint="m")
    with pytest.raises(ConfigError, match="room for 2 MiB more, and this worker's KV blocks need 6 MiB"):
        Segment.create(tmpfs, "b", num_blocks=5, block_bytes=MIB, fingerprint="m")
    assert [path.name for path in tmpfs.iterdir()] == ["penstock-a"], "what was begun is gone"
    first.blocks[:] = 7
    first.close()


def test_room_that_goes_between_the_look_and_the_taking_is_the_same_error(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.transfer.segment_file.check_room", lambda directory, size: None)
    with pytest.raises(ConfigError, match=r"needs? .* MiB \(No space left on device\): lower kv_cache_mb"):
        Segment.create(tmpfs, "a", num_blocks=9, block_bytes=MIB, fingerprint="m")
    assert not list(tmpfs.iterdir())
    check_room(tmpfs, 7 * MIB)


def test_a_full_tmpfs_kills_nobody_who_has_a_segment(tmpfs: Path) -> None:
    """Before, the pages came with the first write: the process got SIGBUS, and said nothing."""
    script = """
import sys
from common.transfer.segment import Segment
segment = Segment.create(sys.argv[1], "a", num_blocks=4, block_bytes=1 << 20, fingerprint="m")
sys.stdin.readline()
segment.blocks[:] = 7
segment.generations[:] = 1
sys.exit(segment.blocks[3, -1] == 7)
"""
    command = [sys.executable, "-c", script, str(tmpfs)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (tmpfs / "penstock-a").exists():
        assert owner.poll() is None
    with (tmpfs / "greedy").open("wb", buffering=0) as greedy, pytest.raises(OSError, match="No space"):
        while True:
            greedy.write(bytes(PAGE))
    owner.communicate("go\n", timeout=20)
    assert owner.returncode == 1


def test_a_sparse_segment_has_memory_for_what_was_backed_alone(sparse: Segment) -> None:
    empty = sparse.memory_bytes
    assert empty <= 2 * PAGE
    for block in (3, 4, 63):
        sparse.back(block)
    assert sparse.memory_bytes == empty + 3 * sparse.block_bytes
    sparse.unback(4)
    assert sparse.memory_bytes == empty + 2 * sparse.block_bytes
    assert sparse.blocks.shape == (64, 0), "nobody can touch by accident what has no memory"


def test_a_block_that_can_not_be_backed_is_refused_and_one_given_back_makes_room(tmpfs: Path) -> None:
    segment = Segment.create(tmpfs, "kv", num_blocks=64, block_bytes=MIB, fingerprint="m", sparse=True)
    for block in range(7):
        segment.back(block)
    with pytest.raises(ConfigError, match="No space left"):
        segment.back(7)
    segment.unback(2)
    segment.back(50)
    segment.close()


@pytest.mark.parametrize("of_a_store", [False, True], ids=["worker's", "store's"])
def test_a_reader_keeps_no_memory_of_an_owner_that_is_gone(tmpfs: Path, *, of_a_store: bool) -> None:
    """Else its successor finds no room, as long as nobody opens another segment."""
    first = Segment.create(tmpfs, "first", num_blocks=5, block_bytes=MIB, fingerprint="m", sparse=of_a_store)
    for block in range(5) if of_a_store else ():
        first.back(block)
    first.generations[:] = 1
    transport = StoreTransport(tmpfs) if of_a_store else ShmTransport(tmpfs)
    with closing(transport):
        remote = RemoteBlocks(transport.host, "first", "m", [4], [1])
        assert transport.read(remote, np.zeros((1, MIB), np.uint8), [0]) == MIB
        first.close()
        ends_at = time.monotonic() + 10
        while room_bytes(tmpfs) < 7 * MIB and time.monotonic() < ends_at:
            time.sleep(0.01)
        Segment.create(tmpfs, "second", num_blocks=5, block_bytes=MIB, fingerprint="m").close()


def stored(tmp_path: Path, segment: Segment, block: int, value: int, size: int) -> StoreTransport:
    transport = StoreTransport(tmp_path)
    transport.write(segment.name, "m", [block], np.full((1, size), value, np.uint8), [0])
    return transport


@pytest.mark.parametrize("said", [True, False], ids=["generations", "no-generations"])
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "file"])
@pytest.mark.parametrize("size", [16 * PAGE, 16 * PAGE - 100], ids=["whole-pages", "odd"])
def test_what_a_worker_writes_to_a_store_another_reads(
    tmp_path: Path, sparse: Segment, monkeypatch: pytest.MonkeyPatch, size: int, *, mapped: bool, said: bool
) -> None:
    if not mapped:
        monkeypatch.setattr("common.transfer.store_segment.can_lock", lambda fd: False)
    transport = StoreTransport(tmp_path)
    source = np.random.default_rng(1).integers(0, 256, (6, size), np.uint8)
    for block in (9, 10, 30):
        sparse.back(block)
        sparse.generations[block] = block
    transport.write("kv", "m", [9, 10, 30], source, [4, 5, 1], [9, 10, 30] if said else [])
    into = np.zeros((5, size), np.uint8)
    remote = RemoteBlocks(transport.host, "kv", "m", [10, 9, 30], [10, 9, 30])
    assert transport.read(remote, into, [0, 3, 4]) == 3 * size
    assert (into[[0, 3, 4]] == source[[5, 4, 1]]).all()
    assert not into[[1, 2]].any()


def test_a_reader_of_a_block_that_lost_its_memory_is_told_and_takes_none(tmp_path: Path, sparse: Segment) -> None:
    sparse.back(5)
    transport = stored(tmp_path, sparse, 5, 9, 16 * PAGE)
    sparse.generations[5] += 1
    sparse.unback(5)
    before = sparse.memory_bytes
    with pytest.raises(StaleHandle, match="reused"):
        transport.read(RemoteBlocks(transport.host, "kv", "m", [5], [0]), np.zeros((1, 16 * PAGE), np.uint8), [0])
    assert sparse.memory_bytes == before


def test_a_writer_whose_block_is_no_longer_its_own_is_told_and_takes_no_memory(tmp_path: Path, sparse: Segment) -> None:
    sparse.back(5)
    transport, rows = StoreTransport(tmp_path), np.ones((1, 16 * PAGE), np.uint8)
    transport.write("kv", "m", [5], rows, [0], [0])
    sparse.generations[5] += 1
    sparse.unback(5)
    before = sparse.memory_bytes
    with pytest.raises(StaleHandle, match="reused"):
        transport.write("kv", "m", [5], rows, [0], [0])
    assert sparse.memory_bytes == before


def test_a_block_keeps_its_memory_while_a_worker_copies_it(sparse: Segment) -> None:
    for block in (4, 5, 6):
        sparse.back(block)
    before, offset = sparse.memory_bytes, sparse._offset(5)
    with lock_to_copy(sparse._fd, [(offset, 1)]), lock_to_copy(sparse._fd, [(offset, sparse.block_bytes)]):
        with pytest.raises(BlockingIOError):
            sparse.unback(5)
        assert sparse.memory_bytes == before
        sparse.unback(4)
        sparse.unback(6)
    assert sparse.memory_bytes == before - 2 * sparse.block_bytes
    sparse.unback(5)
    assert sparse.memory_bytes == before - 3 * sparse.block_bytes


def test_a_block_that_is_losing_its_memory_is_stale(tmp_path: Path, sparse: Segment) -> None:
    sparse.back(5)
    transport, rows = StoreTransport(tmp_path), np.ones((1, 16 * PAGE), np.uint8)
    transport.write("kv", "m", [5], rows, [0], [0])
    with try_lock_alone(sparse._fd, sparse._offset(5), sparse.block_bytes):
        with pytest.raises(StaleHandle, match="losing its memory"):
            transport.write("kv", "m", [5], rows, [0], [0])
        with pytest.raises(StaleHandle, match="losing its memory"):
            transport.read(RemoteBlocks(transport.host, "kv", "m", [5], [0]), rows, [0])
    assert transport.read(RemoteBlocks(transport.host, "kv", "m", [5], [0]), rows, [0]) == 16 * PAGE


def test_a_worker_that_dies_while_it_copies_holds_nothing(sparse: Segment) -> None:
    script = """
import os, sys
from common.transfer.block_locks import lock_to_copy
with lock_to_copy(os.open(sys.argv[1], os.O_RDWR), [(0, 1 << 40)]):
    print("copying", flush=True)
    sys.stdin.readline()
"""
    sparse.back(5)
    command = [sys.executable, "-c", script, str(sparse.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "copying\n"
        with pytest.raises(BlockingIOError):
            sparse.unback(5)
        worker.kill()
    sparse.unback(5)


def test_where_there_are_no_such_locks_memory_is_taken_all_the_same(sparse: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_lock(sparse._fd)
    monkeypatch.setattr("common.transfer.block_locks._SETLK", None)
    assert not can_lock(sparse._fd)
    sparse.back(5)
    before = sparse.memory_bytes
    sparse.unback(5)
    assert sparse.memory_bytes == before - sparse.block_bytes


def test_a_writer_that_finds_no_memory_gets_an_error_and_lives(tmpfs: Path) -> None:
    segment = Segment.create(tmpfs, "kv", num_blocks=16, block_bytes=MIB, fingerprint="m", sparse=True)
    with (tmpfs / "greedy").open("wb") as greedy:
        os.posix_fallocate(greedy.fileno(), 0, 7 * MIB)
    with pytest.raises(TransportUnavailable, match="No space left"):
        stored(tmpfs, segment, 3, 9, MIB)
    segment.close()


@pytest.mark.parametrize(("blocks", "size"), [([64], 16 * PAGE), ([-1], 16 * PAGE), ([1], PAGE), ([1], 17 * PAGE)])
def test_blocks_that_are_not_there_are_stale(tmp_path: Path, sparse: Segment, blocks: list[int], size: int) -> None:
    transport = StoreTransport(tmp_path)
    rows = np.zeros((1, size), np.uint8)
    with pytest.raises(StaleHandle):
        transport.read(RemoteBlocks(transport.host, "kv", "m", blocks, [0]), rows, [0])
    with pytest.raises(StaleHandle):
        transport.write("kv", "m", blocks, rows, [0])


def test_a_cut_store_is_an_error_and_not_the_end(tmp_path: Path, sparse: Segment) -> None:
    transport = stored(tmp_path, sparse, 1, 9, 16 * PAGE)
    size = sparse.path.stat().st_size
    os.truncate(sparse.path, PAGE)
    with pytest.raises(TransportUnavailable, match="shorter"):
        transport.write("kv", "m", [1], np.zeros((1, 16 * PAGE), np.uint8), [0], [0])
    with pytest.raises(TransportUnavailable, match="shorter"):
        transport.read(RemoteBlocks(transport.host, "kv", "m", [1], [0]), np.zeros((1, 16 * PAGE), np.uint8), [0])
    os.truncate(sparse.path, size)


def test_a_slot_is_whole_pages() -> None:
    assert [slot_bytes(size) for size in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]


def test_an_engine_waits_for_the_memory_that_readers_still_have_of_a_dead_worker(
    tmpfs: Path, smollm2: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, looks = tmpfs / "held", 0
    held.write_bytes(bytes(5 * MIB))

    def look(directory: Path) -> int:
        nonlocal looks
        looks += 1
        if looks == 2:
            held.unlink()
        return room_bytes(directory)

    monkeypatch.setattr("common.transfer.segment_file.room_bytes", look)
    monkeypatch.setattr("common.transfer.segment_file.ROOM_WAIT_S", 5.0)
    config = DecodeConfig(model=str(smollm2.path), engine="simulated", kv_cache_mb=6, shm_dir=str(tmpfs), device="cpu")
    engine = open_engine(config, "second")
    engine.memory.segment.close()
