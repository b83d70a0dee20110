"""KV from GPU to GPU: what holds on any machine, with host memory in a GPU's place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

from common.cache.retention import KEEP_ALL, Retention
from common.engine.layer_group import LayerGroup
from common.engine.load import open as opening
from common.engine.settings import EngineServiceConfig
from common.protocol.errors import StaleHandle, TransportUnavailable
from common.runtime.metrics import Metrics
from common.transfer import cuda_ipc
from common.transfer.awaited import Awaited
from common.transfer.base import LocalBlocks, RemoteBlocks
from common.transfer.block_memory import HostBlocks
from common.transfer.cuda_ipc import CudaDriver, LocalTransport, export_pool
from common.transfer.segment import Segment
from common.transfer.shm import ShmTransport
from common.transfer.transfer import Transfer
from common.worker.store_client import StoreClient

BLOCK = (2, 2, 4, 1, 8)  # layers, K and V, tokens, heads, head_dim
BLOCK_BYTES = 2 * 2 * 4 * 8 * 2
WINDOW = Retention(window=24)
NOTHING = np.zeros((4, 0), np.uint8)


class HostDriver:
    """Addresses of this process as handles. `allocated`: what it says of every allocation's size."""

    def __init__(self, allocated: int = 1 << 30) -> None:
        self.allocated = allocated
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.broken = False

    def export(self, pointer: int) -> tuple[bytes, int]:
        if self.broken:
            raise TransportUnavailable("CUDA_ERROR_INVALID_VALUE")
        return (pointer - 64).to_bytes(64, "little"), 64

    def open(self, handle: bytes) -> tuple[int, int]:
        if self.broken:
            raise TransportUnavailable("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1], self.allocated

    def close(self, pointer: int) -> None:
        self.closed.append(pointer)


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver()


def random_pool(num_blocks: int) -> torch.Tensor:
    return torch.randn(num_blocks, *BLOCK).to(torch.bfloat16)


def own(directory: Path, pool: torch.Tensor, driver: HostDriver, name: str = "theirs") -> Segment:
    return Segment.create(
        directory,
        name,
        num_blocks=len(pool),
        block_bytes=pool[0].nbytes,
        fingerprint="m",
        device_memory=export_pool(pool, driver),
    )


@pytest.fixture
def theirs() -> torch.Tensor:
    return random_pool(6)


@pytest.fixture
def segment(tmp_path: Path, theirs: torch.Tensor, driver: HostDriver) -> Iterator[Segment]:
    found = own(tmp_path, theirs, driver)
    yield found
    found.close()


@pytest.fixture
def mine() -> torch.Tensor:
    return torch.full((5, *BLOCK), float("nan"), dtype=torch.bfloat16)


@pytest.fixture
def transport(
    tmp_path: Path, mine: torch.Tensor, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalTransport]:
    monkeypatch.setattr(cuda_ipc, "_LOOK_EVERY_S", 0.02)
    found = LocalTransport(str(tmp_path))
    found.attach({"m": mine}, driver)
    yield found
    found.close()


def remote(transport: LocalTransport, blocks: list[int], generations: list[int], name: str = "theirs") -> RemoteBlocks:
    return RemoteBlocks(transport.host, name, "m", blocks, generations)


def test_blocks_arrive_where_they_were_asked_for_and_nowhere_else(
    transport: LocalTransport, segment: Segment, theirs: torch.Tensor, mine: torch.Tensor
) -> None:
    assert transport.read(remote(transport, [5, 0, 1], [0, 0, 0]), NOTHING, [1, 4, 0]) == 3 * BLOCK_BYTES
    assert torch.equal(mine[[1, 4, 0]], theirs[[5, 0, 1]])
    assert mine[[2, 3]].isnan().all()
    assert transport.read(remote(transport, [], []), NOTHING, []) == 0


def test_a_segment_of_device_memory_takes_no_host_memory_for_blocks(tmp_path: Path, segment: Segment) -> None:
    assert segment.path.stat().st_size <= 4096
    assert (segment.blocks.shape, segment.block_bytes, len(segment.generations)) == ((6, 0), BLOCK_BYTES, 6)
    with pytest.raises(TransportUnavailable, match="GPU's memory"):
        into = np.zeros((4, BLOCK_BYTES), np.uint8)
        shm = ShmTransport(tmp_path)
        shm.read(RemoteBlocks(shm.host, "theirs", "m", [0], [0]), into, [0])


def test_a_segment_of_host_memory_is_not_read_into_a_gpu(tmp_path: Path, transport: LocalTransport) -> None:
    host = Segment.create(tmp_path, "host", num_blocks=2, block_bytes=BLOCK_BYTES, fingerprint="m")
    with pytest.raises(TransportUnavailable, match="not in a GPU's memory"):
        transport.read(remote(transport, [0], [0], name="host"), NOTHING, [0])
    host.close()


def test_without_a_pool_on_a_gpu_it_reads_shared_memory(tmp_path: Path) -> None:
    host = Segment.create(tmp_path, "host", num_blocks=2, block_bytes=16, fingerprint="m")
    host.blocks[1] = 7
    into = np.zeros((1, 16), np.uint8)
    transport = LocalTransport(str(tmp_path))
    assert transport.read(remote(transport, [1], [0], name="host"), into, [0]) == 16
    assert (into == 7).all()
    transport.close()
    host.close()


def test_a_reused_block_is_stale_before_and_after_the_copy(
    transport: LocalTransport, segment: Segment, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StaleHandle):
        transport.read(remote(transport, [2], [1]), NOTHING, [0])
    assert not driver.opened, "nothing was copied"
    opened = driver.open

    def reuse_meanwhile(handle: bytes) -> tuple[int, int]:
        segment.generations[2] += 1
        return opened(handle)

    monkeypatch.setattr(driver, "open", reuse_meanwhile)
    with pytest.raises(StaleHandle):
        transport.read(remote(transport, [2], [0]), NOTHING, [0])


def begun(transport: LocalTransport, blocks: list[int], into: list[int]) -> Callable[[], int]:
    """Now and then whoever looks for dead owners has the lock for a moment, and nothing can begin."""
    for _ in range(100):
        if (ended := transport.begin(remote(transport, blocks, [0] * len(blocks)), NOTHING, into)) is not None:
            return ended
        time.sleep(0.01)
    raise AssertionError("it never began")


def test_a_copy_begins_without_waiting_once_the_pool_is_open(
    transport: LocalTransport, segment: Segment, theirs: torch.Tensor, mine: torch.Tensor
) -> None:
    assert transport.begin(remote(transport, [2], [0]), NOTHING, [0]) is None, "to open a pool takes long"
    transport.read(remote(transport, [5], [0]), NOTHING, [3])
    ended = begun(transport, [2, 4], [0, 1])
    assert transport.begin(remote(transport, [1], [0]), NOTHING, [2]) is None, "one copy at a time"
    assert ended() == 2 * BLOCK_BYTES and torch.equal(mine[:2], theirs[[2, 4]])
    assert transport.read(remote(transport, [1], [0]), NOTHING, [2]) == BLOCK_BYTES


def test_what_cannot_begin_gives_the_way_free_to_others(
    transport: LocalTransport, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.read(remote(transport, [5], [0]), NOTHING, [3])
    assert transport.begin(remote(transport, [2], [1]), NOTHING, [0]) is None, "it is stale"
    assert transport.begin(RemoteBlocks("elsewhere", "theirs", "m", [0], [0]), NOTHING, [0]) is None
    assert transport._device is not None
    with monkeypatch.context() as patch:
        patch.setattr(transport._device, "_launch", lambda *given: torch.zeros(-1))
        assert transport.begin(remote(transport, [2], [0]), NOTHING, [0]) is None
        with pytest.raises(TransportUnavailable, match="failed"):
            transport.read(remote(transport, [2], [0]), NOTHING, [0])
    ended = begun(transport, [2], [0])
    segment.generations[2] += 1
    with pytest.raises(StaleHandle):
        ended()
    assert transport.read(remote(transport, [1], [0]), NOTHING, [2]) == BLOCK_BYTES


def test_without_pinned_memory_ids_are_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def refuse(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", refuse)
    assert cuda_ipc._pinned(8).tolist() == [0] * 8


def test_another_layout_or_model_is_stale(
    tmp_path: Path, transport: LocalTransport, segment: Segment, driver: HostDriver
) -> None:
    with pytest.raises(StaleHandle):
        transport.read(RemoteBlocks(transport.host, "theirs", "other", [0], [0]), NOTHING, [0])
    with (
        closing(own(tmp_path, torch.zeros(2, 9, dtype=torch.uint8), driver, "odd")) as odd,
        pytest.raises(StaleHandle, match="9 bytes"),
    ):
        transport.read(remote(transport, [0], [0], name=odd.name), NOTHING, [0])


def test_a_pool_is_opened_once_and_let_go_when_its_owner_is_gone(
    tmp_path: Path, transport: LocalTransport, segment: Segment, driver: HostDriver
) -> None:
    for _ in range(3):
        transport.read(remote(transport, [0], [0]), NOTHING, [0])
    assert (len(driver.opened), driver.closed) == (1, [])
    segment.close()
    deadline = time.monotonic() + 10
    while driver.closed != driver.opened and time.monotonic() < deadline:
        time.sleep(0.01)
    assert driver.closed == driver.opened, "its successor needs the memory"
    with pytest.raises(TransportUnavailable):
        transport.read(remote(transport, [0], [0]), NOTHING, [0])
    with closing(own(tmp_path, random_pool(3), driver, "next")):
        transport.read(remote(transport, [1], [0], name="next"), NOTHING, [2])
    assert len(driver.opened) == 2


def test_memory_that_cannot_be_opened_is_a_typed_error(
    tmp_path: Path, transport: LocalTransport, segment: Segment, driver: HostDriver
) -> None:
    driver.allocated = 64 + 6 * BLOCK_BYTES - 1
    with pytest.raises(TransportUnavailable, match="larger than its allocation"):
        transport.read(remote(transport, [0], [0]), NOTHING, [0])
    assert driver.closed == driver.opened
    driver.broken = True
    with pytest.raises(TransportUnavailable, match="PEER_ACCESS"):
        transport.read(remote(transport, [0], [0]), NOTHING, [0])
    with pytest.raises(TransportUnavailable, match="another host"):
        transport.read(RemoteBlocks("elsewhere", "theirs", "m", [0], [0]), NOTHING, [0])


def test_memory_that_cannot_be_shared_is_unavailable_to_others_and_no_reason_to_end(
    tmp_path: Path, transport: LocalTransport, driver: HostDriver
) -> None:
    driver.broken = True
    with closing(own(tmp_path, random_pool(2), driver, "unshared")) as segment:
        driver.broken = False
        assert segment.blocks.shape == (2, 0)
        with pytest.raises(TransportUnavailable, match="can't share"):
            transport.read(remote(transport, [0], [0], "unshared"), NOTHING, [0])


def test_an_engine_on_a_gpu_shares_its_pools_and_reads_into_them(
    tmp_path: Path, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    without: dict[str, dict[str, Any]] = {"draft-1": {}, "private-1": {"zero_retention": True}, "plain-1": {"kv_stage_mb": 0}}
    pools = {"prefill": random_pool(6), "decode": random_pool(5)} | {name: random_pool(2) for name in without}
    counts = {"prefill": 4, "decode": 3} | dict.fromkeys(without, 2)
    windows = {role: torch.randn(count, 3, 2, 16, 4).to(torch.bfloat16) for role, count in counts.items()}
    runners = iter(
        SimpleNamespace(groups=[LayerGroup(pool, [0]), LayerGroup(windows[role], [1, 2, 3], WINDOW)], fingerprint="m")
        for role, pool in pools.items()
    )
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setattr(opening, "resolve_device", lambda settings: "cuda:0")
    monkeypatch.setattr(opening, "load_runner", lambda files, settings, **_: next(runners))
    monkeypatch.setattr(cuda_ipc, "CudaDriver", lambda index: driver)
    config = EngineServiceConfig(model="dummy:tiny", shm_dir=str(tmp_path))
    transport = LocalTransport(str(tmp_path))
    prefill = opening.open_engine(config, "prefill-1")
    decode = opening.open_engine(config, "decode-1", transport=transport)
    assert (prefill.segment.num_blocks, prefill.segment.block_bytes) == (6, BLOCK_BYTES)
    transport.read(remote(transport, [4, 2], [0, 0], name="prefill-1"), decode.segment.blocks, [3, 0])
    assert torch.equal(pools["decode"][[3, 0]], pools["prefill"][[4, 2]])
    assert [group.retention for group in prefill.groups] == [KEEP_ALL, WINDOW]
    tail = RemoteBlocks(transport.host, "prefill-1-1", "m-1", [3], [0])
    transport.read(tail, decode.groups[1].segment.blocks, [2])
    assert torch.equal(windows["decode"][2], windows["prefill"][3])
    with pytest.raises(StaleHandle):
        transport.read(RemoteBlocks(transport.host, "prefill-1-1", "m", [3], [0]), decode.segment.blocks, [2])
    for engine in (prefill, decode):
        assert engine.stage is not None and engine.stage.num_free_slots == engine.stage.num_slots
        sizes = [(group.blocks.num_blocks, group.blocks.block_bytes) for group in engine.groups]
        assert sizes == [(group.segment.num_blocks, group.segment.block_bytes) for group in engine.groups]
    (staged,) = prefill.groups[1].blocks.read([3], lambda rows, indices, part: rows[list(indices)].copy())
    assert np.array_equal(staged[0], windows["prefill"][3].view(torch.uint8).flatten().numpy())
    for name, changes in without.items():
        engine = opening.open_engine(msgspec.structs.replace(config, **changes), name, drafts=name == "draft-1")
        assert engine.stage is None and [group.blocks.block_bytes for group in engine.groups] == [0, 0], name
        engine.close()
    for engine in (prefill, decode):
        engine.close()
    transport.close()


def test_an_engine_that_cannot_share_all_of_its_pools_leaves_no_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [LayerGroup(random_pool(6), [0]), LayerGroup(random_pool(3), [1], WINDOW)]
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setattr(opening, "resolve_device", lambda settings: "cuda:0")
    monkeypatch.setattr(opening, "load_runner", lambda files, settings, **_: SimpleNamespace(groups=groups, fingerprint="m"))
    exported = iter([b"\0" * 72])
    monkeypatch.setattr(opening, "export_pool", lambda pool: next(exported))
    with pytest.raises(StopIteration):
        opening.open_engine(EngineServiceConfig(model="dummy:tiny", shm_dir=str(tmp_path)), "decode-1")
    assert not list(tmp_path.glob("*decode-1*"))


def test_no_kvstore_is_asked_for_a_pool_that_it_cannot_reach(tmp_path: Path) -> None:
    def alive(role: str, now: float) -> list[object]:
        pytest.fail("nobody need ask who is there")

    actor: Any = SimpleNamespace(
        bus=SimpleNamespace(connected=True),
        clock=time.monotonic,
        metrics=Metrics(role="decode"),
        registry=SimpleNamespace(alive=alive),
    )
    assert not StoreClient(actor, [HostBlocks(NOTHING)], "m", str(tmp_path)).available


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(TransportUnavailable, match="no CUDA driver"):
        CudaDriver(0)


async def awaiting(transfer: Transfer) -> None:
    await transfer


async def test_what_a_promise_names_is_got_ready_and_copied_when_the_word_says_so(
    transport: LocalTransport, segment: Segment, theirs: torch.Tensor, mine: torch.Tensor, driver: HostDriver
) -> None:
    ran = transport.progress_of(transport.host, "theirs", "m")
    assert ran is not None and transport.progress_of("elsewhere", "theirs", "m") is None
    assert transport.progress_of(transport.host, "nobody's", "m") is None
    blocks = LocalBlocks(NOTHING, [0, 1])
    transfer = transport.pull(remote(transport, [2, 4], [0, 0]), blocks, Awaited(3, ran, time.perf_counter()))
    async with anyio.create_task_group() as group:
        group.start_soon(awaiting, transfer)
        with anyio.fail_after(10):
            while not driver.opened:
                await anyio.sleep(0.001)
        segment.progress[0] = 2
        await anyio.sleep(0.02)
        assert mine.isnan().all(), "nothing is copied before the step has run"
        theirs[2] = 7.0
        segment.progress[0] = 3
    assert torch.equal(mine[:2], theirs[[2, 4]]) and (mine[0] == 7.0).all()


async def test_a_promised_block_that_is_reused_meanwhile_is_stale(transport: LocalTransport, segment: Segment) -> None:
    ran = transport.progress_of(transport.host, "theirs", "m")
    assert ran is not None
    transfer = transport.pull(remote(transport, [2], [0]), LocalBlocks(NOTHING, [0]), Awaited(1, ran, time.perf_counter()))
    async with anyio.create_task_group() as group:
        group.start_soon(_bump, segment)
        with pytest.raises(StaleHandle):
            await transfer


async def _bump(segment: Segment) -> None:
    await anyio.sleep(0.02)
    segment.generations[2] += 1
    segment.progress[0] = 1
