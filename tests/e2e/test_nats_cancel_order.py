"""Cancels that reach the gateway in one read with their requests, on a real nats-server."""

from __future__ import annotations

import json

import anyio
import nats
from nats.aio.msg import Msg

from common.protocol import headers, subjects
from common.runtime import nats_bus
from services.gateway.config import GatewayConfig
from tests.actors.edge import ScriptedCore, front_of, until
from tests.actors.nats_client import HI, SLUG


async def test_a_cancel_right_behind_its_request_is_never_lost(nats_server: str) -> None:
    """Requests and cancels have subscriptions of their own: one that waits behind another cancel overtakes its request."""
    core = ScriptedCore()
    bus = await nats_bus.connect(nats_server, name="gateway")
    front = front_of(core, bus, GatewayConfig(reply_prefixes=("_INBOX.",)))
    client = await nats.connect(nats_server)
    inbox = client.new_inbox()
    codes: dict[str, str] = {}

    async def hear(message: Msg) -> None:
        fields = message.headers or {}
        if headers.FINAL in fields:
            codes[fields[headers.REQUEST_ID]] = fields.get(headers.ERROR_CODE, "")

    await client.subscribe(inbox, cb=hear)
    names = [f"request-{number}" for number in range(200)]
    async with anyio.create_task_group() as group:
        await group.start(front.run)
        for name in names:
            await client.publish(subjects.cancel("nobody"), b"", reply=inbox)
            await client.publish(subjects.chat(SLUG), json.dumps(HI).encode(), reply=inbox, headers={headers.REQUEST_ID: name})
            await client.publish(subjects.cancel(name), b"", reply=inbox)
        await client.flush()
        await until(lambda: len(codes) == len(names))
        assert set(codes.values()) == {"cancelled"}
        await client.publish(subjects.chat(SLUG), json.dumps(HI).encode(), reply=inbox, headers={headers.REQUEST_ID: names[0]})
        await until(
            lambda: any(stream.request for stream in core.live)
        )  # a name that is used again: nothing is left of the cancel
        group.cancel_scope.cancel()
    await client.close()
    await bus.close()
