"""uvicorn's HTTP protocol, with bounds on what a client may take to say what it wants.

uvicorn waits for ever for a request's head, and keeps whatever comes of it: a thousand clients that send a byte now and then
would hold a thousand sockets, and one that never ends its headers the memory. From the first byte (or from connecting) to the
end of the headers, a request has HEAD_TIMEOUT_S and MAX_HEAD_BYTES. Bodies are bounded by who reads them.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024

_TOO_LATE = b"408 Request Timeout"
_TOO_LARGE = b"431 Request Header Fields Too Large"


class BoundedHttpProtocol(HttpToolsProtocol):
    _in_body = False
    _head_bytes = 0
    _patience: asyncio.TimerHandle | None = None
    """Runs while a head is awaited, and while the rest of a body comes that was answered already: it is thrown away, because
    a client that is cut off in mid-sentence would not see its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._start_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._patience is None and self._all_answered:
            self._start_waiting()
        waiting = self._patience
        super().data_received(data)
        if waiting is not None and waiting is self._patience and not self._in_body:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._patience is None:  # it came in one piece with the end of the one before
            self._start_waiting()

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()

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

    def _refuse(self, status: bytes) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            if self._all_answered and not self._in_body:
                self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
