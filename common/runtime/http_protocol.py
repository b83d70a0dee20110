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
    _head_bytes = 0
    _patience: asyncio.TimerHandle | None = None
    """Runs while a head is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._patience is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # on a connection that is kept alive
        super().data_received(data)
        if self._patience is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, _TOO_LATE)

    def _head_came(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self, status: bytes) -> None:
        self._head_came()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
