"""The kvstore may be slow, full, gone or new at any moment: workers lose a question's time, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.from_thread
import msgspec
import pytest

from common.protocol import messages
from common.protocol.cache_messages import BlockGrant, BlockLease, BlockLookup, BlockOffer
from common.protocol.errors import ConfigError
from common.protocol.messages import KvUsage, Presence, Rejected, ReleaseLease
from common.runtime.actor import WorkerState
from common.runtime.bus import BusMessage
from common.transfer import segment_file
from common.transfer.segment_file import room_bytes
from common.transfer.shm import host_id
from common.worker import store_lookups
from services.kvstore.actor import KvstoreActor
from tests.actors.kvstore_site import BLOCK_BYTES, CHAIN, Site, lease_of, running, settled, temporary_site, until
from tests.fixtures.tmpfs import small_tmpfs


@pytest.fixture
def site() -> Iterator[Site]:
    with temporary_site() as made:
        yield made


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
    monkeypatch.setattr(store_lookups, "SKIP_FAILED_S", 0.3)
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


async def test_a_store_that_answers_too_late_gets_back_what_it_granted(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_lookups, "SKIP_FAILED_S", 0.05)
    store, worker = site.make_store(lease_s=60.0), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:4], range(4))
        await until(lambda: store.usage().cached == 4)
        undo = site.broker.drop(
            lambda message: bool(message.data) and isinstance(messages.decode(message.data), BlockLease | BlockGrant)
        )
        assert await worker.store.fetch(CHAIN, range(10)) == 0
        await until(lambda: worker.store.available)
        await worker.store.offer(CHAIN, range(10))
        undo()
        await settled(store, KvUsage(total=16, free=12, cached=4))


async def test_a_lease_of_the_same_name_is_refused(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        offer = BlockOffer(holder=worker.ref, fingerprint="m", block_bytes=BLOCK_BYTES, hashes=CHAIN[:2], lease="mine")
        assert isinstance(await worker.ask_store(store, offer), BlockGrant)
        again = msgspec.structs.replace(offer, hashes=CHAIN[2:])
        assert isinstance(answer := await worker.ask_store(store, again), Rejected)
        assert answer.code == "invalid_parameter"
        worker.send(store.ref, ReleaseLease(leases=["mine"]))
        await settled(store, KvUsage(total=16, free=16))


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
            await until(lambda: worker.store.lookups.stores() == [again.ref])
            assert await worker.store.fetch(CHAIN, range(10)) == 0
            await worker.store.offer(CHAIN, range(10))
            await until(lambda: again.usage().cached == 10)
            assert await worker.store.fetch(CHAIN, range(10)) == 10
            await again.stop()


async def test_two_stores_serve_one_host(site: Site):
    store, other, worker = site.make_store(), site.make_store(), site.make_worker(fill=1)
    async with running(store, worker), anyio.create_task_group() as group:
        await group.start(other.run)
        await until(lambda: len(worker.store.lookups.stores()) == 2)
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


async def test_an_idle_arena_makes_room_for_one_too_many_and_a_busy_one_does_not(site: Site):
    store = site.make_store(max_fingerprints=1)
    worker, other = site.make_worker(fill=1), site.make_worker(fill=2, fingerprint="n")
    async with running(store, worker, other):
        await worker.store.offer(CHAIN[:4], range(4))
        await until(lambda: store.usage().cached == 4)
        lease = await lease_of(worker, store, CHAIN)
        await other.store.offer(CHAIN[:2], range(2))
        assert list(store.arenas) == ["m"]
        worker.send(store.ref, ReleaseLease(leases=[lease.lease]))
        await until(lambda: not len(store.leases))
        other.store.lookups.forgive()
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
        store.arenas.directory = "/nowhere"
        offer = BlockOffer(holder=worker.ref, fingerprint="m", block_bytes=BLOCK_BYTES, hashes=CHAIN)
        for _ in range(2):
            answer = await worker.ask_store(store, offer)
            assert isinstance(answer, Rejected) and answer.code == "out_of_blocks" and "shm_dir" in answer.message
        assert await worker.store.fetch(CHAIN, range(10)) == 0


async def test_a_store_waits_for_the_memory_that_workers_still_have_of_its_last_life(site: Site, tmp_path: Path):
    with small_tmpfs(tmp_path / "small", size=4 << 20) as directory:
        (directory / "held").write_bytes(bytes(2 << 20))
        store = site.make_store(capacity_mb=3, shm_dir=str(directory))
        async with anyio.create_task_group() as group:
            group.start_soon(store.start)
            await anyio.sleep(0.12)  # not wait_all_tasks_blocked: it looks every 0.1 s, each time as one of 0.05 s has ended
            (directory / "held").unlink()
        assert room_bytes(directory) >= 3 << 20


def test_a_missing_shm_dir_is_said_at_start(site: Site):
    with pytest.raises(ConfigError, match="shm_dir"):
        site.make_store(shm_dir="/nowhere")


async def test_too_little_shared_memory_is_said_at_start(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segment_file, "ROOM_WAIT_S", 0.1)
    store = site.make_store(capacity_mb=1 << 30)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            await group.start(store.run)
    assert caught.group_contains(ConfigError, match="capacity_mb")


async def test_the_store_sweeps_what_a_dead_worker_left(site: Site):
    script = "import sys, os, common.transfer.segment as s; x = s.Segment.create(sys.argv[1], 'dead', num_blocks=1,"
    script += " block_bytes=9, fingerprint=''); os._exit(1)"
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
