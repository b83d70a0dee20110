"""A host with a kvstore and workers that use it, on the memory bus, over real shared memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.from_thread
import msgspec
import numpy as np

from common.protocol import messages
from common.protocol.cache_messages import BlockGrant, BlockLease, BlockLookup, BlockOffer
from common.protocol.handles import Role
from common.protocol.messages import KvUsage
from common.runtime.actor import Actor
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker
from common.transfer.base import RemoteBlocks
from common.transfer.block_memory import BlockMemory, HostBlocks
from common.transfer.paths import KvPath
from common.transfer.shm import StoreTransport
from common.transfer.transfer import Pulling
from common.worker.store_client import StoreClient
from services.kvstore.actor import KvstoreActor
from services.kvstore.arena import Arena
from services.kvstore.config import KvstoreConfig
from tests.waiting import until

BLOCK_BYTES = 1 << 16
CHAIN = [b"%016d" % i for i in range(10)]


class Worker(Actor):
    """A worker with a pool of ten blocks, reduced to its kvstore client."""

    role: ClassVar[Role] = "prefill"

    def __init__(
        self,
        broker: MemoryBroker,
        shm_dir: Path,
        *,
        fill: int = 0,
        fingerprint: str = "m",
        block_bytes: int = BLOCK_BYTES,
        memory: Callable[[np.ndarray], BlockMemory] = HostBlocks,
        dead_after_s: float = 1.5,
    ) -> None:
        self.connection = broker.connect("worker")
        config = ServiceConfig(heartbeat_s=0.02, dead_after_s=dead_after_s, shm_dir=str(shm_dir))
        super().__init__(bus=self.connection, config=config)
        self.blocks = np.zeros((10, block_bytes), np.uint8)
        if fill:
            self.blocks[:] = np.random.default_rng(fill).integers(0, 256, self.blocks.shape, np.uint8)
        self.transport = HookedTransport(shm_dir)
        self.store = StoreClient(self, [memory(self.blocks)], fingerprint, str(shm_dir), transport=self.transport)

    async def ask_store(self, store: KvstoreActor, message: messages.Message) -> messages.Message:
        return await self.ask(store.ref, message, 1.0)


class HookedTransport(Pulling):
    """Shared memory, with something happening before each read."""

    def __init__(self, shm_dir: Path) -> None:
        self.shm = StoreTransport(shm_dir)
        self.before: Callable[[], None] = lambda: None

    def path_of(self, source: RemoteBlocks) -> KvPath:
        return self.shm.path_of(source)

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        self.before()
        return self.shm.read(source, into, into_blocks)


class Site:
    """One host: a bus, a directory of shared memory, a store."""

    def __init__(self, shm_dir: Path) -> None:
        self.broker = MemoryBroker()
        self.shm_dir = shm_dir
        self.config = KvstoreConfig(heartbeat_s=0.02, dead_after_s=1.5, lease_s=10.0, capacity_mb=1, shm_dir=str(shm_dir))

    def make_store(self, **changes: object) -> KvstoreActor:
        self.connection = self.broker.connect("kvstore")
        return KvstoreActor(bus=self.connection, config=msgspec.structs.replace(self.config, **changes))

    def make_worker(self, *, fill: int = 0, fingerprint: str = "m", block_bytes: int = BLOCK_BYTES) -> Worker:
        return Worker(self.broker, self.shm_dir, fill=fill, fingerprint=fingerprint, block_bytes=block_bytes)


@contextlib.contextmanager
def temporary_site() -> Iterator[Site]:
    """A site that must leave no segment behind."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Site(Path(directory))
        assert list(Path(directory).iterdir()) == [], "a segment was left behind"


@contextlib.asynccontextmanager
async def running(store: KvstoreActor, *workers: Worker) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        for actor in (*workers, store):
            await group.start(actor.run)
        await until(lambda: store.ready and all(worker.store.available for worker in workers))
        yield
        group.cancel_scope.cancel()
    for worker in workers:
        worker.store.close()
        worker.transport.shm.close()


async def settled(store: KvstoreActor, usage: KvUsage) -> None:
    """The store comes to rest with this usage and no lease."""
    await until(lambda: store.usage() == usage and not len(store.leases))
    for arena in store.arenas.values():
        arena.index.check()


def spoil(arena: Arena, slot: int) -> None:
    """Flip a bit of a stored block."""
    with arena.segment.path.open("r+b") as file:
        at = arena.segment.path.stat().st_size - (arena.segment.num_blocks - slot) * arena.segment.block_bytes + 17
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def grant_of(worker: Worker, store: KvstoreActor, hashes: list[bytes]) -> BlockGrant:
    answer = await worker.ask_store(
        store, BlockOffer(holder=worker.ref, fingerprint="m", block_bytes=BLOCK_BYTES, hashes=hashes)
    )
    assert isinstance(answer, BlockGrant)
    return answer


async def lease_of(worker: Worker, store: KvstoreActor, hashes: list[bytes]) -> BlockLease:
    answer = await worker.ask_store(store, BlockLookup(holder=worker.ref, fingerprint="m", hashes=hashes))
    assert isinstance(answer, BlockLease)
    return answer
