"""One contract for both buses, and what a real nats-server adds: restarts, errors that close a connection, discovery."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from common.cli.net import free_ports
from common.protocol.errors import (
    BusClosed,
    BusError,
    ConfigError,
    InvalidParameter,
    NoResponders,
    PayloadTooLarge,
    RequestTimeout,
)
from common.runtime import nats_bus, nats_server
from common.runtime.bus import Bus, BusMessage, Endpoint, ServiceInfo
from common.testing.memory_bus import MemoryBroker
from tests.fixtures.nats import LocalNatsServer
from tests.waiting import until

Connect = Callable[[str], Awaitable[Bus]]


@pytest.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """`await connect(name)`: another connection to the same server."""
    buses: list[Bus] = []
    broker = MemoryBroker()

    async def connect_one(name: str) -> Bus:
        if request.param == "memory":
            bus: Bus = broker.connect(name)
        else:
            bus = await nats_bus.connect(request.getfixturevalue("nats_server"), name=name)
        buses.append(bus)
        return bus

    yield connect_one
    for bus in buses:
        await bus.close()


@asynccontextmanager
async def answering(bus: Bus, subject: str, answer: Callable[[BusMessage], bytes]) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:

        def on_message(message: BusMessage) -> None:
            group.start_soon(bus.publish, message.reply, answer(message))

        subscription = await bus.subscribe(subject, on_message)
        yield
        await subscription.unsubscribe()


async def test_messages_of_one_publisher_arrive_in_order_with_their_headers(connect: Connect):
    sender, receiver = await connect("sender"), await connect("receiver")
    got: list[BusMessage] = []
    await receiver.subscribe("t.order.*", got.append)
    for number in range(500):
        await sender.publish("t.order.a", str(number).encode(), headers={"Number": str(number)})
    await until(lambda: len(got) == 500)
    assert [message.data for message in got] == [str(number).encode() for number in range(500)]
    assert got[7].headers["Number"] == "7" and got[7].subject == "t.order.a" and got[7].reply == ""


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("t.w.*", "t.w.a", "t.w.a.b"),
        ("t.w.>", "t.w.a.b", "t.w"),
        ("t.*.a", "t.w.a", "t.w.b"),
        ("t.w", "t.w", "t.w.a"),
    ],
)
async def test_wildcards(connect: Connect, pattern: str, matching: str, other: str):
    bus = await connect("bus")
    got: list[str] = []
    await bus.subscribe(pattern, lambda message: got.append(message.subject))
    await bus.publish(other, b"")
    await bus.publish(matching, b"")
    await until(lambda: len(got) >= 1)
    assert got == [matching]


async def test_a_queue_group_gets_each_message_once_and_others_get_them_all(connect: Connect):
    sender, one, two, watcher = [await connect(name) for name in ("sender", "one", "two", "watcher")]
    group: list[bytes] = []
    everything: list[bytes] = []
    await one.subscribe("t.queue", lambda message: group.append(message.data), queue="workers")
    await two.subscribe("t.queue", lambda message: group.append(message.data), queue="workers")
    await watcher.subscribe("t.queue", lambda message: everything.append(message.data))
    for number in range(50):
        await sender.publish("t.queue", bytes([number]))
    await until(lambda: len(everything) == 50 and len(group) >= 50)
    assert sorted(group) == everything


async def test_requests_at_the_same_time_each_get_their_own_answer(connect: Connect):
    asker, answerer = await connect("asker"), await connect("answerer")
    answers: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        answers[number] = (await asker.request("t.echo", str(number).encode(), timeout_s=5)).data

    async with answering(answerer, "t.echo", lambda message: b"re:" + message.data), anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(ask, number)
    assert answers == {number: f"re:{number}".encode() for number in range(50)}


async def test_an_empty_answer_is_an_answer(connect: Connect):
    bus = await connect("bus")
    async with answering(bus, "t.empty", lambda _: b""):
        assert (await bus.request("t.empty", b"", timeout_s=1)).data == b""


async def test_nobody_listening_is_told_at_once_and_silence_times_out(connect: Connect):
    asker, silent = await connect("asker"), await connect("silent")
    began = time.monotonic()
    with pytest.raises(NoResponders):
        await asker.request("t.nobody", b"?", timeout_s=5)
    assert time.monotonic() - began < 1
    subscription = await silent.subscribe("t.silent", lambda _: None)
    with pytest.raises(RequestTimeout):
        await asker.request("t.silent", b"?", timeout_s=0.05)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await silent.flush()
    with pytest.raises(NoResponders):
        await asker.request("t.silent", b"?", timeout_s=5)


async def test_a_message_over_the_limit_is_refused_and_the_connection_lives_on(connect: Connect):
    bus = await connect("bus")
    with pytest.raises(PayloadTooLarge):
        await bus.publish("t.large", b"x" * (bus.max_payload + 1))
    with pytest.raises(PayloadTooLarge):
        await bus.publish("t.large", b"x" * (bus.max_payload - 10), headers={"A": "with headers it is too large"})
    await bus.flush()
    assert bus.connected


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b", "a.*", "a.>", "a..b", ".a", "a."])
async def test_subjects_that_are_none_are_refused(connect: Connect, subject: str):
    bus = await connect("bus")
    with pytest.raises(InvalidParameter):
        await bus.publish(subject, b"")
    with pytest.raises(InvalidParameter):
        await bus.publish("t.fine", b"", reply=subject or " ")


async def test_a_handler_that_raises_does_not_end_the_subscription(connect: Connect):
    bus = await connect("bus")
    got: list[bytes] = []

    def handler(message: BusMessage) -> None:
        got.append(message.data)
        if message.data == b"bad":
            raise RuntimeError("a mistake in this handler")

    await bus.subscribe("t.raise", handler)
    await bus.publish("t.raise", b"bad")
    await bus.publish("t.raise", b"good")
    await until(lambda: got == [b"bad", b"good"])


async def test_close_delivers_what_has_arrived_and_then_refuses(connect: Connect):
    sender, receiver = await connect("sender"), await connect("receiver")
    got: list[bytes] = []
    await receiver.subscribe("t.close", lambda message: got.append(message.data))
    for number in range(100):
        await sender.publish("t.close", bytes([number]))
    await sender.flush()
    await sender.close()
    await receiver.close()
    await receiver.close()
    assert len(got) == 100
    with pytest.raises(BusClosed):
        await sender.publish("t.close", b"")
    with pytest.raises(BusClosed):
        await sender.request("t.close", b"", timeout_s=1)


async def test_inboxes_are_unique_and_can_be_answered_on(connect: Connect):
    one, two = await connect("one"), await connect("two")
    inboxes = {one.new_inbox(), one.new_inbox(), two.new_inbox()}
    assert len(inboxes) == 3
    inbox, got = one.new_inbox(), []
    await one.subscribe(inbox, lambda message: got.append(message.data))
    await two.publish(inbox, b"hello")
    await until(lambda: got == [b"hello"])


# -- a real server


async def test_a_restart_of_the_server_keeps_subscriptions_and_sends_what_was_buffered(
    nats_server_factory: Callable[[], LocalNatsServer],
):
    server = nats_server_factory()
    sender = await nats_bus.connect(server.url, name="sender")
    receiver = await nats_bus.connect(server.url, name="receiver")
    changes: list[bool] = []
    got: list[bytes] = []
    sender.on_connection_change(changes.append)
    await receiver.subscribe("t.restart", lambda message: got.append(message.data))
    server.stop()
    await until(lambda: not sender.connected and not receiver.connected)
    await anyio.sleep(0.3)
    await sender.publish("t.elsewhere", b"buffered")
    server.start()
    began = time.monotonic()
    await until(lambda: sender.connected and receiver.connected)
    assert time.monotonic() - began < 1.0
    await sender.publish("t.restart", b"after")
    await until(lambda: b"after" in got)
    assert changes == [False, True]
    with pytest.raises(NoResponders):
        await sender.request("t.nobody", b"", timeout_s=1)
    await sender.close()
    await receiver.close()


def test_a_server_that_is_gone_is_no_error_of_closing(nats_server_factory: Callable[[], LocalNatsServer]):
    server = nats_server_factory()

    async def close() -> None:
        bus = await nats_bus.connect(server.url, name="bus")
        server.stop()
        await until(lambda: not bus.connected)
        await bus.publish("t.last", b"words")
        await bus.close()

    anyio.run(close, backend_options={"use_uvloop": True})  # as services have it: asyncio's own transports take what is written


async def test_of_several_servers_another_one_is_used_when_one_is_gone(nats_server_factory: Callable[[], LocalNatsServer]):
    gone, first, second = (nats_server_factory() for _ in range(3))
    gone.stop()
    bus = await nats_bus.connect(f"{gone.url},{first.url}, {second.url}", name="bus")
    peer = await nats_bus.connect(second.url, name="peer")
    got: list[bytes] = []
    await bus.subscribe("t.moved", lambda message: got.append(message.data))
    changes: list[bool] = []
    bus.on_connection_change(changes.append)
    first.stop()
    await until(lambda: changes == [False, True])
    await peer.publish("t.moved", b"here")
    await until(lambda: got == [b"here"])
    await bus.close()
    await peer.close()


async def test_a_server_that_another_one_told_of_gets_the_login_of_the_url(
    nats_server_factory: Callable[[str], LocalNatsServer],
):
    (port,) = free_ports(1)
    users = "authorization { user: me, password: secret }\n"
    first = nats_server_factory(f"{users}cluster {{ name: both, listen: 127.0.0.1:{port} }}")
    second = nats_server_factory(
        f"{users}cluster {{ name: both, listen: 127.0.0.1:-1, routes: [nats-route://127.0.0.1:{port}] }}"
    )
    logins = [server.url.replace("//", "//me:secret@") for server in (first, second)]
    peer = await nats_bus.connect(logins[1], name="peer")
    got: list[bytes] = []
    await peer.subscribe("t.routed", lambda message: got.append(message.data))
    bus = await nats_bus.connect(logins[0], name="bus")
    with anyio.fail_after(5):
        while not got:  # until the servers have found each other, and so the client both of them
            await bus.publish("t.routed", b"")
            await anyio.sleep(0.01)
    changes: list[bool] = []
    bus.on_connection_change(changes.append)
    first.stop()
    await until(lambda: changes == [False, True])
    got.clear()
    await bus.publish("t.routed", b"here")
    await until(lambda: got == [b"here"])
    await bus.close()
    await peer.close()


async def test_what_an_outage_cannot_buffer_is_dropped_and_counted_and_nothing_raises(
    nats_server_factory: Callable[[], LocalNatsServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_bus, "MAX_PENDING_BYTES", 10_000)
    server = nats_server_factory()
    bus = await nats_bus.connect(server.url, name="bus")
    server.stop()
    await until(lambda: not bus.connected)
    for _ in range(100):
        await bus.publish("t.outage", b"x" * 1000)
    assert 85 <= bus.num_dropped <= 95
    with pytest.raises(RequestTimeout):
        await bus.request("t.outage", b"x" * 1000, timeout_s=0.05)
    server.start()
    await until(lambda: bus.connected)
    await bus.flush()
    before = bus.num_dropped
    await bus.publish("t.outage", b"x" * 1000)
    assert bus.num_dropped == before
    await bus.close()


async def test_publishing_never_waits_long_for_a_server_that_hangs(
    nats_server_factory: Callable[[], LocalNatsServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_bus, "MAX_PENDING_BYTES", 1_000_000)
    server = nats_server_factory()
    bus = await nats_bus.connect(server.url, name="bus")
    server.freeze()
    slowest = 0.0
    for _ in range(40):
        began = time.monotonic()
        await bus.publish("t.hang", b"x" * 500_000)
        slowest = max(slowest, time.monotonic() - began)
    server.thaw()
    assert slowest < 0.5 and bus.num_dropped > 0
    await bus.flush()
    await bus.close()


async def test_a_server_that_hangs_is_left_though_it_takes_nothing_any_more(
    nats_server_factory: Callable[[], LocalNatsServer], monkeypatch: pytest.MonkeyPatch
):
    """As one whose host is off: nothing closes the connection, and what was written to it stays unsent."""
    monkeypatch.setattr(nats_bus, "PING_INTERVAL_S", 0.1)
    hanging, other = nats_server_factory(), nats_server_factory()
    bus = await nats_bus.connect(f"{hanging.url},{other.url}", name="bus")
    changes: list[bool] = []
    bus.on_connection_change(changes.append)
    hanging.freeze()
    for _ in range(30):
        await bus.publish("t.hang", b"x" * 1_000_000)
    await until(lambda: changes == [False, True])
    hanging.thaw()
    await bus.flush()
    await bus.close()


async def test_a_connection_that_the_server_closes_with_an_error_comes_back(nats_server: str):
    bus = await nats_bus.connect(nats_server, name="bus")
    got: list[bytes] = []
    changes: list[bool] = []
    bus.on_connection_change(changes.append)
    await bus.subscribe("t.again", lambda message: got.append(message.data))
    await bus._client._process_err("'Slow Consumer'")
    await until(lambda: changes == [False, True])
    await bus.publish("t.again", b"still here")
    await until(lambda: got == [b"still here"])
    await bus.close()


async def test_a_subscriber_that_is_too_slow_loses_messages_and_it_is_counted(nats_server: str):
    sender = await nats_bus.connect(nats_server, name="sender")
    receiver = await nats_bus.connect(nats_server, name="receiver")
    got: list[bytes] = []
    await receiver.subscribe("t.slow", lambda message: got.append(message.data), max_pending=10)
    for _ in range(2000):
        await sender.publish("t.slow", b"x")
    await sender.flush()
    await receiver.flush()
    await until(lambda: len(got) + receiver.num_slow_consumer == 2000)
    await sender.close()
    await receiver.close()


async def test_standard_tools_find_the_service(nats_server: str):
    service = await nats_bus.connect(nats_server, name="service")
    tool = await nats_bus.connect(nats_server, name="tool")
    metadata = {"model": "m", "role": "decode", "worker": "decode-1", "epoch": "7"}
    chat = Endpoint(name="chat", subject="penstock.v1.chat.m", queue="penstock-gateway", num_requests=4, processing_ns=4000)
    await service.register(
        ServiceInfo(
            name="penstock-decode",
            version="1.2.3",
            metadata=metadata,
            stats=lambda: {"num_requests": 3, "running": 2},
            endpoints=lambda: [chat],
        )
    )
    replies: list[dict] = []
    inbox = tool.new_inbox()
    await tool.subscribe(inbox, lambda message: replies.append(json.loads(message.data)))
    for verb in ("PING", "INFO", "STATS"):
        await tool.publish(f"$SRV.{verb}.penstock-decode", b"", reply=inbox)
    await until(lambda: len(replies) == 3)
    by_type = {reply["type"].split(".")[-1]: reply for reply in replies}
    assert by_type["ping_response"]["metadata"] == metadata
    assert by_type["info_response"]["endpoints"][0]["subject"] == "penstock.v1.int.inbox.decode.decode-1"
    endpoint = by_type["stats_response"]["endpoints"][0]
    assert endpoint["num_requests"] == 3 and endpoint["data"]["running"] == 2
    listed = by_type["info_response"]["endpoints"][1]
    assert (listed["name"], listed["subject"], listed["queue_group"]) == ("chat", "penstock.v1.chat.m", "penstock-gateway")
    counted = by_type["stats_response"]["endpoints"][1]
    assert counted["subject"] == "penstock.v1.chat.m"
    assert (counted["num_requests"], counted["processing_time"], counted["average_processing_time"]) == (4, 4000, 1000)
    await service.close()
    await tool.close()


async def test_no_server_is_one_clear_error_that_hides_passwords():
    with pytest.raises(BusError, match=r"no NATS server answers at nats://127\.0\.0\.1:1 ") as caught:
        await nats_bus.connect("nats://user:secret@127.0.0.1:1", name="bus", connect_timeout_s=0.4)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError):
        await nats_bus.connect("nats://127.0.0.1:notaport", name="bus", connect_timeout_s=0.4)


async def test_our_own_server_runs_on_a_free_port_and_ends_with_the_block(tmp_path: Path):
    async with nats_server.start(store_dir=tmp_path) as server:
        bus = await nats_bus.connect(server.url, name="bus")
        assert bus.max_payload == 8 * 1024 * 1024
        await bus.close()
        with pytest.raises(ConfigError, match="address already in use"):
            async with nats_server.start(server.port, store_dir=tmp_path / "second"):
                pass
    with pytest.raises(BusError):
        await nats_bus.connect(server.url, name="bus", connect_timeout_s=0.3)
    assert [path async for path in anyio.Path(tmp_path).glob("*.ports")] == []


OWNER_OF_A_SERVER = """
import sys, anyio
from pathlib import Path
from common.runtime import nats_server


async def main():
    async with nats_server.start(store_dir=Path(sys.argv[1])) as server:
        sys.stdout.write(server.url + chr(10))
        sys.stdout.flush()
        await anyio.sleep_forever()


anyio.run(main)
"""


def test_our_own_server_ends_even_when_its_owner_is_killed(tmp_path: Path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER_OF_A_SERVER, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    port = int(owner.stdout.readline().decode().strip().rsplit(":", 1)[1])
    owner.kill()
    owner.wait()
    owner.stdout.close()
    ends_at = time.monotonic() + 5
    while time.monotonic() < ends_at:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.02)
    pytest.fail("the server outlived its owner")
