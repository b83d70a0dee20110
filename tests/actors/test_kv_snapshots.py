"""A gateway that misses something asks for a snapshot, and so does one that starts. On the in-memory bus, in virtual time."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from common.protocol import subjects
from common.protocol.kv_events import KvSnapshot, KvSnapshotRequest
from common.protocol.messages import Rejected
from common.worker import kv_events as publisher
from tests.actors.kv_events_site import LENGTH, SOON_S, agree, ask, gateways, index, known, tells, workers
from tests.chaos.world import World


def test_requests_go_where_a_prefix_is_also_by_a_gateway_that_was_started_later(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for _ in range(2):
            await world.start("prefill")
        await anyio.sleep(2)
        await ask(world, *range(12))
        await agree(world)
        await world.kill(world.alive("gateway")[0])
        await world.start("gateway")
        await anyio.sleep(2)
        await agree(world)
        assert index(world).num_covered == 5 and index(world).num_snapshots == 5
        for decode in world.alive("decode"):  # so that prefill's caches alone count
            await world.kill(decode)
            await world.start("decode")
        await anyio.sleep(2)
        assert min(await ask(world, *range(12))) >= LENGTH - 4

    tells(story, tmp_path, num_blocks=512)


def test_more_changes_than_may_wait_cost_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = publisher.KvEventPublisher.__init__
    monkeypatch.setattr(
        publisher.KvEventPublisher,
        "__init__",
        lambda self, *args, **settings: made(self, *args, **(settings | {"backlog": 5})),
    )

    async def story(world: World) -> None:
        await ask(world, *range(4))
        await agree(world)
        assert index(world).num_snapshots > 0
        assert sum(actor.kv_events._overflows._value.get() for actor in workers(world)) > 0

    tells(story, tmp_path)


def test_more_changes_than_may_wait_while_the_bus_is_away_cost_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = publisher.KvEventPublisher.__init__
    monkeypatch.setattr(
        publisher.KvEventPublisher,
        "__init__",
        lambda self, *args, **settings: made(self, *args, **(settings | {"backlog": 5})),
    )

    async def story(world: World) -> None:
        await ask(world, 1)
        await agree(world)
        world.broker.stop()
        for actor in workers(world):
            contents = actor.pool.groups[0].pool.contents
            assert contents is not None
            blocks = actor.pool.groups[0].pool.allocate(6)  # the last of them is one too many: nothing is left to tell then
            for number, block in enumerate(blocks):
                actor.pool.groups[0].pool.publish(block, bytes([number + 1]) * 16)
            actor.pool.groups[0].pool.release(blocks)
            assert contents.has_lost and not contents.num_pending
        await anyio.sleep(1)
        world.broker.start()
        await anyio.sleep(SOON_S)
        await agree(world)

    tells(story, tmp_path)


def test_a_snapshot_comes_in_parts_below_the_buss_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "HASHES_PER_MESSAGE", 7)
    sizes: list[int] = []

    async def story(world: World) -> None:
        await ask(world, *range(6))
        await agree(world)
        world.broker.drop(lambda message: sizes.append(len(message.data)) or False)
        await world.start("gateway")
        await anyio.sleep(SOON_S)
        await agree(world)
        old, new = gateways(world)
        assert new.cores[0].router.prefixes.index.num_snapshots == 3 and known(old) == known(new)

    tells(story, tmp_path)
    assert max(sizes) < 1000


def test_the_answers_to_requests_for_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "HASHES_PER_MESSAGE", 10)

    async def story(world: World) -> None:
        await ask(world, *range(6))
        [decode] = [actor for actor in workers(world) if actor.role == "decode"]

        async def get(**request: int) -> KvSnapshot | Rejected:
            answer = await world.gateway.ask(decode.ref, KvSnapshotRequest(**request), 1.0)
            assert isinstance(answer, KvSnapshot | Rejected)
            return answer

        first = await get()
        assert isinstance(first, KvSnapshot) and len(first.hashes) == 80 and sum(first.counts) > 20
        rest = await get(number=first.number, offset=10)
        assert isinstance(rest, KvSnapshot) and rest.offset == 10 and rest.hashes != first.hashes
        assert isinstance(await get(number=first.number + 1, offset=10), Rejected)
        assert isinstance(await get(number=first.number, offset=10**9), KvSnapshot)
        again = await get()
        assert isinstance(again, KvSnapshot) and decode.kv_events._snapshots._value.get() == 1, "gateways share a snapshot"
        await anyio.sleep(publisher.SNAPSHOT_KEPT_S + 1)
        assert decode.kv_events._snapshot is None
        assert isinstance(await get(number=first.number, offset=10), Rejected)

    tells(story, tmp_path)


def test_a_worker_that_does_not_answer_is_asked_again_and_meanwhile_nothing_else_waits(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, *range(4))
        await agree(world)
        ref = workers(world)[0].ref
        inbox = subjects.inbox(ref.role, ref.id)
        undo = world.broker.drop(lambda message: message.subject == inbox and b"KvSnap" in message.data)
        await world.kill(world.alive("gateway")[0])
        await world.start("gateway")
        await anyio.sleep(10)
        assert index(world).num_covered == 2
        await ask(world, 1)
        undo()
        await anyio.sleep(20)
        await agree(world)

    tells(story, tmp_path)


def test_an_index_that_is_full_leaves_a_worker_to_memory(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        index(world).max_blocks = 20
        await ask(world, *range(6))
        await anyio.sleep(SOON_S)
        assert index(world).num_blocks <= 20 and index(world).num_too_large >= 1
        index(world).max_blocks = 10_000
        await anyio.sleep(40)
        await agree(world)
        assert min(await ask(world, *range(6))) >= LENGTH - 4

    tells(story, tmp_path)
