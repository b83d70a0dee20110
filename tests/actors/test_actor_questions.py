"""What actors ask, answer and can't read, on the memory bus."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from common.protocol import messages, subjects
from common.protocol.errors import NoResponders, ProtocolError, RequestTimeout
from common.protocol.handles import WorkerRef
from common.protocol.messages import Accepted, Cancel, HandoffFailed, Message, Rejected, ReleaseLease
from common.runtime.bus import BusMessage
from common.runtime.outbox import Outbox
from common.testing.memory_bus import MemoryBroker
from tests.actors.actor_site import pair, running, until


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


async def test_a_message_that_cannot_be_decoded_is_counted_and_answered_and_harms_nobody():
    _, gateway, worker = pair()
    async with running(gateway, worker):
        inbox = subjects.inbox("decode", worker.ref.id)
        reply = await gateway.bus.request(inbox, b"\xff\x00 not ours", timeout_s=1.0)
        rejected = messages.decode(reply.data)
        assert isinstance(rejected, Rejected) and rejected.code == "protocol_error"
        assert b"penstock_messages_undecodable_total 1.0" in worker.metrics.render()
        assert isinstance(await gateway.ask(worker.ref, ReleaseLease(leases=[]), 1.0), Accepted)


async def test_messages_that_a_newer_version_sends_all_the_time_are_one_line_each_kind(caplog: pytest.LogCaptureFixture):
    _, gateway, worker = pair()
    async with running(gateway, worker):
        for kind in ("FutureA", "FutureB") * 20:
            data = msgspec.msgpack.encode({"type": kind})
            await gateway.bus.request(subjects.inbox("decode", worker.ref.id), data, timeout_s=1.0)
        assert b"penstock_messages_undecodable_total 40.0" in worker.metrics.render()
    said = [record.getMessage() for record in caplog.records if "undecodable_message" in record.getMessage()]
    assert len(said) == 2 and "FutureA" in said[0] and "FutureB" in said[1]


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
