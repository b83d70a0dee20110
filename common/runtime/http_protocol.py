"""uvicorn's HTTP protocol, with bounds on what a client may take to say what it wants and to read what it asked for.

uvicorn waits for ever for a request's head, and keeps whatever comes of it: a thousand clients that send a byte now and then
would hold a thousand sockets, and one that never ends its headers the memory. From the first byte (or from connecting) to the
end of the headers, a request has HEAD_TIMEOUT_S and MAX_HEAD_BYTES. Bodies are bounded by who reads them.

It also waits for ever for a client that reads nothing, with whatever is still to be sent. Here such a connection is broken off
with a reset after `stall_timeout_s`, whether it is being written to or was closed, and little is buffered for it meanwhile.

A client that is answered before it has sent its whole body may still be sending, and would lose its answer to the reset that
closing causes then. So the rest is read and thrown away, for HEAD_TIMEOUT_S and MAX_DISCARD_BYTES. Clients that speak HTTP/1.0
know no chunks: what has no length ends with the connection.

A request may ask for another protocol (`Upgrade: h2c`, as Java's client does with its first one). It is answered in this one;
httptools leaves its body to the other protocol, so the body is parsed by a second parser.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from common.runtime.file_limit import Admission

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
MAX_DISCARD_BYTES = 64 * 1024 * 1024
WRITE_BUFFER_BYTES = 64 * 1024
SEND_BUFFER_BYTES = 128 * 1024
"""What the kernel buffers of an answer, on top of WRITE_BUFFER_BYTES; it takes twice as much for its own records."""

ABORT = "penstock.abort"
"""ASGI extension: a callable that breaks the connection off and forgets what it still had to send."""

SEND_BODY = "penstock.send_body"
"""ASGI extension: `send` for parts of a body, without the layers that an application wraps around it. A stream has one for each
token. Whoever takes it removes it from the scope: otherwise each would hold the other."""

_TOO_LATE = b"408 Request Timeout"
_TOO_LARGE = b"431 Request Header Fields Too Large"
_NO_ROOM = b"503 Service Unavailable"
_OF_BODIES = (b"content-length", b"transfer-encoding")
_RESET = struct.pack("ii", 1, 0)
_FAREWELL_S = 1.0


@dataclass(frozen=True)
class HttpLimits:
    """`admit(connections)`: what becomes of the newest of them."""

    stall_timeout_s: float = 30.0
    admit: Callable[[int], Admission] = lambda connections: "serve"


class BoundedHttpProtocol(HttpToolsProtocol):
    _in_body = False
    _head_bytes = 0
    _discarded = 0
    _stalled_since: float | None = None
    _turned_away = False
    _is_head_known = False
    """Whether what is parsed is a head that was parsed before."""
    _patience: asyncio.TimerHandle | None = None
    """Runs while a head is awaited, and while the rest of a body comes that was answered already: it is thrown away, because
    a client that is cut off in mid-sentence would not see its answer."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HttpLimits | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits or HttpLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        admission = self._limits.admit(len(self.connections))
        if admission == "serve":
            self._start_waiting()
        else:
            self._turn_away(at_once=admission == "drop")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._turned_away:
            return
        if self._patience is None and self._all_answered:
            self._start_waiting()
        waiting = self._patience
        self._parse(data)
        if waiting is not None and waiting is self._patience and not self._in_body:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            if self._leaves_body:
                self._parse_body(data[upgrade.args[0] :])

    @property
    def _leaves_body(self) -> bool:
        """Whether the request asks for another protocol and has a body, which the parser takes for that protocol's."""
        return self.parser.should_upgrade() and any(name in _OF_BODIES for name, _ in self.headers)

    def _parse_body(self, data: bytes) -> None:
        """Go on behind the head with a parser that knows of no upgrade."""
        self.parser = httptools.HttpRequestParser(self)
        fields = b"".join(b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in _OF_BODIES)
        self._is_head_known = True
        try:
            self._parse(b"POST / HTTP/1.1\r\n%s\r\n" % fields)
        finally:
            self._is_head_known = False
        self._parse(data)

    def on_url(self, url: bytes) -> None:
        if not self._is_head_known:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head_known:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        if self._is_head_known:
            return
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # pyright: ignore[reportAssignmentType]
        scope["extensions"] = {ABORT: self.abort}
        if self._patience is None:  # it came in one piece with the end of the one before
            self._start_waiting()

    def on_headers_complete(self) -> None:
        if self._is_head_known:
            return
        self._in_body = True
        self._discarded = 0
        self._stop_waiting()
        super().on_headers_complete()
        # the cycle was made by uvicorn, and its task has not run yet
        self.cycle.__class__ = BoundedCycle
        self.cycle.protocol = self  # pyright: ignore[reportAttributeAccessIssue]
        scope: dict[str, Any] = self.cycle.scope  # pyright: ignore[reportAssignmentType]
        scope["extensions"][SEND_BODY] = self.cycle.send

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARD_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._leaves_body:
            return
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()
        if self._all_answered and not self.cycle.keep_alive:
            self.transport.close()  # the rest of the body that was waited for has come

    def abort(self) -> None:
        """Break the connection off with a reset: the kernel forgets what it still had to send, too."""
        raw: Any = self.transport.get_extra_info("socket")
        if raw is not None and not self.transport.is_closing():
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def sweep(self, now: float) -> None:
        """Called now and then: aborts when what is to be sent has waited for `stall_timeout_s`."""
        if not (self.flow.write_paused or self.transport.is_closing()):
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since >= self._limits.stall_timeout_s:
            self.abort()

    def linger(self) -> None:
        """The answer is complete, but not the body it is for: wait for its end, then close."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._start_waiting()

    @property
    def is_receiving(self) -> bool:
        """Whether the rest of a request's body is still to come."""
        return self._in_body

    @property
    def _all_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_waiting(self) -> None:
        self._head_bytes = 0
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, _TOO_LATE)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _turn_away(self, *, at_once: bool) -> None:
        """There is no room for one more connection. Its client is told so, and gets a moment to say what it need not have said:
        closing at once would reset the connection, and the client would see nothing but that."""
        self._turned_away = True
        if at_once:
            self.abort()
            return
        self.transport.write(_answer(_NO_ROOM, b"retry-after: 1\r\n"))
        self.transport.write_eof()
        self._patience = self.loop.call_later(_FAREWELL_S, self.transport.close)

    def _refuse(self, status: bytes) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            if self._all_answered and not self._in_body:
                self.transport.write(_answer(status))
            self.transport.close()


def _answer(status: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\n" + more + b"content-length: 0\r\nconnection: close\r\n\r\n"


class BoundedCycle(RequestResponseCycle):
    """One request and its answer."""

    protocol: BoundedHttpProtocol
    _ends_with_connection = False

    def send(self, message: MutableMapping[str, Any]) -> Awaitable[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if message.get("more_body") and not self._ends_with_connection:  # for each token of a stream: one layer less
            return super().send(message)  # pyright: ignore[reportArgumentType]
        return self._send(message)

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        event: Any = message
        if message["type"] == "http.response.start" and self.scope["http_version"] == "1.0":
            names = {name.lower() for name, _ in message.get("headers", [])}
            if b"content-length" not in names:
                self._ends_with_connection = True
                self.chunked_encoding = False
        elif self._ends_with_connection:
            self.expected_content_length = len(message.get("body", b""))
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (is_last and not self.keep_alive and self.protocol.is_receiving):
            await super().send(event)
            return
        self.keep_alive = True  # or it would be closed at once
        await super().send(event)
        self.keep_alive = False
        self.protocol.linger()
