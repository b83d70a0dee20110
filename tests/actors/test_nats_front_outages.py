"""Clients on NATS while the bus goes away: their streams wait for them, and go on without a gap or a repetition."""

from __future__ import annotations

import json

import anyio
import pytest

from common.protocol import headers
from common.protocol.errors import Cancelled
from common.testing.memory_bus import MemoryBroker
from services.gateway import nats_reply
from services.gateway.nats_reply import Link, Reply
from services.gateway.views.registry import view_of
from tests.actors.edge import until
from tests.actors.nats_client import HI, Client, Setup, front


async def restart(setup: Setup, client_away_s: float) -> None:
    """The server restarts; the client comes back later than the gateway."""
    setup.broker.cut(setup.client.bus)
    setup.broker.stop()
    await anyio.sleep(0.05)
    setup.broker.start()
    await anyio.sleep(client_away_s)
    setup.broker.heal(setup.client.bus)


async def test_a_stream_waits_for_a_client_that_comes_back_later_than_the_gateway() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say("a")
        await until(lambda: setup.client.text == "a")
        async with anyio.create_task_group() as group:
            group.start_soon(restart, setup, 0.6)
            for letter in "bcdefghijklmnopqrst":
                await anyio.sleep(0.03)
                stream.say(letter)
        stream.say("u", finish="stop")
        await setup.client.final()
        assert setup.client.text == "abcdefghijklmnopqrstu"
        numbers = [int(reply.headers[headers.SEQUENCE]) for reply in setup.client.replies]
        assert numbers == list(range(len(numbers)))


async def test_the_final_message_waits_for_the_client_too() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        async with anyio.create_task_group() as group:
            group.start_soon(restart, setup, 0.4)
            await anyio.sleep(0.02)
            stream.say("all of it", finish="stop")
        assert json.loads((await setup.client.final()).data)["choices"][0]["finish_reason"] == "stop"
        assert setup.client.text == "all of it"


async def test_a_client_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_reply, "RETURN_GRACE_S", 0.3)
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say("a")
        await until(lambda: setup.client.text == "a")
        async with anyio.create_task_group() as group:
            group.start_soon(restart, setup, 60)
            with anyio.fail_after(3):
                while setup.core.live:
                    stream.say("b")
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()


async def test_a_stream_without_news_survives_an_outage_and_its_client_may_still_cancel() -> None:
    async with front() as setup:
        await setup.client.ask(HI, Penstock_Request_Id="mine")
        stream = await setup.core.nth(0)
        await restart(setup, client_away_s=0.0)
        assert not stream.cancelled
        await setup.client.cancel("mine")
        await setup.client.final()
        setup.client.check_error("cancelled")


async def test_a_reply_that_was_cancelled_before_it_went_out_leaves_no_gap() -> None:
    broker = MemoryBroker()
    client, gateway = Client(broker.connect("client")), broker.connect("gateway")
    await client.listen()
    reply = Reply(Link(gateway), client.inbox, "minted", "control", "", view_of("chat"))
    await reply.chunk(b"{}")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await reply.chunk(b"{}")
    await reply.fail(Cancelled("the request was cancelled"))
    await client.final()
    assert [int(message.headers[headers.SEQUENCE]) for message in client.replies] == list(range(len(client.replies)))
