"""Kvstores and draft workers tell what they did for a request, on the memory bus; leases show their age, checksums that fail
show as failures."""

from __future__ import annotations

from pathlib import Path

import anyio

from common.protocol.draft_messages import DraftClose, DraftRow, DraftUpdate
from common.protocol.explain_messages import Explain, Explained, RequestContext, WorkerEvent
from common.runtime.actor import Actor
from common.testing.memory_bus import MemoryBroker
from common.worker.store_client import Origin
from common.worker.store_lookups import Search
from tests.actors.kvstore_site import BLOCK_BYTES, CHAIN, grant_of, lease_of, running, spoil, temporary_site, until
from tests.actors.test_draft import Decoder, make_draft
from tests.actors.test_draft import running as drafting

REQUEST = RequestContext("chatcmpl-1/1/1", 1)


async def told(asker: Actor, store: Actor, request: str = REQUEST.request) -> list[WorkerEvent]:
    answer = await asker.ask(store.ref, Explain(request=request), 1.0)
    assert isinstance(answer, Explained) and answer.worker == store.ref
    return [event for record in answer.records for event in record.events]


def sample(actor: Actor, name: str, **labels: str) -> float:
    return actor.metrics.registry.get_sample_value(f"penstock_{name}", labels) or 0.0


async def test_a_kvstore_tells_what_it_found_for_a_request_and_what_it_took() -> None:
    with temporary_site() as site:
        store, giver, taker = site.make_store(), site.make_worker(fill=1), site.make_worker()
        async with running(store, giver, taker):
            search = Search(REQUEST)
            assert await giver.store.fetch(CHAIN, range(10), 0, search) == 0
            assert list(search.stores) == [store.ref] and not search.num_bytes and not search.error
            await giver.store.offer(CHAIN[:4], range(4), 0, Origin(REQUEST))
            await until(lambda: store.arenas.num_readable == 4)
            search = Search(REQUEST)
            assert await taker.store.fetch(CHAIN, range(10), 0, search) == 4
            assert (search.num_bytes, search.num_from_disk) == (4 * BLOCK_BYTES, 0)
            missed, stored, found = await told(taker, store)
            assert (missed.name, stored.name, found.name) == ("lookup", "store", "lookup")
            assert dict(missed.facts) == {"asked_blocks": 10, "memory_hit_blocks": 0, "disk_hit_blocks": 0}
            assert (stored.num_bytes, dict(stored.facts)) == (4 * BLOCK_BYTES, {"stored_blocks": 4})
            assert dict(found.facts)["memory_hit_blocks"] == 4 and found.peer == taker.ref.id
            assert all(event.began_at <= event.ended_at for event in (missed, stored, found))
            await taker.store.fetch(CHAIN, range(10))  # for nobody in particular
            assert len(await told(taker, store)) == 3 and await told(taker, store, "another") == []
            assert sample(taker, "kv_transfer_bytes_total", path="kvstore", operation="read") == 8 * BLOCK_BYTES
            assert sample(giver, "kv_transfer_bytes_total", path="kvstore", operation="write") == 4 * BLOCK_BYTES


async def test_a_kvstore_tells_of_its_disk(tmp_path: Path) -> None:
    with temporary_site() as site:
        disk = {"kv_disk": str(tmp_path / "kv"), "kv_disk_gb": 1}
        store, giver = site.make_store(**disk), site.make_worker(fill=1)
        async with running(store, giver):
            await giver.store.offer(CHAIN, range(10), 0, Origin(REQUEST))
            await until(lambda: store.disk.num_blocks == 10 and store.disk.settled)
            written = [event for event in await told(giver, store) if event.name == "write-back"]
            assert sum(dict(event.facts)["written_blocks"] for event in written) == 10
            assert sample(store, "kv_transfer_bytes_total", path="disk", operation="write") == 10 * BLOCK_BYTES
        store, taker = site.make_store(**disk), site.make_worker()
        async with running(store, taker):
            search = Search(REQUEST)
            assert await taker.store.fetch(CHAIN, range(10), 0, search) == 10
            assert search.num_from_disk == 10
            events = await told(taker, store)
            read = [event for event in events if event.name == "disk read"]
            assert sum(dict(event.facts)["read_blocks"] for event in read) == 10
            assert sum(dict(event.facts)["disk_hit_blocks"] for event in events if event.name == "lookup") == 10
            (path,) = store.presence("ready").traffic.paths
            assert (path.path, path.operation, path.bytes) == ("disk", "read", 10 * BLOCK_BYTES)
            again = Search(REQUEST)
            assert await taker.store.fetch(CHAIN, range(10), 0, again) == 10 and again.num_from_disk == 0


async def test_leases_of_a_kvstore_show_by_kind_and_age() -> None:
    with temporary_site() as site:
        store, worker = site.make_store(lease_s=30.0), site.make_worker(fill=1)
        async with running(store, worker):
            await worker.store.offer(CHAIN[:2], range(2))
            await until(lambda: store.arenas.num_readable == 2)
            await lease_of(worker, store, CHAIN[:2])
            await grant_of(worker, store, CHAIN[5:7])
            for kind in ("read", "write"):
                assert sample(store, "kv_leases", kind=kind, age="0-1s") == 1
            await anyio.sleep(0.05)
            assert 0.05 <= sample(store, "kv_lease_oldest_seconds", kind="read") < 1
            said = store.presence("ready").traffic
            assert said.leases == 2 and said.oldest_lease_s >= 0.1
            assert sample(store, "kvstore_state_blocks", state="leased") == 2


async def test_blocks_by_state_add_up_to_the_capacity_once_their_size_is_known() -> None:
    with temporary_site() as site:
        store, worker = site.make_store(), site.make_worker(fill=1)
        states = ("free", "owned", "leased", "cached")
        assert "add up to its capacity once a model has blocks here, and to 0 before" in store.metrics.render().decode()
        async with running(store, worker):
            assert [sample(store, "kvstore_state_blocks", state=state) for state in states] == [0, 0, 0, 0]
            await worker.store.offer(CHAIN[:2], range(2))
            await until(lambda: store.arenas.num_readable == 2)
            total = sum(sample(store, "kvstore_state_blocks", state=state) for state in states)
            (arena,) = (store.arenas[fingerprint] for fingerprint in store.arenas)
            assert total == store.arenas.capacity_bytes // arena.slot_bytes


async def test_a_block_that_fails_its_checksum_is_a_failure_of_its_path() -> None:
    with temporary_site() as site:
        store, giver, taker = site.make_store(), site.make_worker(fill=1), site.make_worker()
        async with running(store, giver, taker):
            await giver.store.offer(CHAIN[:4], range(4))
            await until(lambda: store.arenas.num_readable == 4)
            spoil(store.arenas["m"], 2)
            search = Search(REQUEST)
            assert await taker.store.fetch(CHAIN[:4], range(4), 0, search) == 2 and search.error == "checksum"
            assert sample(taker, "kv_transfer_failures_total", path="kvstore", operation="read", reason="checksum") == 1


async def test_a_draft_worker_tells_what_it_proposed_for_a_request() -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make_draft(broker)
    async with drafting(decoder, draft):
        whole, more = DraftRow("a", 0, [1, 2, 3, 1, 2]), DraftRow("a", 5, [3])
        decoder.send(draft.ref, DraftUpdate(decode=decoder.ref, rows=[whole], contexts={"a": REQUEST}))
        decoder.send(draft.ref, DraftUpdate(decode=decoder.ref, rows=[more, DraftRow("b", 0, [5, 5, 5])]))
        await until(lambda: any(row.base == 6 for message in decoder.proposals for row in message.rows))
        (held,) = await told(decoder, draft)
        facts = dict(held.facts)
        assert (held.name, held.peer, facts["updates"]) == ("drafting", decoder.ref.id, 2)
        assert 1 <= facts["proposals_sent"] <= 2 and facts["proposed_tokens"] >= facts["proposals_sent"]
        decoder.send(draft.ref, DraftClose(decode=decoder.ref, sequences=["a", "b"]))
        await until(lambda: not len(draft.notes))
        (left,) = await told(decoder, draft)
        assert (left.began_at, dict(left.facts)) == (held.began_at, facts)
