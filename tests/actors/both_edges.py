"""One request over either edge, in either form, with what a client sees of its answer: for promises that hold everywhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import httpx
import pytest

from common.protocol import headers
from common.testing.memory_bus import MemoryBroker
from common.text.bundle import TextBundle
from services.gateway.config import GatewayConfig
from tests.actors.edge import BUNDLE, ScriptedCore, ScriptedStream, app_of, front_of
from tests.actors.http_client import CHAT, COMPLETIONS
from tests.actors.nats_client import Client

Edge = Literal["http", "nats"]
Kind = Literal["chat", "completion"]

everywhere = pytest.mark.parametrize(
    ("edge", "kind", "stream", "n"),
    [(e, k, s, n) for e in ("http", "nats") for k in ("chat", "completion") for s in (True, False) for n in (1, 3)],
)


@dataclass
class Seen:
    """`texts` by choice. `chunks` of a stream, or the one body. `warning`: without what HTTP's header puts around it."""

    texts: dict[int, str] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    warning: str = ""
    error: dict[str, Any] | None = None

    def read(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.chunks.append(chunk)
        for choice in chunk["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text", "")}
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + (said.get("content") or "")

    @property
    def usage(self) -> dict[str, Any]:
        return next(chunk["usage"] for chunk in reversed(self.chunks) if chunk.get("usage"))


def body_of(kind: Kind, stream: bool, n: int, **arguments: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": "hi"}
    return {**base, "stream": stream, "n": n, **arguments}


def says(text: str, **more: Any) -> Callable[[ScriptedStream], None]:
    return lambda stream: stream.say(text, finish="stop", **more)


async def ask(
    edge: Edge, core: ScriptedCore, kind: Kind, body: dict[str, Any], *, bundle: TextBundle = BUNDLE, **settings: Any
) -> Seen:
    if edge == "nats":
        return await _ask_nats(core, kind, body, bundle, settings)
    seen = Seen()
    app = app_of(core, GatewayConfig(**settings), bundle=bundle)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        response = await http.post(CHAT if kind == "chat" else COMPLETIONS, json=body)
    warning = response.headers.get("warning", "")
    if warning:
        assert warning.startswith('299 penstock "') and warning.endswith('"')
        seen.warning = warning[len('299 penstock "') : -1]
    if not response.headers["content-type"].startswith("text/event-stream"):
        seen.read(response.json())
        return seen
    for line in response.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            seen.read(json.loads(line[6:]))
    return seen


@asynccontextmanager
async def nats_edge(core: ScriptedCore, bundle: TextBundle = BUNDLE, **settings: Any) -> AsyncIterator[Client]:
    broker = MemoryBroker()
    front = front_of(core, broker.connect("gateway"), GatewayConfig(**settings), bundle=bundle)
    client = Client(broker.connect("client"))
    await client.listen()
    async with anyio.create_task_group() as group:
        await group.start(front.run)
        yield client
        group.cancel_scope.cancel()


async def _ask_nats(core: ScriptedCore, kind: Kind, body: dict[str, Any], bundle: TextBundle, settings: Any) -> Seen:
    seen = Seen()
    async with nats_edge(core, bundle, **settings) as client:
        await client.ask(body, kind=kind)
        await client.final()
    for reply in client.replies:
        seen.read(json.loads(reply.data))
    seen.warning = client.replies[0].headers.get(headers.WARNING, "")
    assert not any(headers.WARNING in reply.headers for reply in client.replies[1:])
    return seen
