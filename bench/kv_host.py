"""How fast a worker's KV gets into a kvstore's memory, and back: blocks in host memory, and blocks of a device through a stage.

    python -m bench.kv_host [--device cuda:0] [--block-kb 2048] [--blocks 256] [--stage-mb 64]

A kvstore and a worker with as many blocks, in one process, over the memory bus and real shared memory. Each round offers all
blocks under new hashes and fetches them again, with everything that a worker does: questions, leases, checksums, generations.
Prints GB/s of both (medians, and the slowest and fastest round), beside a plain copy of the same blocks in memory and their
checksums alone. `--device cpu` takes host memory for that of a device: what the stage itself costs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING, ClassVar

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
from common.transfer.checksums import LIBRARY, crc32
from common.transfer.host_stage import HostStage
from common.worker.store_client import StoreClient
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig

if TYPE_CHECKING:
    import torch

_MIB = 1 << 20
SETTLE_S = 10.0
HASH_BYTES = 16


class Worker(Actor):
    """A worker reduced to its kvstore's client."""

    role: ClassVar[Role] = "decode"

    def __init__(self, bus: Bus, shm_dir: str, memory: BlockMemory) -> None:
        super().__init__(bus=bus, config=ServiceConfig(shm_dir=shm_dir))
        self.store = StoreClient(self, [memory], "bench", shm_dir)


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


async def rates(memory: BlockMemory, shm_dir: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return GB/s of offers and of fetches, of each round; one before them is not counted.

    :raises ConfigError: the kvstore did not take or give everything.
    """
    offers, fetches = [], []
    blocks = range(memory.num_blocks)
    total = memory.num_blocks * memory.block_bytes
    async with site(memory, shm_dir) as (worker, store):
        for number in range(rounds + 1):
            hashes = [b"%07d-%08d" % (number, block) for block in blocks]
            stored = store.arenas.num_readable
            began = time.perf_counter()
            await worker.store.offer(hashes, blocks)
            offers.append(total / (time.perf_counter() - began) / 1e9)
            await _until(
                lambda expected=stored + memory.num_blocks: store.arenas.num_readable >= min(expected, 2 * len(blocks))
            )
            began = time.perf_counter()
            if await worker.store.fetch(hashes, blocks) != memory.num_blocks:
                raise ConfigError("the kvstore does not have all that was offered")
            fetches.append(total / (time.perf_counter() - began) / 1e9)
    return offers[1:], fetches[1:]


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
    parser.add_argument("--stage-mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shm-dir", default="/dev/shm")
    given = parser.parse_args(argv)

    import torch

    logs.configure("warning")
    device = given.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    print(describe(("torch", "triton", "isal")), flush=True)
    block_bytes = given.block_kb << 10
    content = np.random.default_rng(1).integers(0, 256, (given.blocks, block_bytes), np.uint8)
    rows: list[tuple[str, list[float], list[float]]] = []
    other = np.empty_like(content)
    copied = timed(lambda: np.copyto(other, content), content.nbytes, given.rounds)
    summed = timed(lambda: [crc32(block) for block in content], content.nbytes, given.rounds)
    print(f"one thread alone, GB/s: a copy in memory {_spread(copied)}, checksums ({LIBRARY}) {_spread(summed)}")
    with tempfile.TemporaryDirectory(dir=given.shm_dir) as directory:
        rows.append(("blocks in host memory", *anyio.run(rates, HostBlocks(other), directory, given.rounds)))
        if (other != content).any():
            raise SystemExit("what came back is not what was offered")
        pool = torch.from_numpy(content.copy()).to(device)
        stage = HostStage([pool], given.stage_mb * _MIB)
        stage.check()
        rows.append((f"blocks of {device} through a stage", *anyio.run(rates, stage.groups[0], directory, given.rounds)))
        if (pool.cpu().numpy() != content).any():
            raise SystemExit("what came back through the stage is not what was offered")
        rows.append((f"{device} to its stage and back, alone", *device_rates(pool, stage, given.rounds)))
        stage.close()
    print(f"{given.blocks} blocks of {given.block_kb} KiB, a stage of {given.stage_mb} MiB; GB/s, median (slowest to fastest)")
    print(markdown(["", "out: offer", "in: fetch"], [[name, _spread(out), _spread(back)] for name, out, back in rows]))
    return 0


def _spread(found: Sequence[float]) -> str:
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


if __name__ == "__main__":
    sys.exit(main())
