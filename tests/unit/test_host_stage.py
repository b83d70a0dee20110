"""Blocks through the stage: every byte of each, whoever fails meanwhile. With host memory in a GPU's place, and on a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from common.protocol.errors import TransportUnavailable
from common.runtime.metrics import Metrics
from common.transfer.block_memory import BlockMemory, HostBlocks
from common.transfer.host_stage import (
    AT_ONCE_BYTES,
    CORES_PER_THREAD,
    DIRECT_BYTES,
    NUM_SLOTS,
    WAITING_THREADS,
    HostStage,
    open_stage,
)
from common.transfer.measured import TransferCounts

BLOCK = (2, 2, 4, 1, 8)  # layers, K and V, tokens, heads, head_dim
BLOCK_BYTES = 2 * 2 * 4 * 8 * 2
WIDE = (2, 2, 4, 3, 8)
STAGE_BYTES = NUM_SLOTS * 1024  # slots of four blocks, or of one wide one

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


def random_pool(num_blocks: int, device: str, shape: tuple[int, ...] = BLOCK) -> torch.Tensor:
    return torch.randn(num_blocks, *shape).to(torch.bfloat16).to(device)


def bytes_of(pool: torch.Tensor) -> np.ndarray:
    return pool.view(torch.uint8).flatten(1).cpu().numpy().copy()


def rows_of(rows: np.ndarray, indices: Sequence[int], part: range) -> np.ndarray:
    assert len(indices) == len(part)
    return rows[list(indices)].copy()


def putting(content: np.ndarray):
    """Fills blocks with the rows of `content`."""

    def fill(rows: np.ndarray, indices: Sequence[int], part: range) -> int:
        for index, position in zip(indices, part, strict=True):
            rows[index] = content[position]
        return len(part)

    return fill


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pool(device: str) -> torch.Tensor:
    return random_pool(40, device)


@pytest.fixture
def stage(pool: torch.Tensor, device: str) -> Iterator[HostStage]:
    made = HostStage([pool, random_pool(5, device, WIDE)], STAGE_BYTES)
    yield made
    assert made.num_free_slots == made.num_slots, "a slot was not given back"
    made.close()


@pytest.fixture(params=["host", "staged"])
def memory(request: pytest.FixtureRequest, stage: HostStage, pool: torch.Tensor) -> BlockMemory:
    if request.param == "staged":
        return stage.groups[0]
    if pool.is_cuda:
        pytest.skip("its blocks are not in host memory")
    return HostBlocks(pool.view(torch.uint8).flatten(1).numpy())


def test_what_it_is_made_of(stage: HostStage, memory: BlockMemory):
    assert (memory.num_blocks, memory.block_bytes) == (40, BLOCK_BYTES)
    num_threads = len(os.sched_getaffinity(0)) // CORES_PER_THREAD + WAITING_THREADS
    assert (stage.num_slots, stage.slot_bytes) == (min(NUM_SLOTS, num_threads), 1024)
    assert [group.num_at_once for group in stage.groups] == [AT_ONCE_BYTES // group.block_bytes for group in stage.groups]


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 4, 5, 33, 40])
def test_blocks_are_read_in_order(memory: BlockMemory, pool: torch.Tensor, num_blocks: int):
    blocks = np.random.default_rng(num_blocks).permutation(40)[:num_blocks].tolist()
    parts = memory.read(blocks, rows_of)
    found = np.concatenate(parts) if parts else np.empty((0, BLOCK_BYTES), np.uint8)
    assert (found == bytes_of(pool)[blocks]).all()


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 4, 5, 33, 40])
def test_blocks_are_written_and_no_others(memory: BlockMemory, pool: torch.Tensor, num_blocks: int):
    chance = np.random.default_rng(num_blocks)
    blocks = chance.permutation(40)[:num_blocks].tolist()
    content = chance.integers(0, 256, (num_blocks, BLOCK_BYTES), np.uint8)
    expected = bytes_of(pool)
    expected[blocks] = content
    assert memory.write(blocks, putting(content)) == num_blocks
    assert (bytes_of(pool) == expected).all()


def test_groups_have_blocks_of_their_own_size(stage: HostStage):
    wide = stage.groups[1]
    content = np.random.default_rng(1).integers(0, 256, (5, wide.block_bytes), np.uint8)
    assert wide.write([4, 0, 2, 1, 3], putting(content)) == 5
    assert (np.concatenate(wide.read([4, 0, 2, 1, 3], rows_of)) == content).all()


def test_large_blocks_and_small_ones_come_as_they_were_and_go_where_they_belong(device: str):
    """Large ones are copied one by one, small ones through the GPU's memory, some of which both kinds share."""
    sizes = (DIRECT_BYTES + 512, DIRECT_BYTES - 512)
    pools = [torch.randint(0, 256, (20, size), dtype=torch.uint8).to(device) for size in sizes]
    stage = HostStage(pools, 4 * DIRECT_BYTES)
    for pool, group in zip(pools, stage.groups, strict=True):
        chance = np.random.default_rng(group.block_bytes)
        blocks = chance.permutation(20)[:13].tolist()
        expected = bytes_of(pool)
        assert (np.concatenate(group.read(blocks, rows_of)) == expected[blocks]).all()
        expected[blocks] = content = chance.integers(0, 256, (13, group.block_bytes), np.uint8)
        assert group.write(blocks, putting(content)) == 13
        assert (bytes_of(pool) == expected).all()
    stage.close()


def test_large_blocks_take_no_memory_of_the_gpu(device: str):
    stage = HostStage([torch.zeros(3, DIRECT_BYTES, dtype=torch.uint8, device=device)], 2 * DIRECT_BYTES)
    stage.check()
    assert not any(len(slot.device) or len(slot.device_ids) for slot in stage.threads._free)
    stage.close()


@pytest.mark.parametrize("good", [0, 3, 4, 5, 11])
def test_what_is_written_ends_with_the_first_bad_block(memory: BlockMemory, pool: torch.Tensor, good: int):
    content = np.random.default_rng(good).integers(0, 256, (12, BLOCK_BYTES), np.uint8)

    def fill(rows: np.ndarray, indices: Sequence[int], part: range) -> int:
        putting(content)(rows, indices, part)
        return max(0, min(good - part.start, len(part))) if part.start <= good else len(part)

    untouched = bytes_of(pool)[12:]
    assert memory.write(range(12), fill) == good
    assert (bytes_of(pool)[:good] == content[:good]).all()
    assert (bytes_of(pool)[12:] == untouched).all()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_error_comes_out_when_all_other_copies_have_ended(stage: HostStage, operation: str):
    running, go_on = threading.Event(), threading.Event()
    ended: list[range] = []

    def slow(rows: np.ndarray, indices: Sequence[int], part: range) -> int:
        if not part.start:
            running.wait()
            raise TransportUnavailable("injected")
        running.set()
        go_on.wait()
        ended.append(part)
        return len(part)

    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(getattr(stage.groups[0], operation), range(8), slow)
        running.wait()
        assert not call.done(), "a copy still runs"
        go_on.set()
        with pytest.raises(TransportUnavailable, match="injected"):
            call.result()
        assert ended == [range(4, 8)]
    assert np.concatenate(stage.groups[0].read(range(40), rows_of)).shape == (40, BLOCK_BYTES), "it goes on"


def test_nobody_waits_for_a_gpu_that_hangs_once_its_engine_was_given_up(pool: torch.Tensor):
    stage = HostStage([pool], STAGE_BYTES)
    running, go_on = threading.Event(), threading.Event()

    def hang(rows: np.ndarray, indices: Sequence[int], part: range) -> None:
        running.set()
        go_on.wait()

    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(stage.groups[0].read, range(40), hang)
        running.wait()
        stage.give_up()
        with pytest.raises(TransportUnavailable, match="given up"):
            call.result()
    stage.close()
    go_on.set()


def test_many_callers_share_it(stage: HostStage):
    """More of them than slots; each has its own blocks, and finds its own bytes there."""

    def write_and_read(number: int) -> bool:
        blocks = [number * 4 + i for i in (3, 0, 2, 1)]
        chance = np.random.default_rng(number)
        for _ in range(20):
            content = chance.integers(0, 256, (4, BLOCK_BYTES), np.uint8)
            assert stage.groups[0].write(blocks, putting(content)) == 4
            if (np.concatenate(stage.groups[0].read(blocks, rows_of)) != content).any():
                return False
        return True

    with ThreadPoolExecutor(10) as callers:
        assert all(callers.map(write_and_read, range(10)))


def test_copies_of_the_device_are_counted(stage: HostStage):
    stage.transfers = TransferCounts(Metrics(role="decode"))
    stage.groups[0].write(range(10), putting(np.ones((10, BLOCK_BYTES), np.uint8)))
    stage.groups[0].read(range(3), rows_of)
    counted = {(path.path, path.operation): (path.bytes, path.copies) for path in stage.transfers.totals()}
    assert counted == {("device", "write"): (10 * BLOCK_BYTES, 3), ("device", "read"): (3 * BLOCK_BYTES, 1)}


def test_a_closed_stage_says_so(pool: torch.Tensor):
    stage = HostStage([pool], STAGE_BYTES)
    stage.close()
    stage.close()
    with pytest.raises(TransportUnavailable, match="closed"):
        stage.groups[0].read([0], rows_of)


def test_blocks_that_the_kernels_cannot_copy_are_an_error_and_no_slot_is_lost(device: str):
    stage = HostStage([torch.zeros(4, 24, dtype=torch.uint8, device=device)], STAGE_BYTES)
    with pytest.raises(TransportUnavailable, match="multiples of 16"):
        stage.check()
    assert stage.num_free_slots == stage.num_slots
    stage.close()


@pytest.mark.parametrize("stage_mb", [1 << 40, 1])
def test_memory_that_is_refused_is_one_line_in_the_log(device: str, stage_mb: int):
    """More than any machine has; and too little for two blocks."""
    pool = torch.zeros(2, (1 << 19) + 16, dtype=torch.uint8, device=device)
    with capture_logs() as lines:
        assert open_stage([pool], stage_mb) is None
    assert [(line["event"], line["log_level"]) for line in lines] == [("kv_stage_unavailable", "warning")]


def test_a_pattern_that_comes_back_damaged_turns_it_off(pool: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    scatter = HostStage.scatter
    monkeypatch.setattr(HostStage, "scatter", lambda stage, slot, pool, blocks: scatter(stage, slot, pool, [*blocks[1:], 5]))
    with capture_logs() as lines:
        assert open_stage([pool], 1) is None
    assert "damaged" in lines[0]["reason"]


def test_without_a_stage_there_is_none(pool: torch.Tensor):
    assert open_stage([pool], 0) is None


def test_it_leaves_the_pool_as_it_was(pool: torch.Tensor, device: str):
    content = bytes_of(pool)
    stage = open_stage([pool, random_pool(3, device, WIDE)], 1)
    assert stage is not None
    assert stage.num_free_slots == stage.num_slots
    assert (bytes_of(pool) == content).all()
    stage.close()


@pytest.mark.gpu
@NEEDS_GPU
def test_a_running_step_is_not_waited_for(tmp_path: Path):
    """A kernel that spins on the default stream does not hold up copies."""
    pool = random_pool(40, "cuda")
    stage = open_stage([pool], 1)
    assert stage is not None
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # a second or so
    stage.groups[0].write(range(8), putting(np.ones((8, BLOCK_BYTES), np.uint8)))
    assert not torch.cuda.default_stream().query(), "the step has ended, so nothing was shown"
    torch.cuda.synchronize()
    assert (bytes_of(pool)[:8] == 1).all()
    stage.close()
