"""Requests to the HTTP edge on a scripted core, as its tests make them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx

from common.text.bundle import TextBundle
from services.gateway.config import GatewayConfig
from tests.actors.edge import AsgiClient, ScriptedCore, ScriptedStream, app_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "Small/Model-1"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def config(**settings: Any) -> GatewayConfig:
    return GatewayConfig(**settings)


def says(text: str, *, finish: str = "length", **more: Any) -> Callable[[ScriptedStream], None]:
    return lambda stream: stream.say(text, finish=finish, **more)


def client(core: ScriptedCore, *, bundle: TextBundle | None = None, **settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app_of(core, config(**settings), bundle=bundle))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def post(core: ScriptedCore, path: str, body: Any, **settings: Any) -> httpx.Response:
    async with client(core, **settings) as http:
        if isinstance(body, bytes):
            return await http.post(path, content=body, headers={"content-type": "application/json"})
        return await http.post(path, json=body)


def check_error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    return error


@asynccontextmanager
async def streaming(
    body: dict[str, Any], *, path: str = CHAT, streams: int = 1, **settings: Any
) -> AsyncIterator[tuple[AsgiClient, ScriptedCore]]:
    """A streamed request that the core has taken, with as many streams as there are choices."""
    core = ScriptedCore()
    request = AsgiClient(app_of(core, config(**settings)), path, {**body, "stream": True})
    async with anyio.create_task_group() as group:
        group.start_soon(request.run)
        await core.nth(streams - 1)
        yield request, core
        group.cancel_scope.cancel()
