"""The kvstore's disk tier: what was stored is there after a restart, byte for byte or not at all, and nobody waits for it
long."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.protocol.cache_messages import BlockLookup
from common.protocol.messages import KvUsage
from common.worker import store_client, store_lookups
from common.worker.fetch_rate import FetchRates
from common.worker.store_lookups import Search
from services.kvstore import disk_threads, disk_tier, promotion, write_back
from services.kvstore.actor import KvstoreActor
from services.kvstore.disk_files import SlotFile, slot_bytes_of
from services.kvstore.disk_folder import DiskFolder
from services.kvstore.index_file import IndexFile
from tests.actors.kvstore_site import BLOCK_BYTES, CHAIN, Site, Worker, grant_of, lease_of, running, temporary_site, until
from tests.fixtures.tmpfs import small_tmpfs


@pytest.fixture
def site() -> Iterator[Site]:
    with temporary_site() as made:
        yield made


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things changes nothing."""
    monkeypatch.setattr(promotion, "ANSWER_S", 10.0)
    monkeypatch.setattr(store_lookups, "ASK_TIMEOUT_S", 20.0)
    monkeypatch.setattr(store_client, "DISK_WAIT_S", 60.0)


def store_on(site: Site, kv: Path, **changes: object) -> KvstoreActor:
    return site.make_store(**{"kv_disk": str(kv), "kv_disk_gb": 1, **changes})


async def on_disk(store: KvstoreActor, blocks: int) -> None:
    await until(lambda: store.disk.num_blocks == blocks and store.disk.settled)


async def stored(site: Site, kv: Path, fill: int = 1, hashes: list[bytes] = CHAIN, fingerprint: str = "m") -> Worker:
    """A worker whose blocks a store has written to disk; that store has ended."""
    store, giver = store_on(site, kv), site.make_worker(fill=fill, fingerprint=fingerprint)
    async with running(store, giver):
        before = store.disk.num_blocks
        await giver.store.offer(hashes, range(len(hashes)))
        await on_disk(store, before + len(hashes))
    return giver


async def test_blocks_are_there_after_the_store_was_started_again(site: Site, kv: Path):
    giver = await stored(site, kv)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        assert store.usage().cached == 0 and store.disk.num_blocks == 10
        assert await taker.store.fetch([*CHAIN, b"more"], range(10)) == 10
        assert (taker.blocks == giver.blocks).all()
        assert await taker.store.fetch(CHAIN, range(10)) == 10
        await until(lambda: store.usage() == KvUsage(total=16, free=6, cached=10))
        memory, disk = store.tiers()
        assert (memory.hit_blocks, disk.hit_blocks, disk.queued_blocks, disk.damaged_blocks) == (10, 10, 0, 0)
        assert disk.blocks == 10 and disk.bytes == 10 * slot_bytes_of(BLOCK_BYTES) and disk.capacity_bytes == 1 << 30
        page = store.metrics.render().decode()
        assert "penstock_kvstore_disk_hit_blocks_total 10.0" in page and "penstock_kvstore_hit_blocks_total 20.0" in page
        assert store.presence("ready").tiers == [memory, disk]


async def test_a_store_that_was_killed_keeps_what_it_had_written(site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DiskFolder, "_save_last", lambda self: None)  # a kill: nothing is saved at the end
    giver = await stored(site, kv)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        assert await taker.store.fetch(CHAIN, range(10)) == 10
        assert (taker.blocks == giver.blocks).all()


async def test_draining_writes_what_is_queued(site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(write_back, "WRITE_BYTES", 1)
    store, giver = store_on(site, kv), site.make_worker(fill=1)
    async with running(store, giver):
        await giver.store.offer(CHAIN, range(10))
        store.begin_drain()
        await until(lambda: not store.running)
    async with running(again := store_on(site, kv)):
        assert again.disk.num_blocks == 10


async def test_other_models_and_other_tenants_find_nothing(site: Site, kv: Path):
    await stored(site, kv)
    store, other, worker = store_on(site, kv), site.make_worker(fingerprint="n"), site.make_worker()
    async with running(store, other, worker):
        assert await other.store.fetch(CHAIN, range(10)) == 0
        assert await worker.store.fetch([b"salted" + block_hash for block_hash in CHAIN], range(10)) == 0
        assert await worker.store.fetch(CHAIN, range(10)) == 10


async def test_another_layout_of_the_same_name_is_refused_in_both_tiers(site: Site, kv: Path):
    await stored(site, kv)
    store, other = store_on(site, kv), site.make_worker(fill=3, block_bytes=BLOCK_BYTES // 2)
    async with running(store, other):
        assert await other.store.fetch(CHAIN, range(10)) == 0
        await other.store.offer(CHAIN, range(10))
        assert store.usage().cached + store.usage().leased == 10 and store.disk.num_queued == 0


async def test_what_memory_gave_up_comes_back_from_disk(site: Site, kv: Path):
    store, worker = store_on(site, kv), site.make_worker(fill=1)  # memory for 16 blocks
    chains = [[bytes([name]) + block_hash for block_hash in CHAIN] for name in b"abcd"]
    async with running(store, worker):
        for number, chain in enumerate(chains):
            await worker.store.offer(chain, range(10))
            await on_disk(store, 10 * (number + 1))
        expected = worker.blocks.copy()
        for chain in chains:
            worker.blocks[:] = 0
            assert await worker.store.fetch(chain, range(10)) == 10
            assert (worker.blocks == expected).all()
        assert store.tiers()[0].evicted_blocks > 0


async def test_a_windows_tail_comes_from_disk(site: Site, kv: Path):
    giver = await stored(site, kv, hashes=CHAIN[3:6])
    store, taker = store_on(site, kv), site.make_worker()
    firsts = [max(0, i - 1) for i in range(10)]  # a window of two blocks
    async with running(store, taker):
        assert await taker.store.find(CHAIN, firsts, 0) == 6
        assert await taker.store.fetch(CHAIN[4:6], [4, 5]) == 2
        assert (taker.blocks[[4, 5]] == giver.blocks[[1, 2]]).all()
        await until(lambda: store.usage() == KvUsage(total=16, free=14, cached=2))  # the window reads no more
        assert await taker.store.find(CHAIN[:4], firsts[:4], 0) == 0


async def test_two_lookups_of_one_chain_read_it_once(site: Site, kv: Path):
    await stored(site, kv)
    store, first, second = store_on(site, kv), site.make_worker(), site.make_worker()
    got: list[int] = []

    async def fetch(worker: Worker, count: int) -> None:
        got.append(await worker.store.fetch(CHAIN[:count], range(count)))

    async with running(store, first, second):
        async with anyio.create_task_group() as group:
            group.start_soon(fetch, first, 10)
            group.start_soon(fetch, second, 8)
        assert sorted(got) == [8, 10] and (first.blocks[:8] == second.blocks[:8]).all()
        assert store.disk.usage().hit_blocks == 10


async def test_a_damaged_block_ends_a_hit_and_is_written_anew(site: Site, kv: Path, caplog: pytest.LogCaptureFixture):
    giver = await stored(site, kv)
    (path,) = kv.glob("*.blocks")
    data = bytearray(path.read_bytes())
    data[4 * slot_bytes_of(BLOCK_BYTES) + 1000] ^= 1
    path.write_bytes(data)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        assert await taker.store.fetch(CHAIN, range(10)) == 4
        assert (taker.blocks[:4] == giver.blocks[:4]).all()
        assert store.disk.usage().damaged_blocks == 1
        taker.blocks[:] = giver.blocks
        await taker.store.offer(CHAIN, range(10))
        await on_disk(store, 10)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        assert await taker.store.fetch(CHAIN, range(10)) == 10
        assert (taker.blocks == giver.blocks).all()
    assert caplog.text.count("kv_disk_block_damaged") == 1


async def test_a_full_disk_is_one_line_and_keeps_what_is_there(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with small_tmpfs(tmp_path / "small", size=600 << 10) as small:
        store, worker = store_on(site, small / "kv"), site.make_worker(fill=1)
        async with running(store, worker):
            await worker.store.offer(CHAIN, range(10))
            await until(lambda: store.disk.settled and 0 < store.disk.num_blocks < 10)
            assert await worker.store.fetch(CHAIN, range(10)) == 10, "memory goes on"
            late = [b"late" + block_hash for block_hash in CHAIN[:2]]
            await worker.store.offer(late, range(2))
            await until(lambda: store.usage().cached == 12 and store.disk.settled)
            assert store.disk.usage().evicted_blocks
        again, taker = store_on(site, small / "kv"), site.make_worker()
        async with running(again, taker):
            assert await taker.store.fetch(late, range(2)) == 2, "new blocks took the place of old ones"
            assert (taker.blocks[:2] == worker.blocks[:2]).all()
    assert caplog.text.count("kv_disk_full") == 1


async def test_a_disk_that_fails_is_one_line_and_the_store_goes_on(
    site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    giver = await stored(site, kv)
    monkeypatch.setattr(SlotFile, "write", broken)
    monkeypatch.setattr(SlotFile, "read", broken)
    store, worker = store_on(site, kv), site.make_worker(fill=1)
    async with running(store, worker):
        assert await worker.store.fetch(CHAIN, range(10)) == 0
        await worker.store.offer([b"x" + block_hash for block_hash in CHAIN[:5]], range(5))
        await worker.store.offer([b"y" + block_hash for block_hash in CHAIN[:5]], range(5))
        assert await worker.store.fetch([b"y" + block_hash for block_hash in CHAIN[:5]], range(5)) == 5
        await until(lambda: 'kvstore_disk_errors_total{operation="write"} 1.0' in store.metrics.render().decode())
        assert 'kvstore_disk_errors_total{operation="read"} 1.0' in store.metrics.render().decode()
    said = caplog.text
    assert said.count("kv_disk_not_written") == said.count("kv_disk_not_read") == 1
    assert giver.blocks.any()


async def test_an_index_that_cannot_be_written_is_one_line_however_much_is_offered(
    site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: Any) -> None:
        raise OSError("the index can't be written: mdb_txn_commit: Input/output error")

    store, worker = store_on(site, kv), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN[:1], range(1))
        await on_disk(store, 1)
        monkeypatch.setattr(IndexFile, "save", broken)
        for number in range(5):
            # found in memory, so its record changes; and a new block waits to be written
            assert await worker.store.fetch(CHAIN[:1], range(1)) == 1
            await worker.store.offer([b"late-%011d" % number], range(1))
            await anyio.sleep(0.05)
        await until(lambda: store.usage().cached == 6)
    assert caplog.text.count("kv_disk_not_written") == 1


@pytest.mark.parametrize("trouble", ["file", "format", "lock"])
async def test_a_folder_that_cannot_be_used_is_one_line_and_the_store_goes_on(
    site: Site, kv: Path, trouble: str, caplog: pytest.LogCaptureFixture
):
    other: DiskFolder | None = None
    if trouble == "file":
        kv.write_text("not a folder")
    elif trouble == "format":
        kv.mkdir()
        (kv / "format").write_text("penstock-kv 77\n")
    else:
        other = DiskFolder.open(kv, capacity_bytes=1 << 20, clock=time.monotonic, active_s=1.0)
    store, giver, taker = store_on(site, kv), site.make_worker(fill=1), site.make_worker()
    async with running(store, giver, taker):
        await giver.store.offer(CHAIN, range(10))
        await until(lambda: store.usage().cached == 10)
        assert await taker.store.fetch(CHAIN, range(10)) == 10
        assert str(kv) in store.presence("ready").tiers[1].problem
    if other is not None:
        other.close()
    assert caplog.text.count("kv_disk_off") == 1


async def test_a_folder_of_a_user_who_is_not_there_is_one_line_and_the_store_goes_on(
    site: Site, caplog: pytest.LogCaptureFixture
):
    store = store_on(site, Path("~nobody-of-that-name/kv"))
    async with running(store):
        assert "~nobody-of-that-name/kv can't be used" in store.presence("ready").tiers[1].problem
    assert caplog.text.count("kv_disk_off") == 1


async def test_a_disk_that_does_not_answer_keeps_no_store_from_its_start_and_is_used_once_it_does(
    site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    giver = await stored(site, kv)
    open_folder, answers = DiskFolder.open, threading.Event()

    def slow(*arguments: Any, **named: Any) -> DiskFolder:
        answers.wait(30)
        return open_folder(*arguments, **named)

    monkeypatch.setattr(DiskFolder, "open", slow)
    monkeypatch.setattr(disk_tier, "OPEN_S", 0.05)
    monkeypatch.setattr(disk_tier, "LOOK_AGAIN_S", 0.01)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        assert "has not answered" in store.presence("ready").tiers[1].problem
        assert await taker.store.fetch(CHAIN, range(10)) == 0
        await grant_of(taker, store, [b"z"])  # the store answers
        answers.set()
        await until(lambda: store.disk.num_blocks == 10)
        assert store.presence("ready").tiers[1].problem == ""
        assert await taker.store.fetch(CHAIN, range(10)) == 10
        assert (taker.blocks == giver.blocks).all()
    assert caplog.text.count("kv_disk_off") == 1


async def test_nobody_waits_for_a_disk_that_hangs(
    site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    await stored(site, kv)
    read, hangs = SlotFile.read, True

    def slow(*arguments: Any) -> None:
        while hangs:
            time.sleep(0.01)
        read(*arguments)

    monkeypatch.setattr(SlotFile, "read", slow)
    monkeypatch.setattr(promotion, "ANSWER_S", 1.0)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        began = time.monotonic()
        assert await taker.store.fetch(CHAIN, range(10)) == 0
        assert promotion.ANSWER_S <= time.monotonic() - began < store_lookups.ASK_TIMEOUT_S
        began = time.monotonic()
        assert await taker.store.fetch(CHAIN, range(10)) == 0
        assert time.monotonic() - began < promotion.ANSWER_S / 2, "once is enough"
        await grant_of(taker, store, [b"z"])  # the store answers
        hangs = False
        await until(lambda: store.usage().cached == 10)
        assert await taker.store.fetch(CHAIN, range(10)) == 10, "what was read late is there for the next"
    assert caplog.text.count("kv_disk_slow") == 1


async def test_nobody_waits_for_a_disk_where_computing_is_faster(site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch):
    """The lookup is answered although the disk is not read yet; who asks later finds the blocks in memory."""
    giver = await stored(site, kv)
    read, go_on = SlotFile.read, threading.Event()

    def held_up(*arguments: Any) -> None:
        go_on.wait()
        read(*arguments)

    monkeypatch.setattr(SlotFile, "read", held_up)
    monkeypatch.setattr(promotion, "ANSWER_S", 60.0)
    monkeypatch.setattr(store_client, "DISK_WAIT_S", 60.0)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        rates = taker.store.choice._rates = FetchRates(lambda: 1e9)
        for _ in range(3):
            rates.measure("disk", 10 * BLOCK_BYTES, 1.0, time.perf_counter())
        found = Search(block_tokens=16, block_bytes=BLOCK_BYTES)
        try:
            assert await taker.store.fetch(CHAIN, range(10), 0, found) == 0, "it would be asked for 20 s"
        finally:
            go_on.set()
        assert (found.num_skipped, found.num_from_disk, found.error) == (10, 0, "")
        assert len(rates._fetches["disk"]) == 3, "an answer at once says nothing of the disk"
        assert taker.metrics.registry.get_sample_value("penstock_prefix_fetches_skipped_total", {"path": "disk"}) == 1
        await until(lambda: store.usage().cached == 10)
        found = Search(block_tokens=16, block_bytes=BLOCK_BYTES)
        assert await taker.store.fetch(CHAIN, range(10), 0, found) == 10
        assert (taker.blocks == giver.blocks).all() and not found.num_skipped


async def test_a_long_chain_comes_in_parts(site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch):
    giver = await stored(site, kv)
    read = SlotFile.read

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        read(*arguments)

    monkeypatch.setattr(SlotFile, "read", slow)
    monkeypatch.setattr(promotion, "READ_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(promotion, "ANSWER_S", 1.0)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        answer = await taker.ask(store.ref, BlockLookup(holder=taker.ref, fingerprint="m", hashes=CHAIN), 20.0)
        assert 1 <= len(answer.blocks) <= 9 and answer.coming == 10 - len(answer.blocks)  # type: ignore[union-attr]
        assert await taker.store.fetch(CHAIN, range(10)) == 10, "asked for again while more is coming"
        assert (taker.blocks == giver.blocks).all()


async def test_a_fetch_ends_after_its_bound_however_slowly_blocks_come(site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch):
    await stored(site, kv)
    read = SlotFile.read

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        read(*arguments)

    monkeypatch.setattr(SlotFile, "read", slow)
    monkeypatch.setattr(promotion, "READ_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(promotion, "ANSWER_S", 1.0)
    monkeypatch.setattr(store_client, "DISK_WAIT_S", 1.5)
    store, taker = store_on(site, kv), site.make_worker()
    async with running(store, taker):
        assert 1 <= await taker.store.fetch(CHAIN, range(10)) <= 9, "all of them take 3 s"


async def test_a_block_in_use_on_disk_is_not_given_up(site: Site, kv: Path):
    store, worker = store_on(site, kv), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN, range(10))
        await on_disk(store, 10)
        lease = await lease_of(worker, store, CHAIN)
        assert len(lease.blocks) == 10
        folder = store.disk.folder
        assert folder is not None
        folder.index.check()
        assert folder.index.files["m"].find(CHAIN[0]) is not None


async def test_a_store_goes_on_without_a_disk_that_hangs_in_a_write_and_uses_it_again_when_it_answers(
    site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write, answers = SlotFile.write, threading.Event()

    def held_up(*arguments: Any) -> None:
        answers.wait(30)
        write(*arguments)

    monkeypatch.setattr(SlotFile, "write", held_up)
    monkeypatch.setattr(disk_threads, "STUCK_S", 0.05)
    store, worker = store_on(site, kv), site.make_worker(fill=1)
    async with running(store, worker):
        await worker.store.offer(CHAIN, range(10))
        await until(lambda: "has not ended a write" in store.presence("ready").tiers[1].problem)
        assert await worker.store.fetch(CHAIN, range(10)) == 10, "from memory"
        await grant_of(worker, store, [b"z"])
        answers.set()
        await until(lambda: store.disk.num_blocks >= 10 and not store.presence("ready").tiers[1].problem)
    assert caplog.text.count("kv_disk_off") == 1


@pytest.mark.parametrize("knows", [True, False], ids=["for-long", "since-a-moment"])
async def test_a_store_stops_although_its_disk_hangs(site: Site, kv: Path, monkeypatch: pytest.MonkeyPatch, *, knows: bool):
    began, answers = threading.Event(), threading.Event()

    def held_up(*arguments: Any) -> None:
        began.set()
        answers.wait(60)

    monkeypatch.setattr(SlotFile, "write", held_up)
    monkeypatch.setattr(disk_threads, "STUCK_S", 0.05 if knows else 0.5)
    store, worker = store_on(site, kv), site.make_worker(fill=1)
    try:
        async with running(store, worker):
            await worker.store.offer(CHAIN, range(10))
            await until(lambda: bool(store.presence("ready").tiers[1].problem) if knows else began.is_set())
            store.begin_drain()
            await until(lambda: not store.running)
    finally:
        answers.set()
