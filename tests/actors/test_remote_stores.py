"""A kvstore of another host over real NIXL: the bytes that were stored, or a miss; and whatever happens, nothing stays held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch

from common.cache.prefix import hash_chain
from common.protocol.cache_messages import BlockLease
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message, Rejected, ReleaseLease
from common.protocol.transfer_messages import BlocksStaged, DescribeMemory, MemoryDescribed, StageBlocks, UnstageBlocks
from common.transfer import nixl as nixl_transport
from common.transfer import staging
from common.transfer.block_memory import BlockMemory
from common.transfer.host_stage import HostStage
from common.worker import remote_kv, remote_paths, remote_stores, store_lookups
from common.worker.store_lookups import Search
from services.kvstore import remote_readers
from services.kvstore.actor import KvstoreActor
from tests.actors.kvstore_site import BLOCK_BYTES, CHAIN, Worker, lease_of, spoil, until
from tests.actors.remote_site import BLOCK_TOKENS, Reader, TwoHosts, at_rest, change_answers, running, two_hosts
from tests.chaos.test_between_hosts import Faults

pytest.importorskip("nixl", reason="NIXL is not installed: pip install --no-deps nixl nixl-cu13")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things changes nothing; a path that failed is tried again soon."""
    monkeypatch.setattr(store_lookups, "ASK_TIMEOUT_S", 30.0)
    monkeypatch.setattr(remote_stores, "DISK_WAIT_S", 60.0)
    monkeypatch.setattr(store_lookups, "SKIP_FAILED_S", 0.01)
    monkeypatch.setattr(remote_stores, "STAGE_TIMEOUT_S", 30.0)
    monkeypatch.setattr(remote_paths, "ASK_TIMEOUT_S", 30.0)
    monkeypatch.setattr(remote_paths, "RETRY_PATH_S", 0.05)
    monkeypatch.setattr(nixl_transport, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(nixl_transport, "RETRY_MOST_S", 0.1)
    monkeypatch.setattr(remote_kv, "NixlAgent", Faults)
    for name in ("fail_every", "damage_every", "num_reads"):
        monkeypatch.setattr(Faults, name, 0)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


async def filled(store: KvstoreActor, giver: Worker, hashes: list[bytes] = CHAIN) -> None:
    """The store has the giver's blocks, in their order."""
    before = store.usage().cached
    await giver.store.offer(hashes, range(len(hashes)))
    await until(lambda: store.usage().cached == before + len(hashes), 30)


async def staged(reader: Reader, store: KvstoreActor, name: str = "mine", end: int = 10) -> tuple[BlockLease, Message]:
    """A lease of all blocks, and the answer to a question for copies of the first `end`."""
    lease = await lease_of(reader, store, CHAIN)
    question = StageBlocks(holder=reader.ref, lease=lease.lease, stage=name, start=0, end=end)
    return lease, await reader.ask(store.ref, question, 30.0)


async def test_a_store_of_another_host_is_read(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        assert reader.store.available and not reader.store.keepers(CHAIN), "it reads there, and offers nothing"
        assert await reader.store.fetch([*CHAIN[:8], b"more"], [9, 8, 7, 6, 5, 4, 3, 2, 1]) == 8
        assert (reader.blocks[[9, 8, 7, 6, 5, 4, 3, 2]] == giver.blocks[:8]).all()
        assert not reader.blocks[:2].any()
        assert reader.remote_bytes == 8 * BLOCK_BYTES
        await at_rest(store, cached=10)
        assert f"penstock_kvstore_staged_bytes_total {8 * BLOCK_BYTES}.0" in store.metrics.render().decode()


async def test_a_worker_whose_blocks_pass_through_a_stage_reads_it(hosts: TwoHosts):
    """As one with a GPU does, be it for prefill or decode."""
    stages: list[HostStage] = []

    def staged_blocks(blocks: np.ndarray) -> BlockMemory:
        stages.append(HostStage([torch.from_numpy(blocks)], 4 * BLOCK_BYTES))
        return stages[-1].groups[0]

    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader(memory=staged_blocks)
    async with running(store, giver, reader):
        await filled(store, giver)
        assert await reader.store.fetch(CHAIN, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]) == 10
        assert (reader.blocks[::-1] == giver.blocks).all()
        assert reader.remote_bytes == 10 * BLOCK_BYTES
        await at_rest(store, cached=10)
    assert stages[0].num_free_slots == stages[0].num_slots
    stages[0].close()


async def test_a_long_lease_is_read_in_parts(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    reader.nixl.slice_bytes = 3 * BLOCK_BYTES
    async with running(store, giver, reader):
        await filled(store, giver)
        assert await reader.store.fetch(CHAIN, range(10)) == 10
        assert (reader.blocks == giver.blocks).all()
        assert reader.counts.totals()[0].copies == 4
        await at_rest(store, cached=10)


async def test_what_the_own_hosts_store_has_is_not_asked_for_elsewhere(hosts: TwoHosts):
    near, far = hosts.make_store(0), hosts.make_store(1)
    giver, other, reader = hosts.make_giver(), hosts.make_giver(0), hosts.make_reader()
    async with running(near, far, giver, other, reader):
        await filled(far, giver)
        await filled(near, other, CHAIN[:3])
        assert await reader.store.fetch(CHAIN[:3], range(3)) == 3
        assert reader.remote_bytes == 0 and "kvstore_lookups_total 0.0" in far.metrics.render().decode()
        assert await reader.store.fetch(CHAIN, range(10)) == 10
        assert reader.remote_bytes == 7 * BLOCK_BYTES
        assert (reader.blocks == giver.blocks).all(), "both givers have the same bytes"
        await at_rest(far, cached=10)
        await at_rest(near, cached=3)


async def test_a_windows_tail_is_found_in_a_store_of_another_host(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    firsts = [max(0, i - 1) for i in range(10)]  # a window of two blocks
    async with running(store, giver, reader):
        await filled(store, giver, CHAIN[3:6])
        assert await reader.store.find(CHAIN, firsts, 0) == 6
        assert await reader.store.fetch(CHAIN[4:6], [4, 5]) == 2
        assert (reader.blocks[4:6] == giver.blocks[1:3]).all()
        await at_rest(store, cached=3)


async def test_what_only_the_other_hosts_disk_has_is_read(hosts: TwoHosts, tmp_path: Path):
    first, giver = hosts.make_store(kv_disk=str(tmp_path)), hosts.make_giver()
    async with running(first, giver):
        await filled(first, giver)
        await until(lambda: first.disk.num_blocks == 10 and first.disk.settled, 30)
    store, reader = hosts.make_store(kv_disk=str(tmp_path)), hosts.make_reader()
    async with running(store, reader):
        assert store.usage().cached == 0
        fetched = 0
        with anyio.fail_after(60):
            while fetched < 10:  # a disk that is slow for a moment is not waited for
                fetched = await reader.store.fetch(CHAIN, range(10))
        assert (reader.blocks == giver.blocks).all()
        await at_rest(store, cached=10)


async def test_the_prefix_of_one_tenant_is_no_hit_for_another(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    tokens = list(range(BLOCK_TOKENS * 10))
    mine, theirs = (hash_chain(tokens, BLOCK_TOKENS, fingerprint="m", salt=salt) for salt in (b"mine", b"theirs"))
    async with running(store, giver, reader):
        await filled(store, giver, mine)
        assert await reader.store.fetch(theirs, range(10)) == 0
        assert await reader.store.find(theirs, [0] * 10, 0) == 0
        assert reader.remote_bytes == 0
        assert await reader.store.fetch(mine, range(10)) == 10
        await at_rest(store, cached=10)


# -- what is not worth it


async def test_a_prefix_that_is_sooner_computed_is_not_read(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        reader.tokens_per_s = 1e12
        search = Search(block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
        assert await reader.store.fetch(CHAIN, range(10), search=search) == 0
        assert reader.remote_bytes == 0 and search.num_skipped == 10
        assert await reader.store.fetch(CHAIN[:1], range(1), search=search) == 0, "that was decided"
        assert 'prefix_fetches_skipped_total{path="kvstore_nixl"} 1.0' in reader.metrics.render().decode()
        reader.tokens_per_s = 1e-3
        search = Search(block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES)
        assert await reader.store.fetch(CHAIN, range(10), search=search) == search.num_remote == 10
        await at_rest(store, cached=10)


async def test_a_full_staging_buffer_is_a_miss_and_no_failure(hosts: TwoHosts):
    store, giver = hosts.make_store(staging_mb=1), hosts.make_giver()
    reader, other = hosts.make_reader(), hosts.make_reader()
    async with running(store, giver, reader, other):
        await filled(store, giver)
        lease, answer = await staged(other, store)
        assert isinstance(answer, BlocksStaged)
        assert await reader.store.fetch(CHAIN, range(10)) == 0
        assert reader.sees(store), "it did nothing wrong"
        assert 'kvstore_staging_refusals_total{reason="full"} 1.0' in store.metrics.render().decode()
        other.send(store.ref, UnstageBlocks(stages=["mine"]))
        other.send(store.ref, ReleaseLease(leases=[lease.lease]))
        await at_rest(store, cached=10)
        assert await reader.store.fetch(CHAIN, range(10)) == 10


async def test_one_reader_can_not_take_the_whole_buffer(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        for number in range(staging.MAX_COPIES):
            lease, answer = await staged(reader, store, f"copy {number}", end=1)
            assert isinstance(answer, BlocksStaged)
        lease, answer = await staged(reader, store, "one more", end=1)
        assert isinstance(answer, Rejected) and answer.code == "out_of_credits"
        reader.send(store.ref, UnstageBlocks(stages=["copy 0"]))
        question = StageBlocks(holder=reader.ref, lease=lease.lease, stage="one more", start=0, end=1)
        assert isinstance(await reader.ask(store.ref, question, 30.0), BlocksStaged)


async def test_many_requests_of_one_worker_wait_for_one_another_and_not_for_room(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        found = dict[int, int]()

        async def fetch(block: int) -> None:
            found[block] = await reader.store.fetch(CHAIN[block : block + 1], [block])

        async with anyio.create_task_group() as group:
            for block in range(10):
                group.start_soon(fetch, block)
        assert found == dict.fromkeys(range(10), 1)
        assert (reader.blocks == giver.blocks).all()
        assert "kvstore_staging_refusals_total{reason=" not in store.metrics.render().decode()
        await at_rest(store, cached=10)


# -- everything ends with its lease


async def released(hosts: TwoHosts, reader: Reader, store: KvstoreActor, lease: BlockLease) -> None:
    reader.send(store.ref, ReleaseLease(leases=[lease.lease]))


async def expired(hosts: TwoHosts, reader: Reader, store: KvstoreActor, lease: BlockLease) -> None:
    store.leases.renew(reader.ref, [lease.lease], store.clock() - 2 * store.config.lease_s)


async def lost(hosts: TwoHosts, reader: Reader, store: KvstoreActor, lease: BlockLease) -> None:
    reader.connection.kill()


async def fenced(hosts: TwoHosts, reader: Reader, store: KvstoreActor, lease: BlockLease) -> None:
    store._begin_anew(store.ref.epoch)


@pytest.mark.parametrize("end", [released, expired, lost, fenced])
async def test_staged_blocks_end_with_their_lease(hosts: TwoHosts, end: Callable[..., Any]):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        lease, answer = await staged(reader, store)
        assert isinstance(answer, BlocksStaged) and store.readers.free_bytes < 4 << 20
        await end(hosts, reader, store, lease)
        await at_rest(store, cached=10)


async def test_a_lease_that_ends_while_its_blocks_are_being_copied_frees_them_afterwards(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    copy, begun, may_go_on = remote_readers.copy_slots, anyio.Event(), False

    def slow(*arguments: Any) -> int:
        anyio.from_thread.run_sync(begun.set)
        while not may_go_on:
            anyio.from_thread.run(anyio.sleep, 0.01)
        return copy(*arguments)

    monkeypatch.setattr(remote_readers, "copy_slots", slow)
    async with running(store, giver, reader):
        await filled(store, giver)
        lease = await lease_of(reader, store, CHAIN)
        answers: list[Message] = []

        async def ask() -> None:
            question = StageBlocks(holder=reader.ref, lease=lease.lease, stage="mine", start=0, end=10)
            answers.append(await reader.ask(store.ref, question, 30.0))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await begun.wait()
            reader.send(store.ref, ReleaseLease(leases=[lease.lease]))
            await until(lambda: not len(store.leases), 30)
            assert store.readers.free_bytes < 4 << 20, "a thread still writes there"
            assert store.usage().leased == 10, "and reads these"
            may_go_on = True
        assert isinstance(answers[0], Rejected) and answers[0].code == "stale_handle"
        await at_rest(store, cached=10)


@pytest.mark.parametrize(
    "change",
    [{"lease": "another"}, {"start": 3, "end": 3}, {"start": -1}, {"end": 11}, {"stage": ""}, {"holder": "another"}],
    ids=str,
)
async def test_a_question_that_fits_no_lease_is_refused(hosts: TwoHosts, change: dict[str, Any]):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        lease = await lease_of(reader, store, CHAIN)
        question = StageBlocks(holder=reader.ref, lease=lease.lease, stage="mine", start=0, end=10)
        if "holder" in change:
            change = {"holder": WorkerRef("decode", "somebody", 1)}
        answer = await reader.ask(store.ref, msgspec.structs.replace(question, **change), 30.0)
        assert isinstance(answer, Rejected)
        reader.send(store.ref, ReleaseLease(leases=[lease.lease]))
        await at_rest(store, cached=10)


async def test_a_store_without_the_setting_is_not_read(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(kv_transfer="local"), hosts.make_giver(), hosts.make_reader()
    async with running(giver, reader), anyio.create_task_group() as group:
        await group.start(store.run)
        await until(lambda: giver.store.available, 30)
        await filled(store, giver)
        assert store.presence("ready").endpoints == [] and not reader.store.available
        assert await reader.store.fetch(CHAIN, range(10)) == 0
        assert isinstance(await reader.ask(store.ref, DescribeMemory(holder=reader.ref), 30.0), Rejected)
        _, answer = await staged(reader, store)
        assert isinstance(answer, Rejected) and answer.code == "transport_unavailable"
        await store.stop()


# -- answers and bytes that are wrong


def replaying() -> Callable[[Message], Message]:
    """Every answer is the first one."""
    first: list[Message] = []

    def change(message: Message) -> Message:
        if not isinstance(message, BlocksStaged):
            return message
        first.append(message)
        return first[0]

    return change


def changed(**fields: Any) -> Callable[[Message], Message]:
    return lambda message: msgspec.structs.replace(message, **fields) if isinstance(message, BlocksStaged) else message


def moved(by: int) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        if not isinstance(message, BlocksStaged):
            return message
        return msgspec.structs.replace(message, extents=[(address + by, count) for address, count in message.extents])

    return change


WRONG = {
    "another epoch": changed(owner=WorkerRef("kvstore", "k", 1)),
    "another stage": changed(stage="another"),
    "other checksums": changed(checksums=[1] * 10),
    "no checksums": changed(checksums=[]),
    "fewer blocks": changed(extents=[]),
    "another size": changed(block_bytes=BLOCK_BYTES // 2),
    "other bytes": moved(64),
    "outside the buffer": moved(1 << 30),
    "another kind": lambda message: ReleaseLease(leases=[]) if isinstance(message, BlocksStaged) else message,
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_answer_is_a_miss(hosts: TwoHosts, name: str):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        answer = store.answer
        change_answers(store, WRONG[name])
        assert await reader.store.fetch(CHAIN, range(10)) == 0
        assert not reader.blocks.any(), "nothing reached the pool"
        await at_rest(store, cached=10)
        store.answer = answer
        await until(lambda: reader.sees(store), 30)
        assert await reader.store.fetch(CHAIN, range(10)) == 10


async def test_an_answer_that_is_replayed_is_a_miss(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        change_answers(store, replaying())
        assert await reader.store.fetch(CHAIN[:5], range(5)) == 5
        assert await reader.store.fetch(CHAIN[5:], range(5, 10)) == 0
        assert not reader.blocks[5:].any()
        await at_rest(store, cached=10)


async def test_blocks_of_another_size_are_a_miss(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader(block_bytes=BLOCK_BYTES // 2)
    async with running(store, giver, reader):
        await filled(store, giver)
        assert await reader.store.fetch(CHAIN, range(10)) == 0
        await at_rest(store, cached=10)


async def test_a_block_that_is_damaged_in_the_store_is_forgotten_there(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        arena = store.arenas["m"]
        slot = arena.index.find(CHAIN[4])
        assert slot is not None
        spoil(arena, slot)
        assert await reader.store.fetch(CHAIN, range(10)) == 4
        assert (reader.blocks[:4] == giver.blocks[:4]).all() and not reader.blocks[4:].any()
        assert "kvstore_damaged_blocks_total 1.0" in store.metrics.render().decode()
        await at_rest(store, cached=9)
        await filled(store, giver, CHAIN[4:5])


async def test_bytes_that_change_on_their_way_are_a_miss_and_the_path_is_tested_again(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        Faults.num_reads, Faults.damage_every = 0, 1
        assert await reader.store.fetch(CHAIN, range(10)) == 0
        assert not reader.blocks.any() and not reader.sees(store)
        assert reader.paths.unreachable("kvstore") == [store.readers.endpoints[0].agent]
        assert await reader.store.fetch(CHAIN, range(10)) == 0, "nobody is asked meanwhile"
        Faults.damage_every = 0
        await until(lambda: reader.sees(store), 30)
        assert reader.paths.unreachable("kvstore") == []
        assert await reader.store.fetch(CHAIN, range(10)) == 10
        await at_rest(store, cached=10)


async def test_operations_that_fail_lose_nothing(hosts: TwoHosts):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    reader.nixl.slice_bytes = 2 * BLOCK_BYTES
    async with running(store, giver, reader):
        await filled(store, giver)
        Faults.fail_every = 7
        found = []
        for _ in range(30):
            reader.blocks[:] = 0
            found.append(await reader.store.fetch(CHAIN, range(10)))
            assert (reader.blocks[: found[-1]] == giver.blocks[: found[-1]]).all()
            await until(lambda: reader.sees(store), 30)
        assert max(found) == 10 and min(found) < 10
        Faults.fail_every = 0
        await at_rest(store, cached=10)
        await until(lambda: reader.nixl.num_free_buffers == nixl_transport.NUM_BUFFERS, 30)


# -- stores that end, and others that begin


async def test_a_store_that_begins_anew_is_read_again(hosts: TwoHosts):
    giver, reader = hosts.make_giver(), hosts.make_reader()
    async with running(giver, reader):
        epochs = set()
        for _ in range(2):
            store = hosts.make_store(worker_id="kv")
            async with anyio.create_task_group() as group:
                await group.start(store.run)
                await until(lambda store=store: giver.store.available and reader.sees(store), 30)
                assert await reader.store.fetch(CHAIN, range(10)) == 0, "it is empty"
                await filled(store, giver)
                assert await reader.store.fetch(CHAIN, range(10)) == 10
                epochs.add(store.ref.epoch)
                await store.stop()
            await until(lambda: not reader.store.available, 30)
        assert len(epochs) == 2
        assert (reader.blocks == giver.blocks).all()


async def test_a_store_that_is_killed_between_two_questions_is_a_miss(hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch):
    store, giver, reader = hosts.make_store(), hosts.make_giver(), hosts.make_reader()
    async with running(store, giver, reader):
        await filled(store, giver)
        monkeypatch.setattr(remote_stores, "STAGE_TIMEOUT_S", 0.2)
        lookup = reader.store.lookups.leases

        async def leases_then_death(*arguments: Any) -> list[BlockLease]:
            found = await lookup(*arguments)
            store.bus.kill()  # pyright: ignore[reportAttributeAccessIssue]
            return found

        monkeypatch.setattr(reader.store.lookups, "leases", leases_then_death)
        assert await reader.store.fetch(CHAIN, range(10)) == 0
        assert not reader.blocks.any()


async def test_an_owner_that_describes_itself_wrongly_is_not_read(hosts: TwoHosts):
    class Confused(KvstoreActor):
        def answer(self, reply: str, message: Message) -> None:
            if isinstance(message, MemoryDescribed):
                message = msgspec.structs.replace(message, agent="another")
            super().answer(reply, message)

    store, giver, reader = hosts.make_store(kind=Confused), hosts.make_giver(), hosts.make_reader()
    async with running(giver, reader), anyio.create_task_group() as group:
        await group.start(store.run)
        await until(lambda: reader.paths.unreachable("kvstore") != [], 30)
        await until(lambda: giver.store.available, 30)
        await filled(store, giver)
        assert await reader.store.fetch(CHAIN, range(10)) == 0
        await store.stop()


async def test_many_readers_at_once_get_the_right_bytes_or_none(hosts: TwoHosts):
    store, giver = hosts.make_store(staging_mb=1), hosts.make_giver()
    readers = [hosts.make_reader() for _ in range(3)]
    async with running(store, giver, *readers):
        await filled(store, giver)
        found: list[int] = []

        async def read(reader: Reader, turns: int) -> None:
            for turn in range(turns):
                start = turn % 5
                reader.blocks[:] = 0
                count = await reader.store.fetch(CHAIN[start:], range(10 - start))
                found.append(count)
                assert np.array_equal(reader.blocks[:count], giver.blocks[start : start + count])

        async with anyio.create_task_group() as group:
            for reader in readers:
                group.start_soon(read, reader, 10)
        assert len(found) == 30 and max(found) == 10
        await at_rest(store, cached=10)
