"""The kvstore and its clients on the memory bus, over real shared memory: what comes back is what was given, or nothing."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.from_thread
import msgspec
import numpy as np
import pytest

from common.cache import store_client
from common.cache.store_client import StoreClient
from common.protocol import messages
from common.protocol.errors import ConfigError, StaleHandle
from common.protocol.handles import Role
from common.protocol.messages import (
    BlockCommit,
    BlockGrant,
    BlockLease,
    BlockLookup,
    BlockOffer,
    KvUsage,
    Presence,
    Rejected,
    ReleaseLease,
)
from common.runtime.actor import Actor, WorkerState
from common.runtime.bus import BusMessage
from common.runtime.memory_bus import MemoryBroker
from common.runtime.settings import ServiceConfig
from common.transfer.shm import ShmTransport, host_id
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig

BLOCK_BYTES = 1 << 16
CHAIN = [b"%016d" % i for i in range(10)]


class Worker(Actor):
    """A worker with a pool of ten blocks, reduced to its kvstore client."""

    role: ClassVar[Role] = "prefill"

    def __init__(self, broker: MemoryBroker, shm_dir: Path, *, fill: int = 0, fingerprint: str = "m") -> None:
        self.connection = broker.connect("worker")
        super().__init__(bus=self.connection, config=ServiceConfig(heartbeat_s=0.02, dead_after_s=0.3, shm_dir=str(shm_dir)))
        self.blocks = np.zeros((10, BLOCK_BYTES), np.uint8)
        if fill:
            self.blocks[:] = np.random.default_rng(fill).integers(0, 256, self.blocks.shape, np.uint8)
        self.transport = HookedTransport(shm_dir)
        self.store = StoreClient(self, self.blocks, fingerprint, str(shm_dir), transport=self.transport)

    async def ask_store(self, store: KvstoreActor, message: messages.Message) -> messages.Message:
        return await self.ask(store.ref, message, 1.0)


class HookedTransport:
    """Shared memory, with something happening before each read."""

    def __init__(self, shm_dir: Path) -> None:
        self.shm = ShmTransport(shm_dir)
        self.before: Callable[[], None] = lambda: None

    def read(
        self,
        host: str,
        segment: str,
        fingerprint: str,
        blocks: Sequence[int],
        generations: Sequence[int],
        into: np.ndarray,
        into_blocks: Sequence[int],
    ) -> int:
        self.before()
        return self.shm.read(host, segment, fingerprint, blocks, generations, into, into_blocks)


class Site:
    """One host: a bus, a directory of shared memory, a store."""

    def __init__(self, shm_dir: Path) -> None:
        self.broker = MemoryBroker()
        self.shm_dir = shm_dir
        self.config = KvstoreConfig(heartbeat_s=0.02, dead_after_s=0.3, lease_s=0.5, capacity_mb=1, shm_dir=str(shm_dir))

    def make_store(self, **changes: object) -> KvstoreActor:
        self.connection = self.broker.connect("kvstore")
        return KvstoreActor(bus=self.connection, config=msgspec.structs.replace(self.config, **changes))

    def make_worker(self, *, fill: int = 0, fingerprint: str = "m") -> Worker:
        return Worker(self.broker, self.shm_dir, fill=fill, fingerprint=fingerprint)


@pytest.fixture
def site() -> Iterator[Site]:
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


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    with anyio.fail_after(timeout_s):
        while True:
            if condition():
                return
            await anyio.sleep(0.005)


async def settled(store: KvstoreActor, usage: KvUsage) -> None:
    """The store comes to rest with this usage and no lease."""
    await until(lambda: store.usage() == usage and not len(store.leases))
    for arena in store.arenas.values():
        arena.index.check()


async def test_what_one_worker_offers_another_fetches(site: Site):
    store, giver, taker = site.make_store(), site.make_worker(fill=1), site.make_worker()
    async with running(store, giver, taker):
        await giver.store.offer(CHAIN[:5], [7, 3, 4, 5, 0])
        await until(lambda: store.usage().cached == 5)
        assert await taker.store.fetch([*CHAIN[:5], b"more"], [9, 8, 2, 1, 0, 5]) == 5
        assert (taker.blocks[[9, 8, 2, 1, 0]] == giver.blocks[[7, 3, 4, 5, 0]]).all()
        assert not taker.blocks[5].any()
        await settled(store, KvUsage(total=16, free=11, cached=5))
        assert store.stored_bytes == 5 * BLOCK_BYTES


async def test_a_miss_is_zero_and_holds_nothing(site: Site):
    store, worker, other = site.make_store(), site.make_worker(fill=1), site.make_worker(fingerprint="n")
    async with running(store, worker, other):
        assert await worker.store.fetch(CHAIN, range(10)) == 0, "nothing was ever offered"
        await worker.store.offer(CHAIN[:3], [0, 1, 2])
        await until(lambda: store.usage().cached == 3)
        assert await worker.store.fetch(CHAIN[1:], range(9)) == 2
        assert await worker.store.fetch([b"unknown", *CHAIN], range(10)) == 0
        assert await worker.store.fetch([], []) == 0
        assert await other.store.fetch(CHAIN, range(10)) == 0, "another model's blocks are never found"
        await settled(store, KvUsage(total=16, free=13, cached=3))


async def test_only_what_the_store_lacks_is_copied(site: Site):
    store, first, second = site.make_store(), site.make_worker(fill=1), site.make_worker(fill=2)
    async with running(store, first, second):
        await first.store.offer(CHAIN[:3], [0, 1, 2])
        await until(lambda: store.usage().cached == 3)
        await second.store.offer(CHAIN[:5], [0, 1, 2, 3, 4])
        await until(lambda: store.usage().cached == 5)
        assert await second.store.fetch(CHAIN[:5], [5, 6, 7, 8, 9]) == 5
        assert (second.blocks[[5, 6, 7]] == first.blocks[[0, 1, 2]]).all()
        assert (second.blocks[[8, 9]] == second.blocks[[3, 4]]).all()


async def test_a_full_store_evicts_the_least_recently_used_chain(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        for name in (b"a", b"b"):
            await worker.store.offer([name + block_hash for block_hash in CHAIN[:8]], range(8))
        await until(lambda: store.usage().cached == 16)
        assert await worker.store.fetch([b"a" + block_hash for block_hash in CHAIN[:8]], range(8)) == 8
        await worker.store.offer([b"c" + block_hash for block_hash in CHAIN[:6]], range(6))
        await settled(store, KvUsage(total=16, cached=16))
        assert await worker.store.fetch([b"a" + block_hash for block_hash in CHAIN[:8]], range(8)) == 8
        assert await worker.store.fetch([b"b" + block_hash for block_hash in CHAIN[:8]], range(8)) == 2


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


async def test_a_writer_killed_before_its_commit_leaves_nothing_readable(site: Site):
    store, writer, reader = site.make_store(lease_s=60.0), site.make_worker(), site.make_worker()
    async with running(store, writer, reader):
        await until(lambda: store.registry.get(writer.ref.id) is not None)
        grant = await grant_of(writer, store, CHAIN[:4])
        assert store.usage().owned == 4
        assert await reader.store.fetch(CHAIN, range(10)) == 0
        writer.connection.kill()
        await settled(store, KvUsage(total=16, free=16))
        reader.send(store.ref, BlockCommit(lease=grant.lease, checksums=[0] * 4))
        assert await reader.store.fetch(CHAIN, range(10)) == 0, "a commit after the end changes nothing"


async def test_a_reader_killed_under_its_lease_gives_the_blocks_back(site: Site):
    store, reader, giver = site.make_store(lease_s=60.0), site.make_worker(), site.make_worker(fill=1)
    async with running(store, reader, giver):
        await giver.store.offer(CHAIN[:4], range(4))
        await until(lambda: store.registry.get(reader.ref.id) is not None and store.usage().cached == 4)
        await lease_of(reader, store, CHAIN)
        assert store.usage().leased == 4
        reader.connection.kill()
        await settled(store, KvUsage(total=16, free=12, cached=4))


async def test_leases_nobody_renews_end(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:2], range(2))
        await until(lambda: store.usage().cached == 2)
        await lease_of(worker, store, CHAIN)
        await grant_of(worker, store, CHAIN[:4])
        assert store.usage() == KvUsage(total=16, free=12, owned=2, leased=2)
        await settled(store, KvUsage(total=16, free=14, cached=2))


async def test_releasing_twice_is_harmless(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        grant = await grant_of(worker, store, CHAIN[:2])
        for _ in range(3):
            worker.send(store.ref, ReleaseLease(leases=[grant.lease, "unknown"]))
        await settled(store, KvUsage(total=16, free=16))


async def test_a_commit_with_the_wrong_number_of_checksums_is_none(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        grant = await grant_of(worker, store, CHAIN[:2])
        worker.send(store.ref, BlockCommit(lease=grant.lease, checksums=[1]))
        await settled(store, KvUsage(total=16, free=16))


async def test_a_damaged_block_is_not_used_and_is_forgotten(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:4], range(4))
        await until(lambda: store.usage().cached == 4)
        arena = store.arenas["m"]
        (_, _, slot, _) = arena.index.lookup(CHAIN)
        arena.segment.blocks[slot, 17] ^= 1
        assert await worker.store.fetch(CHAIN[:4], [5, 6, 7, 8]) == 2
        await settled(store, KvUsage(total=16, free=13, cached=3))
        await worker.store.offer(CHAIN[:4], range(4))
        await until(lambda: store.usage().cached == 4)
        assert await worker.store.fetch(CHAIN[:4], [5, 6, 7, 8]) == 4, "the hole was filled again"
        assert (worker.blocks[5:9] == worker.blocks[:4]).all()


async def test_blocks_reused_while_they_are_copied_are_a_miss(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)

    def store_gives_the_reader_up() -> None:
        store.fenced()
        arena = store.arenas["m"]
        arena.index.abandon([slot for _, slot in arena.reserve([b"%d" % i for i in range(16)])])

    async with running(store, worker):
        await worker.store.offer(CHAIN[:4], range(4))
        await until(lambda: store.usage().cached == 4)
        worker.transport.before = lambda: anyio.from_thread.run_sync(store_gives_the_reader_up)
        assert await worker.store.fetch(CHAIN[:4], [5, 6, 7, 8]) == 0
        await settled(store, KvUsage(total=16, free=16))


async def test_a_long_fetch_keeps_its_lease(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_client, "CHUNK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(store_client, "RENEW_EVERY_S", 0.1)
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:5], range(5))
        await until(lambda: store.usage().cached == 5)
        worker.transport.before = lambda: time.sleep(0.2)
        assert await worker.store.fetch(CHAIN[:5], [5, 6, 7, 8, 9]) == 5, "takes twice the lease"
        await settled(store, KvUsage(total=16, free=11, cached=5))


async def test_a_cancelled_fetch_or_offer_gives_everything_back(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_client, "CHUNK_BYTES", BLOCK_BYTES)
    store, worker = site.make_store(lease_s=60.0), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:5], range(5))
        await until(lambda: store.usage().cached == 5)
        worker.transport.before = lambda: time.sleep(0.1)
        with anyio.move_on_after(0.15):
            await worker.store.fetch(CHAIN[:5], [5, 6, 7, 8, 9])
        await settled(store, KvUsage(total=16, free=11, cached=5))
        write_chunk = worker.store._write_chunk

        def slow_write(segment: str, source_blocks: list[int], target_blocks: list[int]) -> list[int]:
            time.sleep(0.1)
            return write_chunk(segment, source_blocks, target_blocks)

        monkeypatch.setattr(worker.store, "_write_chunk", slow_write)
        with anyio.move_on_after(0.15):
            await worker.store.offer([b"x" + block_hash for block_hash in CHAIN], range(10))
        await settled(store, KvUsage(total=16, free=11, cached=5))


async def test_an_offer_that_fails_on_the_way_gives_its_slots_back(site: Site, monkeypatch: pytest.MonkeyPatch):
    store, worker = site.make_store(lease_s=60.0), site.make_worker(fill=1)

    def fail(*_: object) -> list[int]:
        raise StaleHandle("injected")

    async with running(store, worker):
        monkeypatch.setattr(worker.store, "_write_chunk", fail)
        await worker.store.offer(CHAIN, range(10))
        await settled(store, KvUsage(total=16, free=16))


async def test_a_killed_store_costs_one_question(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        site.connection.kill()
        began = time.monotonic()
        assert await worker.store.fetch(CHAIN, range(10)) == 0
        assert not worker.store.available
        assert await worker.store.fetch(CHAIN, range(10)) == 0
        await worker.store.offer(CHAIN, range(10))
        assert time.monotonic() - began < 0.4


async def test_a_store_that_does_not_answer_is_left_alone_for_a_while(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_client, "SKIP_FAILED_S", 0.3)
    store, worker = site.make_store(), site.make_worker(fill=1)
    asked: list[BusMessage] = []

    def swallow(message: BusMessage) -> bool:
        lookup = message.data and isinstance(messages.decode(message.data), BlockLookup)
        if lookup:
            asked.append(message)
        return bool(lookup)

    async with running(store, worker):
        undo = site.broker.drop(swallow)
        began = time.monotonic()
        assert await worker.store.fetch(CHAIN, range(10)) == 0
        assert time.monotonic() - began < 0.35
        for _ in range(5):
            assert await worker.store.fetch(CHAIN, range(10)) == 0
        assert len(asked) == 1
        undo()
        await until(lambda: worker.store.available)
        await worker.store.offer(CHAIN, range(10))
        assert await worker.store.fetch(CHAIN, range(10)) == 10


async def test_nobody_asks_a_store_while_the_bus_is_away(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        site.broker.stop()
        await until(lambda: not worker.bus.connected)
        assert not worker.store.available
        assert await worker.store.fetch(CHAIN, range(10)) == 0
        site.broker.start()
        await until(lambda: worker.store.available)


async def test_a_restarted_store_is_used_at_once(site: Site):
    store, worker = site.make_store(worker_id="kv"), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN, range(10))
        await until(lambda: store.usage().cached == 10)
        await store.stop()
        again = site.make_store(worker_id="kv")
        async with anyio.create_task_group() as group:
            await group.start(again.run)
            await until(lambda: worker.store._stores() == [again.ref])
            assert await worker.store.fetch(CHAIN, range(10)) == 0
            await worker.store.offer(CHAIN, range(10))
            await until(lambda: again.usage().cached == 10)
            assert await worker.store.fetch(CHAIN, range(10)) == 10
            await again.stop()


async def test_two_stores_serve_one_host(site: Site):
    store, other, worker = site.make_store(), site.make_store(), site.make_worker(fill=1)
    async with running(store, worker), anyio.create_task_group() as group:
        await group.start(other.run)
        await until(lambda: len(worker.store._stores()) == 2)
        for name in range(8):
            await worker.store.offer([b"%d" % name], [name])
        await until(lambda: store.usage().cached + other.usage().cached == 8)
        for name in range(8):
            assert await worker.store.fetch([b"%d" % name], [9]) == 1
            assert (worker.blocks[9] == worker.blocks[name]).all()
        await until(lambda: not len(store.leases) and not len(other.leases))
        await other.stop()


async def test_a_store_of_another_host_is_not_asked(site: Site):
    class Far(KvstoreActor):
        def presence(self, state: WorkerState) -> Presence:
            return msgspec.structs.replace(super().presence(state), host="elsewhere")

    far, worker = Far(bus=site.broker.connect("far"), config=site.config), site.make_worker()
    async with anyio.create_task_group() as group:
        await group.start(worker.run)
        await group.start(far.run)
        await until(lambda: bool(worker.registry.alive("kvstore", worker.clock())))
        assert not worker.store.available
        group.cancel_scope.cancel()


async def test_a_draining_store_finishes_its_readers_and_refuses_new_ones(site: Site):
    store, worker = site.make_store(lease_s=60.0), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:4], range(4))
        await until(lambda: store.usage().cached == 4)
        lease = await lease_of(worker, store, CHAIN)
        store.begin_drain()
        answer = await worker.ask_store(store, BlockLookup(holder=worker.ref, fingerprint="m", hashes=CHAIN))
        assert isinstance(answer, Rejected) and answer.code == "shutting_down"
        await until(lambda: not worker.store.available)
        assert len(list(site.shm_dir.iterdir())) == 1
        worker.send(store.ref, ReleaseLease(leases=[lease.lease]))
        await until(lambda: not list(site.shm_dir.iterdir()))


async def test_an_idle_arena_makes_room_for_another_model_and_a_busy_one_does_not(site: Site):
    store, worker, other = site.make_store(), site.make_worker(fill=1), site.make_worker(fill=2, fingerprint="n")
    async with running(store, worker, other):
        await worker.store.offer(CHAIN[:4], range(4))
        await until(lambda: store.usage().cached == 4)
        lease = await lease_of(worker, store, CHAIN)
        await other.store.offer(CHAIN[:2], range(2))
        assert list(store.arenas) == ["m"]
        worker.send(store.ref, ReleaseLease(leases=[lease.lease]))
        await until(lambda: not len(store.leases))
        other.store._skip_until.clear()
        await other.store.offer(CHAIN[:2], range(2))
        await settled(store, KvUsage(total=16, free=14, cached=2))
        assert list(store.arenas) == ["n"]
        assert await worker.store.fetch(CHAIN, range(10)) == 0


@pytest.mark.parametrize("block_bytes", [0, -1, 1 << 40])
async def test_blocks_of_an_impossible_size_are_refused(site: Site, block_bytes: int):
    store, worker = site.make_store(), site.make_worker()
    async with running(store, worker):
        offer = BlockOffer(holder=worker.ref, fingerprint="m", block_bytes=block_bytes, hashes=CHAIN)
        answer = await worker.ask_store(store, offer)
        assert isinstance(answer, Rejected) and answer.code == "invalid_parameter"
        assert not store.arenas


async def test_a_segment_that_can_not_be_made_refuses_offers_and_stops_nobody(site: Site):
    store, worker = site.make_store(), site.make_worker()
    async with running(store, worker):
        store.config = msgspec.structs.replace(store.config, shm_dir="/nowhere")
        offer = BlockOffer(holder=worker.ref, fingerprint="m", block_bytes=BLOCK_BYTES, hashes=CHAIN)
        for _ in range(2):
            answer = await worker.ask_store(store, offer)
            assert isinstance(answer, Rejected) and answer.code == "out_of_blocks" and "shm_dir" in answer.message
        assert await worker.store.fetch(CHAIN, range(10)) == 0


def test_a_missing_shm_dir_is_said_at_start(site: Site):
    with pytest.raises(ConfigError, match="shm_dir"):
        site.make_store(shm_dir="/nowhere")


async def test_too_little_shared_memory_is_said_at_start(site: Site):
    store = site.make_store(capacity_mb=1 << 30)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            await group.start(store.run)
    assert caught.group_contains(ConfigError, match="capacity_mb")


async def test_the_store_sweeps_what_a_dead_worker_left(site: Site):
    script = "import sys, os, common.transfer.shm as s; x = s.Segment.create(sys.argv[1], 'dead', num_blocks=1, block_bytes=9,"
    script += " fingerprint=''); os._exit(1)"
    with anyio.fail_after(20):
        await anyio.run_process([sys.executable, "-c", script, str(site.shm_dir)], check=False)
    assert len(list(site.shm_dir.iterdir())) == 1
    store = site.make_store()
    async with running(store):
        assert list(site.shm_dir.iterdir()) == []
        assert store.presence("ready").host == host_id(site.shm_dir)


def test_the_store_starts_without_torch():
    script = "import services.kvstore.actor, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
