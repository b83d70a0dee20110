"""The dashboard over HTTP: the page's own files, which anyone may load, and its data, which needs the API key if one is set.

    GET /                               the page; GET /dashboard/<file>: its script, style and icon
    GET /dashboard/events?search=…      SSE: `history` once, then `snapshot`, `workers` and `ended` every second
    GET /dashboard/requests/<name>      what became of one request
    GET /sd                             where Prometheus finds everybody's metrics

The page loads nothing from elsewhere, and its Content-Security-Policy has the browser see to that. A browser's `EventSource`
can't send a header, so the page reads the events with `fetch`.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import anyio
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.gateway.config import GatewayConfig
from services.gateway.dashboard import Dashboard, NotFound, Viewer
from services.gateway.http_io import Exchange

FILES = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
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
            for name in _files()
            if name != "index.html"
        ),
    ]


@functools.cache
def _files() -> dict[str, tuple[bytes, str]]:
    """The page's files by name: content and entity tag."""
    contents = {path.name: path.read_bytes() for path in sorted(FILES.iterdir()) if path.suffix in MEDIA_TYPES}
    return {name: (content, f'"{hashlib.sha256(content).hexdigest()[:32]}"') for name, content in contents.items()}


async def _file(name: str, request: Request) -> Response:
    content, tag = _files()[name]
    headers = {**HEADERS, "etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[Path(name).suffix])


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
