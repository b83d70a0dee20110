"""Epochs: a process that was away too long, or is there twice, is told from the one that goes on; on the memory bus."""

from __future__ import annotations

import anyio
import pytest

from common.protocol import messages, subjects
from common.protocol.errors import WorkerLost
from common.protocol.handles import WorkerRef
from common.protocol.messages import Cancel, Presence
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker
from tests.actors.actor_site import HEARTBEAT_S, Worker, pair, running, until


async def test_a_process_that_was_stopped_drops_everything_and_speaks_under_a_new_epoch():
    _, gateway, worker = pair()
    async with running(gateway, worker):
        await until(lambda: gateway.registry.get(worker.ref.id) is not None)
        old = worker.ref
        worker.send(gateway.ref, Cancel(requests=[("late", 0)]))
        worker.clock_double.ahead_s += 10.0
        await until(lambda: worker.num_fenced == 1)
        await until(lambda: [peer.worker for peer in gateway.lost] == [old])
        assert worker.ref.id == old.id and worker.ref.epoch > old.epoch
        now_known = gateway.registry.get(old.id)
        assert now_known is not None and now_known.worker == worker.ref
        assert gateway.got == [] and worker.num_fenced == 1 and worker.lost == []


async def test_a_worker_whose_loading_kept_its_loop_busy_is_not_fenced_once_it_is_ready():
    _, gateway, worker = pair()
    worker.loading = anyio.Event()
    async with running(gateway, worker):
        for _ in range(3):
            worker.send(gateway.ref, Cancel(requests=[("early", 0)]))
        await anyio.lowlevel.checkpoint()
        worker.clock_double.ahead_s += 10.0  # since its last heartbeat: nothing ran until loading had ended
        worker.loading.set()
        await until(lambda: worker.state == "ready")
        await anyio.sleep(3 * HEARTBEAT_S)
        assert worker.num_fenced == 0


async def test_an_epoch_never_decreases():
    _, _, worker = pair()
    async with running(worker):
        await until(lambda: worker.state == "ready")
        worker.ref = WorkerRef(worker.role, worker.ref.id, 2**62)  # taken before the clock was set back
        worker.clock_double.ahead_s += 10.0
        await until(lambda: worker.num_fenced == 1)
        assert worker.ref.epoch == 2**62 + 1


async def test_a_worker_that_comes_back_with_an_earlier_clock_takes_an_epoch_in_which_it_is_heard():
    broker, gateway, worker = pair()
    ahead = WorkerRef(worker.role, worker.ref.id, 2**62)
    async with running(gateway):
        before = messages.encode(Presence(worker=ahead, state="ready"))
        await broker.connect("before").publish(subjects.presence(ahead.role, ahead.id), before)
        await until(lambda: [peer.worker for peer in gateway.lost] == [ahead])
        async with running(worker):
            await until(lambda: worker.ref.epoch > ahead.epoch and gateway.registry.get(ahead.id) is not None)
            known = gateway.registry.get(ahead.id)
            assert known is not None and known.worker == worker.ref and worker.num_fenced == 1


async def test_two_processes_with_one_id_are_found_out_and_the_older_one_ends():
    broker = MemoryBroker()
    config = ServiceConfig(worker_id="same", heartbeat_s=HEARTBEAT_S)
    older, newer = Worker(broker.connect("a"), config), Worker(broker.connect("b"), config)
    with anyio.fail_after(5), pytest.RaisesGroup(WorkerLost, flatten_subgroups=True):
        async with anyio.create_task_group() as group:
            await group.start(older.run)
            await group.start(newer.run)
    assert older.num_closed == 1
