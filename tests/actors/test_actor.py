"""The life that all services share, on the memory bus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

import anyio
import pytest

from common.protocol import messages, subjects
from common.protocol.errors import NoResponders, ProtocolError, RequestTimeout, WorkerLost
from common.protocol.handles import Role, WorkerRef
from common.protocol.messages import Accepted, Cancel, HandoffFailed, Message, Presence, Rejected, ReleaseLease
from common.runtime.actor import Actor
from common.runtime.bus import BusMessage
from common.runtime.memory_bus import MemoryBroker, MemoryBus
from common.runtime.outbox import Outbox
from common.runtime.settings import ServiceConfig

HEARTBEAT_S = 0.02
DEAD_AFTER_S = 0.3
CONFIG = ServiceConfig(heartbeat_s=HEARTBEAT_S, dead_after_s=DEAD_AFTER_S, drain_timeout_s=1.0)


class Clock:
    """Real time plus what a test adds."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Worker(Actor):
    """Answers ReleaseLease with Accepted, fails on HandoffFailed, keeps what it gets."""

    role: ClassVar[Role] = "decode"

    def __init__(self, bus: MemoryBus, config: ServiceConfig = CONFIG) -> None:
        self.bus_double = bus
        self.clock_double = Clock()
        super().__init__(bus=bus, config=config, clock=self.clock_double)
        self.got: list[Message] = []
        self.lost: list[Presence] = []
        self.connection: list[bool] = []
        self.num_fenced = 0
        self.num_closed = 0
        self.num_held = 0
        self.loading = anyio.Event()
        self.loading.set()

    async def start(self) -> None:
        await self.loading.wait()

    def handle(self, message: Message, reply: str) -> None:
        self.got.append(message)
        match message:
            case ReleaseLease():
                self.answer(reply, Accepted(worker=self.ref))
            case HandoffFailed():
                raise RuntimeError("a mistake in this handler")
            case _:
                pass

    def peer_lost(self, peer: Presence) -> None:
        self.lost.append(peer)

    def fenced(self) -> None:
        self.num_fenced += 1

    def connection_changed(self, connected: bool) -> None:
        self.connection.append(connected)

    async def drain(self) -> None:
        await until(lambda: self.num_held == 0, 60)

    def close(self) -> None:
        self.num_closed += 1


class Gateway(Worker):
    role = "gateway"


async def until(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    with anyio.fail_after(timeout_s):
        while True:
            if condition():
                return
            await anyio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(*actors: Actor) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        for actor in actors:
            await group.start(actor.run)
        yield
        for actor in actors:
            await actor.stop()
        group.cancel_scope.cancel()


def pair() -> tuple[MemoryBroker, Gateway, Worker]:
    broker = MemoryBroker()
    return broker, Gateway(broker.connect("gateway")), Worker(broker.connect("worker"))


async def test_a_question_that_the_bus_lost_is_asked_again_when_it_is_back():
    broker, gateway, worker = pair()
    async with running(gateway, worker):
        undo = broker.drop(lambda message: message.data == messages.encode(Accepted(worker=worker.ref)))
        answers: list[Message] = []

        async def ask() -> None:
            answers.append(await gateway.ask(worker.ref, ReleaseLease(leases=["a"]), 10.0, repeat=True))

        async def ask_once() -> None:
            with pytest.raises(RequestTimeout):
                await gateway.ask(worker.ref, ReleaseLease(leases=["b"]), 10.0)
            answers.append(Cancel(requests=[]))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            group.start_soon(ask_once)
            await until(lambda: len(worker.got) == 2)
            undo()
            broker.stop()
            broker.start()
            await until(lambda: len(answers) == 2, 2.0)
        assert Accepted(worker=worker.ref) in answers
        assert sorted(str(message) for message in worker.got) == sorted(
            str(ReleaseLease(leases=[lease])) for lease in ("a", "a", "b")
        )


async def test_an_asked_worker_answers_after_everything_sent_to_it_before():
    _, gateway, worker = pair()
    async with running(gateway, worker):
        for number in range(100):
            gateway.send(worker.ref, Cancel(requests=[(str(number), 0)]))
        answer = await gateway.ask(worker.ref, ReleaseLease(leases=["a"]), 1.0)
        assert answer == Accepted(worker=worker.ref)
        assert worker.got == [Cancel(requests=[(str(number), 0)]) for number in range(100)] + [ReleaseLease(leases=["a"])]


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


async def test_a_message_that_cannot_be_decoded_is_counted_and_answered_and_harms_nobody():
    _, gateway, worker = pair()
    async with running(gateway, worker):
        inbox = subjects.inbox("decode", worker.ref.id)
        reply = await gateway.bus.request(inbox, b"\xff\x00 not ours", timeout_s=1.0)
        rejected = messages.decode(reply.data)
        assert isinstance(rejected, Rejected) and rejected.code == "protocol_error"
        assert b"penstock_messages_undecodable_total 1.0" in worker.metrics.render()
        assert isinstance(await gateway.ask(worker.ref, ReleaseLease(leases=[]), 1.0), Accepted)


async def test_a_mistake_in_a_handler_ends_neither_the_actor_nor_the_wait_for_an_answer():
    _, gateway, worker = pair()
    async with running(gateway, worker):
        failing = HandoffFailed(worker=gateway.ref, request="r", attempt=0, code="x")
        answer = await gateway.ask(worker.ref, failing, 1.0)
        assert isinstance(answer, Rejected) and answer.code == "internal_error" and "RuntimeError" not in answer.message
        assert b"penstock_handler_errors_total 1.0" in worker.metrics.render()
        assert isinstance(await gateway.ask(worker.ref, ReleaseLease(leases=[]), 1.0), Accepted)


async def test_asking_nobody_is_told_at_once_and_asking_the_silent_times_out():
    _, gateway, worker = pair()
    async with running(gateway, worker):
        with pytest.raises(NoResponders):
            await gateway.ask(WorkerRef("decode", "nobody", 1), ReleaseLease(leases=[]), 5.0)
        with pytest.raises(RequestTimeout):
            await gateway.ask(worker.ref, Cancel(requests=[]), 0.05)


async def test_an_answer_that_cannot_be_decoded_is_a_protocol_error():
    broker, gateway, _ = pair()
    other = broker.connect("other")

    async with running(gateway), anyio.create_task_group() as group:

        def answer_nonsense(message: BusMessage) -> None:
            group.start_soon(other.publish, message.reply, b"?")

        await other.subscribe(subjects.inbox("decode", "odd"), answer_nonsense)
        with pytest.raises(ProtocolError):
            await gateway.ask(WorkerRef("decode", "odd", 1), ReleaseLease(leases=[]), 1.0)


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
    with anyio.fail_after(2):
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


async def test_two_processes_with_one_id_are_found_out_and_the_older_one_ends():
    broker = MemoryBroker()
    config = ServiceConfig(worker_id="same", heartbeat_s=HEARTBEAT_S)
    older, newer = Worker(broker.connect("a"), config), Worker(broker.connect("b"), config)
    with anyio.fail_after(2), pytest.RaisesGroup(WorkerLost, flatten_subgroups=True):
        async with anyio.create_task_group() as group:
            await group.start(older.run)
            await group.start(newer.run)
    assert older.num_closed == 1


async def test_an_error_in_a_background_duty_ends_the_actor_and_closes_it():
    class Faulty(Worker):
        def tick(self, now: float) -> None:
            raise ValueError("a mistake")

    worker = Faulty(MemoryBroker().connect("w"))
    with anyio.fail_after(2), pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        await worker.run()
    assert worker.num_closed == 1


async def test_an_outbox_that_is_full_drops_and_counts_and_goes_on():
    bus, dropped = MemoryBroker().connect("w"), []
    got: list[bytes] = []
    await bus.subscribe("x", lambda message: got.append(message.data))
    outbox = Outbox(bus, max_messages=3, on_dropped=dropped.append)
    for number in range(5):
        outbox.put("x", bytes([number]))
    await outbox.send_queued()
    outbox.put("x", b"after")
    await outbox.send_queued()
    await until(lambda: len(got) == 4)
    assert got == [b"\0", b"\1", b"\2", b"after"] and sum(dropped) == 2
