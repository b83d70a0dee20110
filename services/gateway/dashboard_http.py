"""The dashboard over HTTP: the page's own files, which anyone may load, and its data, which needs the API key if one is set.

    GET /                               the page; GET /dashboard/<file>: its script, style and icon
    GET /dashboard/events?search=…      SSE: `history` once, then `snapshot`, `workers` and `ended` every second
    GET /dashboard/requests/<name>      what became of one request
    GET /sd                             where Prometheus finds everybody's metrics

A browser's `EventSource` can't send a header, so the page reads the events with `fetch`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import anyio
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.protocol.errors import NotFound
from services.gateway.config import GatewayConfig
from services.gateway.dashboard import Dashboard, Viewer
from services.gateway.http_io import Exchange
from services.gateway.page_files import page_file, page_files

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]

Authorize = Callable[[Scope], None]
"""Raises Unauthorized for a request without the API key."""


def dashboard_routes(dashboard: Dashboard, config: GatewayConfig, authorize: Authorize) -> list[Route]:
    """What a gateway's HTTP port serves of the dashboard."""
    data = _Data(dashboard, authorize)
    return [
        Route("/", functools.partial(_file, "index.html"), methods=["GET"]),
        Route("/dashboard/events", _Events(dashboard, config, authorize), methods=["GET"]),
        Route("/dashboard/requests/{name}", data.request, methods=["GET"]),
        Route("/sd", data.targets, methods=["GET"]),
        *(
            Route(f"/dashboard/{name}", functools.partial(_file, name), methods=["GET"])
            for name in page_files()
            if not name.endswith(".html")
        ),
    ]


async def _file(name: str, request: Request) -> Response:
    return page_file(name, request)


class _Data:
    def __init__(self, dashboard: Dashboard, authorize: Authorize) -> None:
        self._dashboard = dashboard
        self._authorize = authorize

    async def request(self, request: Request) -> Response:
        """:raises Unauthorized, NotFound: see `Dashboard.request`."""
        self._authorize(request.scope)
        name = request.path_params["name"]
        if len(name) > 256:
            raise NotFound("no request has so long a name")
        return _json(self._dashboard.request(name))

    async def targets(self, request: Request) -> Response:
        """:raises Unauthorized: without the API key."""
        self._authorize(request.scope)
        return _json(self._dashboard.targets())


def _json(content: bytes) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(content, media_type="application/json", headers=headers)


class _Events:
    """The stream of events: an ASGI app, so that starlette hands it `receive` and `send` as they are."""

    def __init__(self, dashboard: Dashboard, config: GatewayConfig, authorize: Authorize) -> None:
        self._dashboard = dashboard
        self._config = config
        self._authorize = authorize

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """:raises Unauthorized, Overloaded: before anything is sent."""
        self._authorize(scope)
        search = QueryParams(scope["query_string"]).get("search", "")
        exchange = Exchange(scope, receive, send, [], time.monotonic)
        with self._dashboard.viewer(search) as viewer:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch, exchange, group.cancel_scope)
                await self._send(exchange, viewer)
                group.cancel_scope.cancel()

    async def _send(self, exchange: Exchange, viewer: Viewer) -> None:
        await exchange.start(200, EVENT_HEADERS)
        while news := await viewer.next():
            await exchange.write(news)
        await exchange.write(b"", more=False)

    async def _watch(self, exchange: Exchange, scope: anyio.CancelScope) -> None:
        """Ends the stream when its reader is gone or has read nothing for too long."""
        await exchange.watch(stall_s=self._config.slow_reader_timeout_s, keepalive_s=self._config.sse_keepalive_s)
        if exchange.gone == "stalled":
            exchange.abort()
        scope.cancel()
