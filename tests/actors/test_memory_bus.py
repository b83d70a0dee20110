"""The faults that only the memory bus has. What it shares with NATS is in `tests/e2e/test_nats_bus.py`."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from common.protocol.errors import NoResponders, RequestTimeout
from common.runtime.bus import BusMessage, ServiceInfo
from common.testing.memory_bus import MemoryBroker


class Received:
    def __init__(self) -> None:
        self.data: list[bytes] = []

    def __call__(self, message: BusMessage) -> None:
        self.data.append(message.data)


async def settle() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


async def test_nothing_is_delivered_inside_publish():
    bus, got = MemoryBroker().connect("a"), Received()
    await bus.subscribe("x", got)
    await bus.publish("x", b"1")
    assert got.data == []
    await settle()
    assert got.data == [b"1"]


async def test_a_stopped_server_loses_what_is_on_its_way_and_buffers_what_is_sent_then():
    broker, got = MemoryBroker(), Received()
    sender, receiver = broker.connect("sender"), broker.connect("receiver")
    changes: list[bool] = []
    sender.on_connection_change(changes.append)
    await receiver.subscribe("x", got)
    await sender.publish("x", b"on its way")
    broker.stop()
    assert not sender.connected
    await receiver.publish("x", b"buffered")
    with pytest.raises(RequestTimeout):
        await sender.request("x", b"", timeout_s=0.01)
    broker.start()
    await sender.publish("x", b"after")
    await settle()
    assert got.data == [b"buffered", b"after"] and changes == [False, True]


async def test_the_first_to_return_finds_nobody_yet():
    broker, got = MemoryBroker(), Received()
    first, second = broker.connect("first"), broker.connect("second")
    await second.subscribe("x", got)
    broker.stop()
    await first.publish("x", b"too early")
    broker.start()
    await settle()
    assert got.data == []


async def test_the_buffer_of_an_outage_is_bounded():
    broker, got = MemoryBroker(), Received()
    bus = broker.connect("bus", max_pending_bytes=10)
    await bus.subscribe("x", got)
    broker.stop()
    for _ in range(5):
        await bus.publish("x", b"four")
    broker.start()
    await settle()
    assert got.data == [b"four", b"four"] and bus.num_dropped == 3


async def test_a_cut_connection_is_gone_for_others_until_it_is_healed():
    broker, got = MemoryBroker(), Received()
    one, two = broker.connect("one"), broker.connect("two")
    await two.subscribe("x", got)
    broker.cut(two)
    with pytest.raises(NoResponders):
        await one.request("x", b"", timeout_s=1)
    assert one.connected and not two.connected
    broker.stop()
    broker.start()
    assert not two.connected, "the server is back, the cable is not"
    broker.heal(two)
    await one.publish("x", b"1")
    await settle()
    assert got.data == [b"1"]


async def test_dropped_messages_are_lost_until_undone():
    broker, got = MemoryBroker(), Received()
    bus = broker.connect("bus")
    await bus.subscribe(">", got)
    undo = broker.drop(lambda message: message.subject == "bad")
    await bus.publish("bad", b"1")
    await bus.publish("good", b"2")
    undo()
    undo()
    await bus.publish("bad", b"3")
    await settle()
    assert got.data == [b"2", b"3"]


async def test_a_killed_process_vanishes_at_once_and_says_nothing_more():
    broker, dead_got, got = MemoryBroker(), Received(), Received()
    dead, alive = broker.connect("dead"), broker.connect("alive")
    changes: list[bool] = []
    dead.on_connection_change(changes.append)
    await dead.subscribe("x", dead_got)
    await alive.subscribe("y", got)
    await alive.publish("x", b"on its way")
    dead.kill()
    await dead.publish("y", b"a last word")
    with pytest.raises(NoResponders):
        await alive.request("x", b"", timeout_s=1)
    broker.stop()
    broker.start()
    await settle()
    assert dead_got.data == [] and got.data == [] and changes == []


async def test_a_full_subscription_drops_the_newest_and_counts():
    bus, got = MemoryBroker().connect("bus"), Received()
    await bus.subscribe("x", got, max_pending=2)
    for number in range(5):
        await bus.publish("x", bytes([number]))
    await settle()
    assert got.data == [b"\0", b"\1"] and bus.num_dropped == 3
    await bus.publish("x", b"again")
    await settle()
    assert got.data[-1] == b"again"


async def test_messages_that_a_handler_causes_wait_for_the_next_turn():
    bus, order = MemoryBroker().connect("bus"), []

    async with anyio.create_task_group() as group:

        def handler(message: BusMessage) -> None:
            order.append(message.data)
            if message.data == b"first":
                group.start_soon(bus.publish, "x", b"caused")

        await bus.subscribe("x", handler)
        await bus.publish("x", b"first")
        await bus.publish("x", b"second")
    await settle()
    assert order == [b"first", b"second", b"caused"]


async def test_registered_services_are_known_to_the_broker():
    broker = MemoryBroker()
    bus, service = broker.connect("bus"), ServiceInfo(name="penstock-decode", version="1.0.0")
    await bus.register(service)
    assert broker.services == [service]
    bus.kill()
    assert broker.services == []


async def test_a_flush_waits_for_the_server():
    broker = MemoryBroker()
    bus = broker.connect("bus")
    broker.stop()
    with anyio.move_on_after(0.05) as scope:
        await bus.flush()
    assert scope.cancelled_caught
    broker.start()
    await bus.flush()
