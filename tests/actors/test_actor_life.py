"""The life that all services share, from loading to the end of a drain, on the memory bus."""

from __future__ import annotations

import anyio
import pytest

from common.protocol.errors import NoResponders
from common.protocol.messages import Cancel, Rejected, ReleaseLease
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker
from tests.actors.actor_site import HEARTBEAT_S, Worker, pair, running, until


async def test_a_worker_that_still_loads_refuses_work_at_once():
    _, gateway, worker = pair()
    worker.loading = anyio.Event()
    async with running(gateway, worker):
        answer = await gateway.ask(worker.ref, ReleaseLease(leases=["a"]), 1.0)
        assert isinstance(answer, Rejected) and answer.code == "out_of_credits" and worker.got == []
        worker.loading.set()


async def test_what_is_done_once_all_is_loaded_is_done_before_anyone_hears_that_it_is_ready():
    _, gateway, worker = pair()
    worker.loading = anyio.Event()
    states: list[str] = []
    worker.on_ready = lambda: states.append(worker.state)
    async with running(gateway, worker):
        assert not states
        worker.loading.set()
        await until(lambda: worker.state == "ready")
        assert states == ["starting"]


async def test_drain_waits_for_what_is_held_while_presence_says_draining():
    _, gateway, worker = pair()
    worker.num_held = 1
    async with anyio.create_task_group() as group:
        await group.start(gateway.run)
        await group.start(worker.run)
        await until(lambda: worker.ready)
        worker.begin_drain()
        worker.begin_drain()
        await until(lambda: [p.state for p in gateway.registry.alive("decode", gateway.clock())] == ["draining"])
        assert worker.num_closed == 0
        worker.num_held = 0
        await until(lambda: worker.num_closed == 1)
        with pytest.raises(NoResponders):
            await gateway.ask(worker.ref, ReleaseLease(leases=[]), 1.0)
        await gateway.stop()


async def test_a_drain_that_takes_too_long_ends():
    broker = MemoryBroker()
    worker = Worker(broker.connect("w"), ServiceConfig(heartbeat_s=HEARTBEAT_S, drain_timeout_s=0.1))
    worker.num_held = 1
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            await group.start(worker.run)
            worker.begin_drain()
    assert worker.num_closed == 1


async def test_what_was_sent_before_the_end_of_a_drain_still_arrives():
    _, gateway, worker = pair()
    async with running(gateway):
        async with anyio.create_task_group() as group:
            await group.start(worker.run)
            await until(lambda: worker.ready)
            worker.send(gateway.ref, Cancel(requests=[("last", 0)]))
            worker.begin_drain()
        await until(lambda: gateway.got == [Cancel(requests=[("last", 0)])])


async def test_an_error_in_a_background_duty_ends_the_actor_and_closes_it():
    class Faulty(Worker):
        def tick(self, now: float) -> None:
            raise ValueError("a mistake")

    worker = Faulty(MemoryBroker().connect("w"))
    with anyio.fail_after(5), pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        await worker.run()
    assert worker.num_closed == 1
