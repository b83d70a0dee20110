"""One HTTP exchange at the ASGI level: reading a body within bounds, writing an answer, watching the client."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

import anyio
from starlette.types import Receive, Scope, Send

from common.protocol.errors import (
    Overloaded,
    PayloadTooLarge,
    PenstockError,
    RequestError,
    ServiceError,
    ShuttingDown,
)
from services.gateway import bodies

Headers = list[tuple[bytes, bytes]]

BODY_TIMEOUT_S = 30.0
_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_JSON_TYPE = re.compile(rb"\s*application/json\s*(;.*)?", re.IGNORECASE | re.DOTALL)
_RETRY_AFTER_S = 1


class Unauthorized(RequestError):
    code: ClassVar[str] = "invalid_api_key"
    http_status: ClassVar[int] = 401


class WrongContentType(RequestError):
    code: ClassVar[str] = "unsupported_media_type"
    http_status: ClassVar[int] = 415


class BodyTimeout(RequestError):
    code: ClassVar[str] = "request_timeout"
    http_status: ClassVar[int] = 408


class ClientGone(RequestError):
    """There is nobody to answer."""

    code: ClassVar[str] = "client_closed_request"
    http_status: ClassVar[int] = 499


def error_headers(error: PenstockError) -> Headers:
    """What an error's answer carries besides its body."""
    if isinstance(error, (Overloaded, ShuttingDown)) or (isinstance(error, ServiceError) and error.http_status == 503):
        return [(b"retry-after", b"%d" % _RETRY_AFTER_S)]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    return []


def safe_request_id(scope: Scope, minted: str) -> bytes:
    """The client's `x-request-id` if it is one harmless word, else `minted`. For the answer's header and nothing else."""
    sent = header(scope, b"x-request-id")
    return sent if sent is not None and _SAFE_ID.fullmatch(sent) else minted.encode()


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case)."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body, of at most `limit` bytes: refused as soon as it is known to be longer.

    :raises WrongContentType, PayloadTooLarge, BodyTimeout, ClientGone:
    """
    if not _JSON_TYPE.fullmatch(header(scope, b"content-type") or b""):
        raise WrongContentType("send JSON, with the header `Content-Type: application/json`")
    too_large = PayloadTooLarge(f"the body is larger than {limit} bytes")
    announced = header(scope, b"content-length") or b"0"
    if announced.isdigit() and (len(announced) > 15 or int(announced) > limit):
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        with anyio.fail_after(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client closed the connection")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error


class Exchange:
    """One request's answer. `receive` is for one task at a time: first whoever reads the body, then `watch`."""

    def __init__(self, receive: Receive, send: Send, headers: Headers, clock: Callable[[], float]) -> None:
        self.receive = receive
        self._send = send
        self._headers = headers
        self._clock = clock
        self._started = False
        self._ended = False
        self._streams = False
        self._writing_since: float | None = None
        self._last_write = 0.0

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Status and headers of a stream whose chunks follow by `write`."""
        self._started = self._streams = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Blocks while the client's buffers are full."""
        self._ended = not more
        self._writing_since = self._last_write = self._clock()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._writing_since = None

    async def respond(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """A whole JSON answer."""
        self._started = True
        length = (b"content-length", b"%d" % len(body))
        all_headers = [(b"content-type", b"application/json"), length, *headers, *self._headers]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self.write(body, more=False)

    async def fail(self, error: PenstockError) -> None:
        """The answer's end: an error body, or in a stream that has begun an event with it."""
        body = bodies.failure_body(error)
        if not self._started:
            await self.respond(error.http_status, body, error_headers(error))
        elif self._streams and not self._ended:
            await self.write(b"data: " + body + b"\n\n", more=False)

    async def watch(self, *, stall_s: float, keepalive_s: float) -> str:
        """Returns why the client needs nothing more: "answered", "disconnected" or "stalled".

        Meanwhile a comment goes out on a stream that has been idle for `keepalive_s`.
        """
        period_s = min(stall_s, keepalive_s) / 4
        while True:
            with anyio.move_on_after(period_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        return "answered" if self._ended else "disconnected"
            now = self._clock()
            if self._writing_since is not None:
                if now - self._writing_since > stall_s:
                    return "stalled"
            elif self._streams and not self._ended and now - self._last_write > keepalive_s:
                await self.write(b": keep-alive\n\n")
