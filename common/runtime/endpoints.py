"""HTTP beside an actor: binding the port, running uvicorn as one more task, and the plain /metrics, /health and /ready."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Iterator

import anyio
import msgspec
import uvicorn
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.protocol.errors import ConfigError, RequestError
from common.runtime.actor import Actor
from common.runtime.file_limit import FileLimit
from common.runtime.http_access import HttpAccess
from common.runtime.http_protocol import SEND_BUFFER_BYTES, BoundedHttpProtocol, HttpLimits
from common.runtime.metrics import Metrics

FINISH_TIMEOUT_S = 5
"""What responses get to finish after the actor has drained: all that is left to do is to write."""
KEEP_ALIVE_S = 75
"""An idle connection stays open for so long. Clients that keep connections give them up after 4 to 60 s, and one that sends its
next request just as the server closes gets a reset."""
BREAK_OFF_S = 1
"""What they get when the process ends at once. Not 0: uvicorn would call that an error even when nothing was running."""


_TICKS_PER_SWEEP = 5
"""uvicorn ticks ten times a second."""


def bind(host: str, port: int, *, reuse_port: bool = False, stall_timeout_s: float = 30.0) -> socket.socket:
    """A bound socket; `port` 0 takes any free one. `reuse_port`: others that say so too may have the same port, and the
    kernel gives each of them a share of the connections.

    Connections inherit a bounded send buffer, and that the kernel gives up after `stall_timeout_s` on what is left in it when
    the process has closed them.

    :raises ConfigError: if the address can't be had, saying what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--http-host {host}: no such address ({error.strerror})", param="http_host") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall_timeout_s * 1000)))
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = (error.strerror or "unknown").lower()
        raise ConfigError(
            f"can't serve HTTP on {host}:{port}: {reason}; choose another with --http-port (0 takes any free one)",
            param="http_port",
        ) from error
    listener.setblocking(False)
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn as a task among others: signals stay with the service, and only `finish` ends it, so that it always ends its
    own tasks, too. `files` keeps file descriptors for everything else that needs some."""

    def __init__(self, app: ASGIApp, *, stall_timeout_s: float = 30.0, files: FileLimit | None = None) -> None:
        self._files = files
        limits = HttpLimits(stall_timeout_s) if files is None else HttpLimits(stall_timeout_s, files.admit)
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=functools.partial(BoundedHttpProtocol, limits=limits),  # pyright: ignore[reportArgumentType]
                ws="none",
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=FINISH_TIMEOUT_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_until_finished(self, listener: socket.socket) -> None:
        with anyio.CancelScope(shield=True):
            await self.serve([listener])

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SWEEP == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedHttpProtocol):
                    connection.sweep(now)
            if self._files is not None:
                self._files.check(now)
        return await super().on_tick(counter)

    def finish(self, *, at_once: bool) -> None:
        """Accept nothing more, let running responses end (or break them off), then return from `run_until_finished`."""
        if at_once:
            self.config.timeout_graceful_shutdown = BREAK_OFF_S
        self.should_exit = True


def guarded(app: ASGIApp, access: HttpAccess, refused: Counter) -> ASGIApp:
    """`app` for the requests that `access` lets in. The others get an error in OpenAI's form, and are counted by its code."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            access.check(scope["headers"])
        except RequestError as error:
            refused.labels(error.code).inc()
            body = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
            content = msgspec.json.encode({"error": body})
            await Response(content, error.http_status, media_type="application/json")(scope, receive, send)
        else:
            await app(scope, receive, send)

    return serve


def metrics_page(metrics: Metrics, request: Request) -> Response:
    """The answer of `/metrics`, in the format that the request accepts."""
    content, content_type = metrics.page(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type, "vary": "accept"})


def worker_app(actor: Actor) -> Starlette:
    """What every worker serves: its metrics, whether the process works, whether it takes requests."""

    async def metrics(request: Request) -> Response:
        return metrics_page(actor.metrics, request)

    async def health(_: Request) -> Response:
        return status(actor.healthy)

    async def ready(_: Request) -> Response:
        return status(actor.healthy and actor.ready)

    def status(good: bool) -> Response:
        content = {
            "status": "ok" if good else "unavailable",
            "state": actor.state,
            "worker": actor.ref.id,
            "bus_connected": actor.bus.connected,
        }
        return JSONResponse(content, status_code=200 if good else 503)

    return Starlette(routes=[Route("/metrics", metrics), Route("/health", health), Route("/ready", ready)])
