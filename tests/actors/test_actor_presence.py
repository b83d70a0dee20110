"""Who is there, who is lost and who only seems to be, on the memory bus."""

from __future__ import annotations

import time

import anyio
import pytest

from common.protocol import messages, subjects
from common.protocol.handles import Role, WorkerRef
from common.protocol.messages import Accepted, Presence, ReleaseLease
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker, MemoryBus
from tests.actors.actor_site import DEAD_AFTER_S, HEARTBEAT_S, Gateway, Worker, pair, running, until

pytestmark = pytest.mark.virtual_time


async def test_workers_know_each_other_from_presence_and_state_follows_their_life():
    _, gateway, worker = pair()
    worker.loading = anyio.Event()
    async with running(gateway, worker):
        await until(lambda: gateway.registry.get(worker.ref.id) is not None)
        known = gateway.registry.get(worker.ref.id)
        assert known is not None and known.state == "starting" and not worker.ready
        worker.loading.set()
        await until(lambda: [p.state for p in gateway.registry.alive("decode", gateway.clock())] == ["ready"])
        assert worker.healthy and gateway.registry.get(gateway.ref.id) is None


@pytest.mark.parametrize(
    ("role", "id"),
    [
        ("decode", "decode-9"),
        ("decode", "a.b"),
        ("decode", ""),
        ("decode", "x" * 200),
        ("decode", "*"),
        ("prefill", "decode-8"),
    ],
)
async def test_a_heartbeat_under_anothers_name_is_ignored(role: Role, id: str):
    _, gateway, worker = pair()
    async with running(gateway, worker):
        forged = Presence(worker=WorkerRef(role, id, 2**62), state="ready")
        await worker.bus.publish(subjects.presence("decode", "decode-8"), messages.encode(forged))
        await until(lambda: b"penstock_messages_undecodable_total 1.0" in gateway.metrics.render())
        assert gateway.registry.get(id) is None


async def test_a_killed_worker_is_noticed_by_a_probe_long_before_its_silence_is_long_enough():
    broker = MemoryBroker()
    patient = ServiceConfig(heartbeat_s=HEARTBEAT_S, dead_after_s=60.0)
    gateway, worker_bus = Gateway(broker.connect("gateway"), patient), broker.connect("worker")
    worker = Worker(worker_bus, patient)
    async with running(gateway, worker):
        await until(lambda: gateway.registry.get(worker.ref.id) is not None)
        worker_bus.kill()
        await until(lambda: [peer.worker for peer in gateway.lost] == [worker.ref], 1.0)
        assert gateway.registry.alive("decode", gateway.clock()) == []
        assert b"penstock_peers_lost_total 1.0" in gateway.metrics.render()


async def test_a_worker_that_stops_in_order_is_gone_and_not_counted_as_dead():
    _, gateway, worker = pair()
    async with running(gateway):
        async with running(worker):
            await until(lambda: gateway.registry.get(worker.ref.id) is not None)
            worker.begin_drain()
            await until(lambda: worker.num_closed == 1)
        await until(lambda: [peer.worker for peer in gateway.lost] == [worker.ref])
        assert b"penstock_peers_lost_total 0.0" in gateway.metrics.render()


async def test_a_worker_whose_heartbeats_are_lost_but_which_answers_probes_is_not_lost():
    broker, gateway, worker = pair()
    async with running(gateway, worker):
        await until(lambda: gateway.registry.get(worker.ref.id) is not None)
        undo = broker.drop(lambda message: message.subject == subjects.presence("decode", worker.ref.id))
        await anyio.sleep(2 * DEAD_AFTER_S)
        assert gateway.lost == []
        undo()


async def test_a_silent_worker_that_still_subscribes_is_lost_after_dead_after_s():
    broker, gateway, worker = pair()
    async with running(gateway, worker):
        await until(lambda: gateway.registry.get(worker.ref.id) is not None)
        began = time.monotonic()
        broker.drop(lambda message: worker.ref.id in message.subject or "reply" in message.subject)
        await until(lambda: [peer.worker.id for peer in gateway.lost] == [worker.ref.id])
        assert time.monotonic() - began > 0.8 * DEAD_AFTER_S


async def test_a_restart_of_the_server_loses_nobody():
    broker, gateway, worker = pair()
    async with running(gateway, worker):
        await until(lambda: gateway.registry.get(worker.ref.id) is not None)
        broker.stop()
        await anyio.sleep(2 * DEAD_AFTER_S)
        assert not gateway.healthy
        broker.start()
        answer = await gateway.ask(worker.ref, ReleaseLease(leases=[]), 1.0)
        await anyio.sleep(2 * DEAD_AFTER_S)
        assert isinstance(answer, Accepted)
        assert gateway.lost == [] and worker.lost == []
        assert gateway.connection == [False, True]


async def test_nobody_listening_yet_after_a_reconnect_is_not_taken_for_dead():
    broker, gateway, worker = pair()
    async with running(gateway, worker):
        await until(lambda: gateway.registry.get(worker.ref.id) is not None)
        assert isinstance(worker.bus, MemoryBus)
        broker.stop()
        broker.cut(worker.bus)
        broker.start()
        async with anyio.create_task_group() as group:

            async def come_back() -> None:
                await anyio.sleep(DEAD_AFTER_S / 2)
                assert isinstance(worker.bus, MemoryBus)
                broker.heal(worker.bus)

            group.start_soon(come_back)
            assert isinstance(await gateway.ask(worker.ref, ReleaseLease(leases=[]), 2.0), Accepted)
