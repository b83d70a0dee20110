"""CORS: which web pages may read what a server answers. Streams and errors get the headers as well as whole answers do.

Who may send requests at all is decided before (`http_access.py`). Pages send API keys as headers, never as cookies, so
credentials are not allowed. A preflight is answered here, without a key: browsers send none with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.runtime.http_access import ANY

MAX_AGE_S = 600
METHODS = b"GET, POST, DELETE"
EXPOSED = b"x-request-id, retry-after, x-should-retry, warning, www-authenticate"
"""Headers of answers that a page's script may read, besides the harmless ones that it always may."""

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")

_Headers = list[tuple[bytes, bytes]]


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, whose answers pages of `origins` may read; `*` is every page. Without origins, `app` itself."""
    if not origins:
        return app
    everyone = ANY in origins
    allowed = frozenset(origin.lower().rstrip("/").encode() for origin in origins)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        origin = _header(scope, b"origin") if scope["type"] == "http" else None
        if origin is None or not (everyone or origin.lower() in allowed):
            await app(scope, receive, send)
            return
        more: _Headers = [(b"access-control-allow-origin", b"*" if everyone else origin)]
        if not everyone:
            more.append((b"vary", b"Origin"))
        if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method") is not None:
            await send({"type": "http.response.start", "status": 204, "headers": more + _preflight(scope)})
            await send({"type": "http.response.body", "body": b""})
            return
        more.append((b"access-control-expose-headers", EXPOSED))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        await app(scope, receive, send_with_headers)

    return serve


def _preflight(scope: Scope) -> _Headers:
    """What a page may send: every header that it asks for, since a `*` would leave out `authorization`."""
    headers = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", b"%d" % MAX_AGE_S)]
    asked = _header(scope, b"access-control-request-headers") or b""
    if _HEADER_NAMES.fullmatch(asked):
        headers.append((b"access-control-allow-headers", asked))
    if _header(scope, b"access-control-request-private-network") == b"true":  # of a page on the internet, to this network
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
