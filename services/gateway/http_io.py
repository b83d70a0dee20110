"""One HTTP exchange at the ASGI level: writing an answer, watching the client."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import anyio
import anyio.lowlevel
from starlette.types import Receive, Scope, Send

from common.protocol.errors import (
    DeadlineExceeded,
    InvalidLogits,
    JetStreamOff,
    Overloaded,
    PenstockError,
    RateLimited,
    RequestError,
    ServiceError,
    ShuttingDown,
    WorkersDied,
)
from common.runtime.http_protocol import ABORT, SEND_BODY
from services.gateway import bodies
from services.gateway.http_body import header

Headers = list[tuple[bytes, bytes]]

_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_RETRY_AFTER_S = 1
_NOT_TO_RETRY = (DeadlineExceeded, InvalidLogits, JetStreamOff, WorkersDied)
"""Errors of status 5xx after which another attempt would end alike. The clients of OpenAI and Anthropic make two by themselves
unless they are told so, and a request that kills workers would kill more of them."""


class Unauthorized(RequestError):
    code: ClassVar[str] = "invalid_api_key"
    http_status: ClassVar[int] = 401


def error_headers(error: PenstockError) -> Headers:
    """What an error's answer carries besides its body."""
    if isinstance(error, RateLimited):
        return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))]
    if isinstance(error, (Overloaded, ShuttingDown)) or (isinstance(error, ServiceError) and error.http_status == 503):
        return [(b"retry-after", b"%d" % _RETRY_AFTER_S)]
    if isinstance(error, _NOT_TO_RETRY):
        return [(b"x-should-retry", b"false")]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    return []


def sent_key(scope: Scope) -> bytes:
    """Return the API key of a request: `Authorization: Bearer`, as OpenAI's clients send it, or `x-api-key`, as Anthropic's."""
    scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else (header(scope, b"x-api-key") or b"")


def safe_request_id(scope: Scope, minted: str) -> bytes:
    """The client's `x-request-id` if it is one harmless word, else `minted`. For the answer's header and nothing else."""
    sent = header(scope, b"x-request-id")
    return sent if sent is not None and _SAFE_ID.fullmatch(sent) else minted.encode()


class Exchange:
    """One request's answer. `receive` is for one task at a time: first whoever reads the body, then `watch`. `headers` are in
    every answer. `status` is the one sent, 0 before. `gone`: nobody waits for the answer any more. `keep_alive` is
    written on an idle stream. `error_body` encodes an error, `stream_failure` one that ends a stream."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: Headers, clock: Callable[[], float]) -> None:
        self.receive = receive
        self.headers = headers
        self.keep_alive = bodies.KEEP_ALIVE
        self.error_body: Callable[[PenstockError], bytes] = bodies.failure_body
        self.stream_failure: Callable[[PenstockError], bytes] | None = None
        self.status = 0
        self.gone = ""
        self._send = send
        extensions = scope.get("extensions") or {}
        self._send_body: Send = extensions.pop(SEND_BODY, send)
        self._abort: Callable[[], None] | None = extensions.get(ABORT)
        self._clock = clock
        self._started = False
        self._ended = False
        self._streams = False
        self._writing_since: float | None = None
        self._last_write = 0.0

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Status and headers of a stream whose chunks follow by `write`."""
        self._started = self._streams = True
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Blocks while the client's buffers are full."""
        self._ended = not more
        self._writing_since = self._last_write = self._clock()
        await self._send_body({"type": "http.response.body", "body": body, "more_body": more})
        self._writing_since = None

    async def respond(
        self, status: int, pieces: Iterable[bytes], size: int, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """A whole JSON answer of `size` bytes. A large one comes in pieces, each written when the client has room for it."""
        self._started = True
        self.status = status
        length = (b"content-length", b"%d" % size)
        all_headers = [(b"content-type", b"application/json"), length, *headers, *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        sent = 0
        for piece in pieces:
            sent += len(piece)
            await self.write(piece, more=sent < size)
            if sent < size:
                await anyio.lowlevel.checkpoint()

    async def fail(self, error: PenstockError) -> None:
        """The answer's end: an error body, or in a stream that has begun an event with it."""
        if not self._started:
            body = self.error_body(error)
            await self.respond(error.http_status, [body], len(body), error_headers(error))
        elif self._streams and not self._ended and self.stream_failure is not None:
            await self.write(self.stream_failure(error), more=False)

    async def watch(self, *, stall_s: float, keepalive_s: float) -> None:
        """Return when the client needs nothing more: it has its answer, or it is `gone`: "disconnected" or "stalled".

        Meanwhile a sign of life goes out on a stream that has been idle for `keepalive_s`.
        """
        period_s = min(stall_s, keepalive_s) / 4
        while True:
            with anyio.move_on_after(period_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        self.gone = "" if self._ended and self._writing_since is None else "disconnected"
                        return
            now = self._clock()
            if self._writing_since is not None:
                if now - self._writing_since > stall_s:
                    self.gone = "stalled"
                    return
            elif self._streams and not self._ended and now - self._last_write > keepalive_s:
                await self.write(self.keep_alive)

    def abort(self) -> None:
        """Break the connection off: what is still to be sent would wait for ever for a client that does not read."""
        if self._abort is not None:
            self._abort()
