"""How fast a worker's KV gets into a kvstore's memory, and back: blocks in host memory, and blocks of a device through a stage.

    python -m bench.kv_host [--device cuda:0] [--block-kb 2048] [--blocks 128] [--stage-mb 128] [--at-once 2]

A kvstore and a worker with as many blocks, in one process, over the memory bus and real shared memory. Each round offers all
blocks under new hashes and fetches them again, with everything that a worker does: questions, leases, checksums, generations.
Prints GB/s of both (medians, and the slowest and fastest round), beside a plain copy of the same blocks in memory and their
checksums alone. With `--at-once` the blocks are of so many requests, which offer and fetch side by side, so that one asks while
another copies. `--device cpu` takes host memory for that of a device: what the stage itself costs. The first round of each is
apart: in it the kvstore's blocks get their memory, and mappings their pages. A GPU is measured twice, with `kv_pin_kvstore`
and without; what is pinned is waited for after the second round, which therefore is as without.

The second table says where the time goes, in milliseconds for each GB: by the clock, of cores (both processes' work is in this
one), of threads that copy to or from the kvstore's memory (checksums of offers included), and of threads that wait for the
device's copies.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, ClassVar, TypeVar

import anyio
import numpy as np

from bench.common.machine import describe
from bench.common.table import markdown
from common.protocol.errors import ConfigError
from common.protocol.handles import Role
from common.runtime import logs
from common.runtime.actor import Actor
from common.runtime.bus import Bus
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker
from common.transfer.block_memory import BlockMemory, HostBlocks
from common.transfer.checked_copies import prepare
from common.transfer.checksums import LIBRARY, crc32
from common.transfer.host_stage import HostStage, StagedBlocks
from common.transfer.measured import TransferCounts
from common.worker.store_client import StoreClient
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_MIB = 1 << 20
SETTLE_S = 10.0
HASH_BYTES = 16


class Worker(Actor):
    """A worker reduced to its kvstore's client."""

    role: ClassVar[Role] = "decode"

    def __init__(self, bus: Bus, shm_dir: str, memory: BlockMemory) -> None:
        super().__init__(bus=bus, config=ServiceConfig(shm_dir=shm_dir))
        self.transfers = TransferCounts(self.metrics)
        self.store = StoreClient(self, [memory], "bench", shm_dir, transfers=self.transfers)
        if isinstance(memory, StagedBlocks):
            memory.stage.transfers = self.transfers


@dataclass
class Spent:
    """What one direction took in all rounds but the first, which `first_gb_per_s` is of. Seconds; `gb_per_s`: of each round."""

    gb_per_s: list[float] = field(default_factory=list)
    first_gb_per_s: float = 0.0
    num_bytes: int = 0
    wall_s: float = 0.0
    user_s: float = 0.0
    system_s: float = 0.0
    faults: int = 0
    store_s: float = 0.0
    device_s: float = 0.0

    @contextmanager
    def measure(self, num_bytes: int, transfers: TransferCounts) -> Iterator[None]:
        before, paths_before, began = resource.getrusage(resource.RUSAGE_SELF), _seconds(transfers), time.perf_counter()
        yield
        wall_s = time.perf_counter() - began
        after, paths = resource.getrusage(resource.RUSAGE_SELF), _seconds(transfers)
        if not self.first_gb_per_s:
            self.first_gb_per_s = num_bytes / wall_s / 1e9
            return
        self.gb_per_s.append(num_bytes / wall_s / 1e9)
        self.num_bytes += num_bytes
        self.wall_s += wall_s
        self.user_s += after.ru_utime - before.ru_utime
        self.system_s += after.ru_stime - before.ru_stime
        self.faults += after.ru_minflt - before.ru_minflt
        self.store_s += paths["kvstore"] - paths_before["kvstore"]
        self.device_s += paths["device"] - paths_before["device"]

    def row(self, name: str) -> list[str]:
        parts = (self.wall_s, self.user_s, self.system_s, self.store_s, self.device_s)
        return [name, *(f"{1e12 * part / self.num_bytes:.0f}" for part in parts), f"{1e9 * self.faults / self.num_bytes:.0f}"]


def _seconds(transfers: TransferCounts) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in transfers.totals():
        found[path.path] += path.seconds  # pyright: ignore[reportArgumentType] (a counter of seconds)
    return found


@asynccontextmanager
async def site(memory: BlockMemory, shm_dir: str) -> AsyncIterator[tuple[Worker, KvstoreActor]]:
    """A worker with these blocks, and a kvstore that holds twice as many."""
    broker = MemoryBroker()
    capacity_mb = 2 * memory.num_blocks * memory.block_bytes // _MIB + 1
    store = KvstoreActor(bus=broker.connect("kvstore"), config=KvstoreConfig(shm_dir=shm_dir, capacity_mb=capacity_mb))
    worker = Worker(broker.connect("worker"), shm_dir, memory)
    async with anyio.create_task_group() as tasks:
        for actor in (worker, store):
            await tasks.start(actor.run)
        await _until(lambda: worker.store.available)
        yield worker, store
        tasks.cancel_scope.cancel()
    worker.store.close()


async def rates(memory: BlockMemory, shm_dir: str, rounds: int, at_once: int) -> tuple[Spent, Spent, float]:
    """Return what offers and fetches of so many requests took, and the seconds of a lookup of the first one's blocks.

    :raises ConfigError: the kvstore did not take or give everything.
    """
    offers, fetches, lookups, pinned = Spent(), Spent(), [], memory.pinned
    blocks = range(memory.num_blocks)
    total = memory.num_blocks * memory.block_bytes
    async with site(memory, shm_dir) as (worker, store):
        for number in range(rounds + 1):
            if number == 2 and pinned is not None and not pinned.refused:  # all of its memory is used by now
                await _until(lambda: pinned.num_bytes >= 2 * total)
            chains = [blocks[i * len(blocks) // at_once : (i + 1) * len(blocks) // at_once] for i in range(at_once)]
            requests = [([b"%07d-%08d" % (number, block) for block in chain], chain) for chain in chains]
            stored = store.arenas.num_readable
            with offers.measure(total, worker.transfers):
                await _side_by_side(worker.store.offer, requests)
            await _until(
                lambda expected=stored + memory.num_blocks: store.arenas.num_readable >= min(expected, 2 * len(blocks))
            )
            began, hashes = time.perf_counter(), requests[0][0]
            await worker.store.find(hashes, [0] * len(hashes), 0)
            lookups.append(time.perf_counter() - began)
            with fetches.measure(total, worker.transfers):
                fetched = await _side_by_side(worker.store.fetch, requests)
            if sum(fetched) != memory.num_blocks:
                raise ConfigError("the kvstore does not have all that was offered")
    return offers, fetches, median(lookups)


async def _side_by_side(
    call: Callable[[list[bytes], Sequence[int]], Awaitable[T]], requests: Sequence[tuple[list[bytes], Sequence[int]]]
) -> list[T]:
    """Return what a call comes to for each request."""
    found: list[T] = []

    async def one(hashes: list[bytes], blocks: Sequence[int]) -> None:
        found.append(await call(hashes, blocks))

    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(one, *request)
    return found


async def _until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(SETTLE_S):
        while not holds():  # noqa: ASYNC110 (a kvstore has no event for it)
            await anyio.sleep(0.005)


def device_rates(pool: torch.Tensor, stage: HostStage, rounds: int) -> tuple[list[float], list[float]]:
    """Return GB/s from the device to the stage and back, without a kvstore."""
    reads, writes = [], []
    blocks = range(len(pool))
    for _ in range(rounds + 1):
        began = time.perf_counter()
        stage.groups[0].read(blocks, lambda rows, indices, part: None)
        reads.append(pool.nbytes / (time.perf_counter() - began) / 1e9)
        began = time.perf_counter()
        stage.groups[0].write(blocks, lambda rows, indices, part: len(part))
        writes.append(pool.nbytes / (time.perf_counter() - began) / 1e9)
    return reads[1:], writes[1:]


def timed(call: Callable[[], object], num_bytes: int, rounds: int) -> list[float]:
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        found.append(num_bytes / (time.perf_counter() - began) / 1e9)
    return found[1:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="", help="cuda:N, or cpu in its place; by default a GPU if there is one, else cpu")
    parser.add_argument("--block-kb", type=int, default=2048, help="KiB of a block: 2048 are 16 tokens of Llama 8B in bf16")
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--stage-mb", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--at-once", type=int, default=1, help="requests among which the blocks are divided")
    parser.add_argument("--shm-dir", default="/dev/shm")
    given = parser.parse_args(argv)

    import torch

    logs.configure("warning")
    device = given.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    print(describe(("torch", "triton", "isal")), flush=True)
    block_bytes = given.block_kb << 10
    content = np.random.default_rng(1).integers(0, 256, (given.blocks, block_bytes), np.uint8)
    rows: list[list[str]] = []
    parts: list[list[str]] = []

    def add(name: str, offers: Spent, fetches: Spent, lookup_s: float) -> None:
        firsts = f"{offers.first_gb_per_s:.2f}, {fetches.first_gb_per_s:.2f}"
        rows.append([name, _spread(offers.gb_per_s), _spread(fetches.gb_per_s), firsts, f"{1e3 * lookup_s:.2f}"])
        parts.extend((offers.row(f"{name}: offer"), fetches.row(f"{name}: fetch")))

    prepare()
    other = np.empty_like(content)
    copied = timed(lambda: np.copyto(other, content), content.nbytes, given.rounds)
    summed = timed(lambda: [crc32(block) for block in content], content.nbytes, given.rounds)
    print(f"one thread alone, GB/s: a copy in memory {_spread(copied)}, checksums ({LIBRARY}) {_spread(summed)}")
    with tempfile.TemporaryDirectory(dir=given.shm_dir) as directory:
        add("blocks in host memory", *anyio.run(rates, HostBlocks(other), directory, given.rounds, given.at_once))
        if (other != content).any():
            raise SystemExit("what came back is not what was offered")
        pool = torch.from_numpy(content.copy()).to(device)
        alone = ["", ""]
        for name, pins in [("through a stage", False), ("the kvstore's memory pinned", True)][: 1 + device.startswith("cuda")]:
            stage = HostStage([pool], given.stage_mb * _MIB, pins=pins)
            stage.check()
            add(f"blocks of {device}, {name}", *anyio.run(rates, stage.groups[0], directory, given.rounds, given.at_once))
            if (pool.cpu().numpy() != content).any():
                raise SystemExit("what came back is not what was offered")
            if not pins:
                alone = [_spread(found) for found in device_rates(pool, stage, given.rounds)]
                pool.copy_(torch.from_numpy(content))
            stage.close()
        rows.append([f"{device} to its stage and back, alone", *alone, "", ""])
    blocks = f"{given.blocks} blocks of {given.block_kb} KiB, {given.at_once} requests at once"
    print(f"{blocks}, a stage of {given.stage_mb} MiB; GB/s, median (slowest to fastest)")
    print(markdown(["", "out: offer", "in: fetch", "first round", "lookup, ms"], rows))
    print("\nms for each GB, and page faults:")
    print(markdown(["", "clock", "user", "system", "threads: kvstore", "threads: device", "faults"], parts))
    return 0


def _spread(found: Sequence[float]) -> str:
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


if __name__ == "__main__":
    sys.exit(main())
