"""Streams on a real nats-server and in memory keep the same promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest

from common.protocol.errors import JetStreamOff, RequestTimeout, StorageFull, StreamConflict
from common.runtime import nats_bus
from common.runtime.bus import Bus
from common.runtime.streams import Streams, StreamSpec
from common.testing.memory_bus import MemoryBroker
from tests.fixtures.nats import LocalNatsServer

EVENTS = StreamSpec(name="EVENTS", subjects=("events.*.*",), max_bytes=1 << 20, max_age_s=3600)
STATE = StreamSpec(name="STATE", subjects=("state.*",), max_bytes=1 << 20, max_age_s=3600, latest_only=True)
WORK = StreamSpec(name="WORK", subjects=("work.*",), max_bytes=1 << 20, max_age_s=3600, is_queue=True)


def jetstream(folder: Path) -> str:
    return f'jetstream {{ store_dir: "{folder}" }}\n'


@pytest.fixture
def server(nats_server_factory: Callable[[str], LocalNatsServer], tmp_path: Path) -> LocalNatsServer:
    return nats_server_factory(jetstream(tmp_path / "jetstream"))


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    if request.param == "memory":
        broker = MemoryBroker()
        broker.store.enabled = True
        yield broker.connect("test")
        return
    server: LocalNatsServer = request.getfixturevalue("server")
    connection = await nats_bus.connect(server.url, name="test")
    yield connection
    await connection.close()


@pytest.fixture
async def streams(bus: Bus) -> Streams:
    for spec in (EVENTS, STATE, WORK, EVENTS):
        await bus.streams.ensure(spec)
    return bus.streams


async def test_messages_are_read_in_order_from_where_one_left_off(streams: Streams) -> None:
    assert await streams.available()
    sequences = [await streams.append(f"events.{'ab'[n % 2]}.{n}", b"%d" % n, headers={"N": str(n)}) for n in range(10)]
    assert sequences == sorted(set(sequences))
    first = await streams.read("EVENTS", "events.a.*", limit=3)
    assert [(stored.subject, stored.data, stored.headers["N"]) for stored in first] == [
        (f"events.a.{n}", b"%d" % n, str(n)) for n in (0, 2, 4)
    ]
    rest = await streams.read("EVENTS", "events.a.*", after=first[-1].sequence, limit=100)
    assert [stored.data for stored in rest] == [b"6", b"8"]
    assert await streams.read("EVENTS", "events.a.*", after=rest[-1].sequence) == []
    assert await streams.read("EVENTS", "events.none.*") == []
    assert await streams.purge("EVENTS", "events.a.*") == 5
    assert [stored.data for stored in await streams.read("EVENTS", "events.*.*")] == [b"1", b"3", b"5", b"7", b"9"]


async def test_of_two_writers_one_is_first_and_the_other_one_is_told(streams: Streams) -> None:
    sequence = await streams.append("events.a.1", b"one", expected_last=0)
    with pytest.raises(StreamConflict):
        await streams.append("events.a.1", b"two", expected_last=0)
    await streams.append("events.a.2", b"other", expected_last=0)
    await streams.append("events.a.1", b"three", expected_last=sequence)
    found = await streams.last("EVENTS", "events.a.1")
    assert found is not None and found.data == b"three"
    assert await streams.last("EVENTS", "events.a.none") is None


async def test_a_subject_of_a_state_keeps_its_newest_message_alone(streams: Streams) -> None:
    for value in range(3):
        await streams.append("state.x", b"%d" % value)
    assert [stored.data for stored in await streams.read("STATE", "state.*")] == [b"2"]


async def test_a_full_stream_refuses_and_keeps_what_it_has(streams: Streams) -> None:
    await streams.ensure(StreamSpec(name="EVENTS", subjects=("events.*.*",), max_bytes=100_000, max_age_s=3600))
    await streams.append("events.a.1", bytes(60_000))
    with pytest.raises(StorageFull):
        await streams.append("events.a.2", bytes(60_000))
    assert len(await streams.read("EVENTS", "events.*.*")) == 1


async def test_work_is_one_takers_until_it_is_done_given_back_or_left(streams: Streams) -> None:
    one, two = [await streams.queue("WORK", "us", ["work.*"], ack_wait_s=0.3) for _ in range(2)]
    for number in range(4):
        await streams.append(f"work.{number}", b"%d" % number)
    mine, yours = await one.fetch(2, 1), await two.fetch(2, 1)
    assert [each.message.data for each in mine + yours] == [b"0", b"1", b"2", b"3"]
    assert await one.fetch(1, 0.05) == []
    await mine[0].ack()
    await mine[1].give_back()
    (again,) = await two.fetch(5, 1)
    assert (again.message.data, again.num_deliveries) == (b"1", 2)
    with anyio.fail_after(5):  # the wait for these two ends, that for the one which is worked on does not
        left: list[bytes] = []
        while len(left) < 2:
            await again.working()
            left += [each.message.data for each in await one.fetch(2, 0.1)]
    assert sorted(left) == [b"2", b"3"]


async def test_a_fetch_waits_for_what_comes(streams: Streams) -> None:
    queue = await streams.queue("WORK", "us", ["work.*"])
    async with anyio.create_task_group() as group:

        async def later() -> None:
            await anyio.sleep(0.1)
            await streams.append("work.1", b"x")

        group.start_soon(later)
        with anyio.fail_after(3):
            found = await queue.fetch(8, 5)
            assert [each.message.data for each in found] == [b"x"]


async def test_everything_is_there_after_kill_9_of_the_server(server: LocalNatsServer) -> None:
    bus = await nats_bus.connect(server.url, name="test")
    streams = bus.streams
    for spec in (EVENTS, WORK):
        await streams.ensure(spec)
    queue = await streams.queue("WORK", "us", ["work.*"], ack_wait_s=0.5)
    for number in range(50):
        await streams.append(f"events.a.{number}", b"x", expected_last=0)
        await streams.append(f"work.{number}", b"x")
    held = await queue.fetch(10, 1)
    await anyio.to_thread.run_sync(server.restart)
    found: set[str] = set()
    with anyio.fail_after(20):
        while len(found) < 50:
            for each in await queue.fetch(64, 0.5):
                found.add(each.message.subject)
                await each.ack()
    assert len(held) == 10 and len(found) == 50
    with pytest.raises(StreamConflict):
        await streams.append("events.a.7", b"y", expected_last=0)
    assert len(await streams.read("EVENTS", "events.*.*", limit=100)) == 50
    await bus.close()


async def test_a_server_without_streams_is_an_error_by_name(nats_server: str) -> None:
    bus = await nats_bus.connect(nats_server, name="test")
    try:
        assert not await bus.streams.available()
        with pytest.raises(JetStreamOff, match="JetStream"):
            await bus.streams.ensure(EVENTS)
    finally:
        await bus.close()


async def test_a_server_without_room_for_the_bounds_says_so(
    nats_server_factory: Callable[[str], LocalNatsServer], tmp_path: Path
) -> None:
    server = nats_server_factory(f'jetstream {{ store_dir: "{tmp_path / "small"}", max_file_store: 100KB }}\n')
    bus = await nats_bus.connect(server.url, name="test")
    try:
        with pytest.raises(StorageFull):
            await bus.streams.ensure(EVENTS)
    finally:
        await bus.close()


async def test_streams_that_are_there_stay_in_use_on_a_server_that_has_less_room_when_it_starts_again(
    nats_server_factory: Callable[[str], LocalNatsServer], tmp_path: Path
) -> None:
    """A server that is told no limit takes three quarters of what is free on the disk, and what streams hold is not free."""
    server = nats_server_factory(jetstream(tmp_path / "jetstream"))
    bus = await nats_bus.connect(server.url, name="test")
    try:
        await bus.streams.ensure(EVENTS)
        await bus.streams.append("events.a.1", b"x")
        server.more_config = f'jetstream {{ store_dir: "{tmp_path / "jetstream"}", max_file_store: 100KB }}\n'
        await anyio.to_thread.run_sync(server.restart)
        with anyio.fail_after(20):
            while True:  # a question that was under way as the connection ended has no answer
                try:
                    await bus.streams.ensure(EVENTS)
                    break
                except RequestTimeout:
                    await anyio.sleep(0.05)
        await bus.streams.append("events.a.2", b"x")
        assert len(await bus.streams.read("EVENTS", "events.*.*")) == 2
        with pytest.raises(StorageFull):
            await bus.streams.ensure(STATE)
    finally:
        await bus.close()


async def test_a_server_that_is_away_is_a_timeout() -> None:
    broker = MemoryBroker()
    broker.store.enabled = True
    streams = broker.connect("test").streams
    await streams.ensure(EVENTS)
    broker.stop()
    with pytest.raises(RequestTimeout):
        await streams.append("events.a.1", b"x")
    broker.start()
    await streams.append("events.a.1", b"x")
