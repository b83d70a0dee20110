"""Large blocks through the ring: every byte, in any order of threads and copies, whatever the copy engine does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import pytest
import torch

from common.protocol.errors import TransportUnavailable
from common.transfer.checked_copies import CopyIn, CopyOut, prepare
from common.transfer.checksums import crc32
from common.transfer.host_stage import DIRECT_BYTES, HostStage
from common.transfer.stage_threads import StageThreads

if not prepare():
    pytest.skip("no compiled copies for this processor", allow_module_level=True)

NUM_BLOCKS = 24
BLOCK_BYTES = DIRECT_BYTES + 512
INT = ctypes.c_int64


class LazyEngine:
    """A copy engine that copies nothing before somebody waits for it, and then the latest possible.

    `fails_at`: the number of a copy that is refused.
    """

    def __init__(self, fails_at: int = 0) -> None:
        self.fails_at = fails_at
        self.num_copies = 0
        self._left: list[tuple[int, int, int]] = []
        self._recorded: dict[int, int] = {}
        self._done = 0
        self._lock = threading.Lock()
        self.calls = (
            ctypes.CFUNCTYPE(ctypes.c_int32, INT, INT, INT, INT)(self._copy),
            ctypes.CFUNCTYPE(ctypes.c_int32, INT, INT)(self._record),
            ctypes.CFUNCTYPE(ctypes.c_int32, INT)(self._synchronize),
        )

    def addresses(self) -> list[int]:
        return [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self.calls]

    def _copy(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        with self._lock:
            self.num_copies += 1
            if self.num_copies == self.fails_at:
                return 700
            self._left.append((target, source, num_bytes))
            return 0

    def _record(self, event: int, stream: int) -> int:
        with self._lock:
            self._recorded[event] = len(self._left)
            return 0

    def _synchronize(self, event: int) -> int:
        with self._lock:
            while self._done < self._recorded[event]:
                ctypes.memmove(*self._left[self._done])
                self._done += 1
            return 0

    @property
    def is_idle(self) -> bool:
        return self._done == len(self._left)


def use(stage: HostStage, engine: LazyEngine) -> None:
    """Have the stage copy with `engine`."""
    assert stage._large is not None
    stage._large._ring._functions[1:] = engine.addresses()
    for number, slot in enumerate(stage.threads._free):
        assert slot.handles is not None
        slot.handles.events[:] = np.arange(len(slot.handles.events)) + 100 * number


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)


@pytest.fixture(params=[1, 2, 5], ids=lambda blocks: f"slots-of-{blocks}")
def stage(request: pytest.FixtureRequest, pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostStage]:
    monkeypatch.setattr("common.transfer.host_stage.NUM_SLOTS", 3)
    made = HostStage([pool], 3 * (request.param * BLOCK_BYTES // 512 * 512))
    assert made._large is not None
    yield made
    assert made.num_free_slots == made.num_slots, "a slot was not given back"
    made.close()


@pytest.fixture
def memory() -> np.ndarray:
    """A store's: wider than a block."""
    return np.random.default_rng(7).integers(0, 256, (40, BLOCK_BYTES + 64), np.uint8)[:, :BLOCK_BYTES]


def ids(count: int, seed: int) -> list[int]:
    """Some of them consecutive."""
    chance = np.random.default_rng(seed)
    return [*range(2, 2 + count // 2), *(2 + count // 2 + chance.permutation(20 - count // 2)[: count - count // 2]).tolist()]


def sums(memory: np.ndarray, blocks: Sequence[int]) -> list[int]:
    return [crc32(memory[block].copy()) for block in blocks]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 17])
def test_blocks_come_in_although_the_engine_is_late(stage: HostStage, pool: torch.Tensor, memory: np.ndarray, count: int):
    engine = LazyEngine()
    use(stage, engine)
    blocks, theirs, expected = ids(count, 1), ids(count, 2)[::-1], pool.numpy().copy()
    expected[blocks] = memory[theirs]
    assert stage.groups[0].write(blocks, CopyIn(memory, theirs, sums(memory, theirs))) == count
    assert engine.is_idle
    assert (pool.numpy() == expected).all()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 17])
def test_blocks_go_out_although_the_engine_is_late(stage: HostStage, pool: torch.Tensor, memory: np.ndarray, count: int):
    engine = LazyEngine()
    use(stage, engine)
    blocks, theirs, expected = ids(count, 3), ids(count, 4)[::-1], memory.copy()
    expected[theirs] = pool.numpy()[blocks]
    found = stage.groups[0].read(blocks, CopyOut(memory, theirs))
    assert [checksum for part in found for checksum in part] == sums(pool.numpy(), blocks)
    assert engine.is_idle
    assert (memory == expected).all()


@pytest.mark.parametrize("bad", [0, 1, 6, 16])
def test_all_before_the_first_bad_block_are_there(stage: HostStage, pool: torch.Tensor, memory: np.ndarray, bad: int):
    blocks, theirs = ids(17, 5), ids(17, 6)
    checksums = sums(memory, theirs)
    memory[theirs[bad], -1] ^= 1
    memory[theirs[16], 0] ^= 1
    others = pool.numpy()[[block for block in range(NUM_BLOCKS) if block not in blocks]].copy()
    assert stage.groups[0].write(blocks, CopyIn(memory, theirs, checksums)) == bad
    assert (pool.numpy()[blocks[:bad]] == memory[theirs[:bad]]).all()
    assert (pool.numpy()[[block for block in range(NUM_BLOCKS) if block not in blocks]] == others).all()


@pytest.mark.parametrize("fails_at", [1, 2, 5])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_engine_that_fails_is_an_error_when_all_that_was_begun_has_ended(
    stage: HostStage, pool: torch.Tensor, memory: np.ndarray, operation: str, fails_at: int, monkeypatch: pytest.MonkeyPatch
):
    engine = LazyEngine(fails_at)
    use(stage, engine)
    blocks, waited = list(range(0, 24, 2)), list[int]()
    streams = {"read": SlowStream(waited), "write": SlowStream(waited)}
    for slot in stage.threads._free:
        cast("dict[str, SlowStream]", slot.streams).update(streams)
    take = CopyOut(memory, blocks) if operation == "read" else CopyIn(memory, blocks, sums(memory, blocks))
    with pytest.raises(TransportUnavailable, match="700"):
        getattr(stage.groups[0], operation)(blocks, take)
    assert waited, "what was begun without an event is waited for by stream"
    assert engine.is_idle
    engine.fails_at = 0
    assert stage.groups[0].write(blocks, CopyIn(memory, blocks, sums(memory, blocks))) == len(blocks), "it goes on"


class SlowStream:
    def __init__(self, waited: list[int]) -> None:
        self._waited = waited

    def synchronize(self) -> None:
        self._waited.append(1)


def test_a_ring_that_damages_blocks_is_not_used(pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    stage, content = HostStage([pool], 6 * BLOCK_BYTES), pool.clone()
    engine = LazyEngine()
    use(stage, engine)
    monkeypatch.setattr(engine, "_left", Forgetful())
    stage.check()
    assert stage._large is None
    assert (pool == content).all()
    stage.close()


class Forgetful(list[tuple[int, int, int]]):
    """Copies half of what it is told to."""

    def append(self, item: tuple[int, int, int]) -> None:
        super().append((item[0], item[1], item[2] // 2))


def test_what_is_read_stops_while_something_is_written():
    threads, began, go_on, order = StageThreads([0, 1]), threading.Event(), threading.Event(), list[tuple[str, int]]()

    def read(slot: int, part: range) -> int:
        began.set()
        go_on.wait(5)
        order.append(("read", part.start))
        return part.start

    def write(slot: int, part: range) -> int:
        order.append(("write", part.start))
        return part.start

    with ThreadPoolExecutor(2) as callers:
        reading = callers.submit(threads.in_parts, 8, 1, read, "read")
        began.wait()
        writing = callers.submit(threads.in_parts, 4, 1, write, "write")
        while not threads._precedence._running[0]:
            pass
        go_on.set()
        assert writing.result() == [0, 1, 2, 3]
        assert reading.result() == list(range(8))
    kinds = [kind for kind, _ in order]
    last_write = len(kinds) - 1 - kinds[::-1].index("write")
    assert kinds[:last_write].count("read") <= 2, "only what had begun goes on"
    threads.close()


def test_what_is_read_makes_progress_although_something_is_always_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("common.transfer.stage_threads.PATIENCE_S", 0.01)
    threads = StageThreads([0])
    with threads._precedence.first():
        assert threads.in_parts(3, 1, lambda slot, part: part.start, "read") == [0, 1, 2]
    threads.close()


def test_many_threads_read_and_write_at_once(stage: HostStage, pool: torch.Tensor):
    """Each has blocks of its own, and finds its own bytes there."""

    def write_and_read(number: int) -> bool:
        blocks, chance = [number * 4 + i for i in (3, 0, 2, 1)], np.random.default_rng(number)
        for _ in range(5):
            content, found = chance.integers(0, 256, (4, BLOCK_BYTES), np.uint8), np.zeros((4, BLOCK_BYTES), np.uint8)
            assert stage.groups[0].write(blocks, CopyIn(content, range(4), sums(content, range(4)))) == 4
            stage.groups[0].read(blocks, CopyOut(found, range(4)))
            if (found != content).any():
                return False
        return True

    with ThreadPoolExecutor(6) as callers:
        assert all(callers.map(write_and_read, range(6)))


def test_a_copy_finds_its_code_compiled(stage: HostStage, pool: torch.Tensor, memory: np.ndarray):
    """Compiling takes longer than a grant lasts, and holds up a worker's steps."""
    assert stage._large is not None
    ring = stage._large._ring
    stage.groups[0].write([1, 2], CopyIn(memory, [3, 4], sums(memory, [3, 4])))
    list(stage.groups[0].read([1, 2], CopyOut(memory, [5, 6])))
    ring.copy_each(np.array([pool[0].data_ptr()]), np.array([pool[1].data_ptr()]), 16, 0)
    kernels = ring._code.send_blocks, ring._code.receive_blocks, ring._code.copy_each
    assert [len(kernel.signatures) for kernel in kernels] == [1, 1, 1], "what the ring made ready is not what copies call"
