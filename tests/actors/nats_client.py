"""A NATS edge on the memory bus and a scripted core, and a client of it: for the edge's tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from common.protocol import headers, subjects
from common.runtime.bus import BusMessage
from common.testing.memory_bus import MemoryBroker, MemoryBus
from services.gateway.config import GatewayConfig
from services.gateway.nats_front import NatsFront
from tests.actors.edge import BUNDLE, ScriptedCore, front_of, until

SLUG = subjects.slug(BUNDLE.name)
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Client:
    """A raw NATS user with an inbox of its own."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.inbox = bus.new_inbox()
        self.replies: list[BusMessage] = []
        self._subscription: Any = None

    async def listen(self) -> None:
        self._subscription = await self.bus.subscribe(self.inbox, self.replies.append)

    async def leave(self) -> None:
        await self._subscription.unsubscribe()

    async def ask(self, body: Any, *, kind: str = "chat", slug: str = SLUG, reply: str | None = None, **fields: str) -> None:
        of_kind = {
            "chat": subjects.chat,
            "responses": subjects.responses,
            "messages": subjects.messages,
            "embeddings": subjects.embeddings,
            "score": subjects.score,
            "input_tokens": subjects.input_tokens,
            "count_tokens": subjects.count_tokens,
            "tokenize": subjects.tokenize,
            "detokenize": subjects.detokenize,
        }
        subject = of_kind.get(kind, subjects.completions)(slug)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in fields.items()}
        await self.bus.publish(subject, data, reply=self.inbox if reply is None else reply, headers=sent)

    async def cancel(self, request: str, *, reply: str | None = None) -> None:
        await self.bus.publish(subjects.cancel(request), b"", reply=self.inbox if reply is None else reply)

    @property
    def finals(self) -> list[BusMessage]:
        return [reply for reply in self.replies if headers.FINAL in reply.headers]

    @property
    def last(self) -> BusMessage:
        return self.replies[-1]

    @property
    def text(self) -> str:
        choices = [choice for reply in self.replies for choice in json.loads(reply.data)["choices"]]
        return "".join(choice["delta"].get("content", "") for choice in choices)

    async def final(self) -> BusMessage:
        await until(lambda: bool(self.finals))
        return self.last

    def check_error(self, code: str) -> dict[str, Any]:
        assert self.last.headers[headers.FINAL] == "1"
        assert self.last.headers[headers.ERROR_CODE] == code
        assert self.last.headers[headers.ERROR]
        error = json.loads(self.last.data)["error"]
        assert error["code"] == code
        return error


class Setup:
    def __init__(self, core: ScriptedCore, front: NatsFront, client: Client, broker: MemoryBroker) -> None:
        self.core, self.front, self.client, self.broker = core, front, client, broker

    def dropped(self, reason: str) -> str:
        lines = self.core.metrics.render().decode().splitlines()
        return next((line for line in lines if line.startswith(f'penstock_nats_dropped_total{{reason="{reason}"}}')), "")


@asynccontextmanager
async def front(
    core: ScriptedCore | None = None, *, broker: MemoryBroker | None = None, name: str = BUNDLE.name, **settings: Any
) -> AsyncIterator[Setup]:
    """`broker`: one that fronts share. `name`: the model's."""
    broker = broker or MemoryBroker()
    core = core or ScriptedCore()
    bundle = msgspec.structs.replace(BUNDLE, name=name)
    served = front_of(core, broker.connect("gateway"), GatewayConfig(**settings), bundle=bundle)
    client = Client(broker.connect("client"))
    await client.listen()
    async with anyio.create_task_group() as group:
        await group.start(served.run)
        yield Setup(core, served, client, broker)
        group.cancel_scope.cancel()
    assert served.num_live == 0
    assert not core.live


def says(text: str) -> ScriptedCore:
    return ScriptedCore(lambda stream: stream.say(text, finish="stop"))
