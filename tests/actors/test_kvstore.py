"""What comes out of the kvstore is what was put in, or nothing; and nobody's end leaves anything held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.from_thread
import pytest

from common.cache.prefix import owner_of
from common.protocol.cache_messages import BlockCommit, BlockLookup, BlockOffer, BlockOwner
from common.protocol.errors import StaleHandle
from common.protocol.messages import KvUsage, Rejected, ReleaseLease
from common.worker import store_client
from common.worker.fetch_rate import FetchRates
from common.worker.store_client import Origin
from tests.actors.kvstore_site import (
    BLOCK_BYTES,
    CHAIN,
    Site,
    grant_of,
    lease_of,
    running,
    settled,
    spoil,
    temporary_site,
    until,
)


@pytest.fixture
def site() -> Iterator[Site]:
    with temporary_site() as made:
        yield made


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


async def test_a_store_takes_memory_bit_by_bit_and_gets_everything(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.kvstore.arena.MAX_GROWTH_S", 0.0)
    store, giver, taker = site.make_store(lease_s=1.5), site.make_worker(fill=1), site.make_worker()
    async with running(store, giver, taker):
        assert len((await grant_of(giver, store, CHAIN)).blocks) == 1
        await settled(store, KvUsage(total=16, free=16))
        await giver.store.offer(CHAIN[:9], [7, 3, 4, 5, 0, 9, 8, 2, 1])
        await until(lambda: store.usage().cached == 9)
        assert await taker.store.fetch(CHAIN, range(10)) == 9
        assert (taker.blocks[:9] == giver.blocks[[7, 3, 4, 5, 0, 9, 8, 2, 1]]).all()
        await settled(store, KvUsage(total=16, free=7, cached=9))


async def test_what_does_not_fit_ends_an_offer(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.kvstore.arena.MAX_GROWTH_S", 0.0)
    store, giver = site.make_store(), site.make_worker(fill=1)
    hashes = [b"%d" % i for i in range(20)]
    async with running(store, giver):
        await giver.store.offer(hashes, [i % 10 for i in range(20)])
        await until(lambda: store.usage().cached == 16)
        assert await giver.store.fetch(hashes[:10], range(10)) == 10, "its beginning is kept"
        await settled(store, KvUsage(total=16, free=0, cached=16))


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


async def test_a_windows_tail_is_found_although_what_comes_before_it_was_never_offered(site: Site):
    store, giver, taker = site.make_store(), site.make_worker(fill=1), site.make_worker()
    firsts = [max(0, i - 1) for i in range(10)]  # a window of two blocks
    async with running(store, giver, taker):
        await giver.store.offer(CHAIN[3:6], [7, 3, 4])
        await until(lambda: store.usage().cached == 3)
        assert await taker.store.find(CHAIN, firsts, 0) == 6
        assert await taker.store.find(CHAIN[:5], firsts[:5], 0) == 5
        assert await taker.store.find(CHAIN[:4], firsts[:4], 0) == 0, "a block of two"
        assert await taker.store.find(CHAIN[:2], [0, 2], 0) == 2, "a part of which nothing is read"
        assert await taker.store.find([], [], 0) == 0
        await settled(store, KvUsage(total=16, free=13, cached=3))
        for nonsense in ([0], [2, *firsts[1:]], [0, 3, *firsts[2:]], [-1, *firsts[1:]]):
            answer = await taker.ask_store(store, BlockLookup(holder=taker.ref, fingerprint="m", hashes=CHAIN, firsts=nonsense))
            assert isinstance(answer, Rejected) and answer.code == "invalid_parameter"
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


async def test_a_tenants_flood_leaves_others_their_share(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    mine, theirs = (Origin(owner=BlockOwner(owner_of(tenant))) for tenant in ("mine", "theirs"))
    async with running(store, worker):
        await worker.store.offer(CHAIN[:6], range(6), 0, mine)
        for flood in range(10):
            await worker.store.offer([b"%d" % flood + block_hash for block_hash in CHAIN[:8]], range(8), 0, theirs)
        await settled(store, KvUsage(total=16, cached=16))
        assert await worker.store.fetch(CHAIN[:6], range(6)) == 6


@pytest.mark.parametrize("owner", [BlockOwner(b"short"), BlockOwner(b"12345678", 0.0), BlockOwner(b"", float("nan"))])
async def test_an_owner_that_can_not_be_is_refused(site: Site, owner: BlockOwner):
    store, worker = site.make_store(), site.make_worker(fill=1)
    async with running(store, worker):
        offer = BlockOffer(holder=worker.ref, fingerprint="m", block_bytes=BLOCK_BYTES, hashes=CHAIN[:2], owner=owner)
        answer = await worker.ask_store(store, offer)
        assert isinstance(answer, Rejected) and answer.code == "invalid_parameter"
        assert not store.arenas


async def test_a_worker_says_what_computing_a_block_again_costs(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    worker.store.choice._rates = FetchRates(lambda: 800.0)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:2], range(2), 0, Origin(block_tokens=16))
        await until(lambda: store.usage().cached == 2)
        (arena,) = store.arenas.values()
        assert arena.index.order.seconds_per_byte == pytest.approx(0.02 / arena.slot_bytes)


async def test_two_models_that_take_turns_both_keep_what_they_stored(site: Site):
    store, first = site.make_store(), site.make_worker(fill=1)
    second = site.make_worker(fill=2, fingerprint="n", block_bytes=BLOCK_BYTES // 2 - 100)
    async with running(store, first, second):
        for turn in range(10):
            for worker in (first, second):
                await worker.store.offer(CHAIN[:5], range(5))
                assert await worker.store.fetch(CHAIN[:5], [5, 6, 7, 8, 9]) == 5, f"turn {turn}"
                assert (worker.blocks[5:] == worker.blocks[:5]).all()
                worker.blocks[5:] = 0
        await settled(store, KvUsage(total=27, free=17, cached=10))
        page = store.metrics.render().decode()
        assert "penstock_kvstore_evicted_blocks_total 0.0" in page
        assert f"penstock_kvstore_memory_bytes {5 * BLOCK_BYTES + 5 * BLOCK_BYTES // 2}.0" in page
        assert "penstock_kvstore_arenas 2.0" in page


async def test_a_model_that_nobody_asks_for_gives_its_memory_back(site: Site):
    store, worker = site.make_store(forget_after_s=0.3), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:5], range(5))
        await until(lambda: store.usage().cached == 5)
        assert len(list(site.shm_dir.iterdir())) == 1
        await until(lambda: not list(site.shm_dir.iterdir()))
        assert await worker.store.fetch(CHAIN, range(10)) == 0
        await worker.store.offer(CHAIN[:5], range(5))
        assert await worker.store.fetch(CHAIN, [9, 8, 7, 6, 5]) == 5


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
    store, worker = site.make_store(lease_s=0.5), site.make_worker(fill=1)
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
        spoil(arena, slot)
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

        def slow_write(*chunk: Any) -> list[int]:
            time.sleep(0.1)
            return write_chunk(*chunk)

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
