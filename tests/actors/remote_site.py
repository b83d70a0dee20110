"""Two hosts with a kvstore each, and workers that read the other host's store over real NIXL; the bus is in memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from common.protocol.messages import Message
from common.testing.memory_bus import MemoryBroker
from common.transfer.measured import TransferCounts
from common.transfer.nixl import NixlTransport
from common.worker import remote_kv
from common.worker.fetch_rate import FetchRates
from common.worker.remote_paths import RemotePaths
from common.worker.remote_stores import RemoteStores
from services.decode.config import DecodeConfig
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig
from tests.actors.kvstore_site import Worker, until

BLOCK_TOKENS = 16
PATIENCE_S = 20.0
"""Nobody is taken for dead on a slow machine. Who is killed is found out by a probe."""


class Reader(Worker):
    """A worker that reads stores of other hosts. `tokens_per_s`: the speed at which it computes prompts; 0: unknown."""

    def __init__(self, broker: MemoryBroker, shm_dir: Path, *, timeout_s: float = 30.0, **named: Any) -> None:
        super().__init__(broker, shm_dir, **{"dead_after_s": PATIENCE_S, **named})
        config = DecodeConfig(nixl_transports="tcp", nixl_timeout_s=timeout_s, shm_dir=str(shm_dir))
        self.tokens_per_s = 0.0
        self.store.choice._rates = FetchRates(lambda: self.tokens_per_s)
        agent = remote_kv.NixlAgent(f"{self.ref.id}-{self.ref.epoch:x}", transports="tcp")
        self.nixl = NixlTransport(agent, timeout_s=timeout_s)
        self.paths = RemotePaths(self, config, self.nixl, roles=("kvstore",), wanted=lambda _: True)
        self.store.remote = RemoteStores(
            self,
            self.store.lookups,
            self.paths,
            self.nixl,
            choice=self.store.choice,
            counts=self.store._transfers,
        )

    def tick(self, now: float) -> None:
        self.paths.tick(now, self.store.host)

    @property
    def counts(self) -> TransferCounts:
        return self.store._transfers

    @property
    def remote_bytes(self) -> int:
        return sum(path.bytes for path in self.counts.totals() if path.path == "kvstore_nixl")

    def sees(self, store: KvstoreActor) -> bool:
        """Whether the store can be read from here now."""
        assert self.store.remote is not None
        return store.ref in self.store.remote.stores()


class TwoHosts:
    """`shm_dirs`: of either host."""

    def __init__(self, folder: Path) -> None:
        self.broker = MemoryBroker()
        self.shm_dirs = [folder / name for name in ("near", "far")]
        for shm_dir in self.shm_dirs:
            shm_dir.mkdir()

    def make_store(self, host: int = 1, kind: type[KvstoreActor] = KvstoreActor, **settings: Any) -> KvstoreActor:
        """A store, of the far host unless said otherwise. Nothing of it expires on a slow machine."""
        defaults: dict[str, Any] = {"heartbeat_s": 0.02, "dead_after_s": PATIENCE_S, "lease_s": 60.0, "capacity_mb": 4}
        defaults |= {"kv_transfer": "nixl", "nixl_transports": "tcp", "staging_mb": 4, "shm_dir": str(self.shm_dirs[host])}
        config = msgspec.convert(defaults | settings, KvstoreConfig)
        return kind(bus=self.broker.connect("kvstore"), config=config)

    def make_giver(self, host: int = 1, **named: Any) -> Worker:
        """A worker that gives blocks to the store of its host."""
        return Worker(self.broker, self.shm_dirs[host], **{"fill": 1, "dead_after_s": PATIENCE_S, **named})

    def make_reader(self, **named: Any) -> Reader:
        """A worker of the near host."""
        return Reader(self.broker, self.shm_dirs[0], **named)


@contextlib.contextmanager
def two_hosts() -> Any:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield TwoHosts(Path(directory))
        assert [path for path in Path(directory).rglob("*") if path.is_file()] == [], "a segment was left behind"


@contextlib.asynccontextmanager
async def running(*actors: KvstoreActor | Worker) -> AsyncIterator[None]:
    """All of them run, and every reader has tried its path to every store of the far host."""
    stores = [actor for actor in actors if isinstance(actor, KvstoreActor)]
    workers = [actor for actor in actors if isinstance(actor, Worker)]
    async with anyio.create_task_group() as group:
        for actor in (*workers, *stores):
            await group.start(actor.run)
        await until(lambda: all(store.ready for store in stores), 30)
        for worker in workers:
            if isinstance(worker, Reader):
                remote = [store for store in stores if store.host != worker.store.host]
                await until(lambda worker=worker, remote=remote: all(map(worker.sees, remote)), 30)
            elif stores:
                await until(lambda worker=worker: worker.store.available, 30)
        yield
        group.cancel_scope.cancel()
    for worker in workers:
        worker.store.close()
        worker.transport.shm.close()


async def at_rest(store: KvstoreActor, cached: int) -> None:
    """The store has so many blocks, no lease, and an empty staging buffer."""
    staging = store.config.staging_mb << 20
    await until(lambda: store.usage().cached == cached and not len(store.leases) and store.readers.free_bytes == staging, 30)
    store.readers.check()
    for arena in store.arenas.values():
        arena.index.check()


def change_answers(store: KvstoreActor, change: Callable[[Message], Message]) -> None:
    """From now on the store's answers are changed on their way."""
    answer = store.answer
    store.answer = lambda reply, message: answer(reply, change(message))
