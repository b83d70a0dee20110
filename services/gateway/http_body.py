"""Reading an HTTP request's body: bounded in bytes, time and memory, compressed or not."""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator
from typing import ClassVar

import anyio
import anyio.lowlevel
from starlette.types import Receive, Scope

from common.protocol.errors import InvalidParameter, PayloadTooLarge, RequestError
from services.gateway.intake import Room
from services.gateway.parse import SMALL_BYTES

BODY_TIMEOUT_S = 30.0
_JSON_TYPE = re.compile(rb"\s*application/json\s*(;.*)?", re.IGNORECASE | re.DOTALL)
_INFLATE_BYTES = 64 * 1024
_GZIP = 16 + zlib.MAX_WBITS


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


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case)."""
    return next((value for key, value in scope["headers"] if key == name), None)


def text_header(scope: Scope, name: str) -> str | None:
    """The first header called `name` (lower case), as text."""
    found = header(scope, name.encode())
    return None if found is None else found.decode("latin-1")


async def read_body(scope: Scope, receive: Receive, limit: int, room: Room) -> bytes:
    """The request's body, of at most `limit` bytes: refused as soon as it is known to be longer. `room` is its memory.

    :raises WrongContentType, PayloadTooLarge, BodyTimeout, ClientGone, Overloaded, InvalidParameter:
    """
    if not _JSON_TYPE.fullmatch(header(scope, b"content-type") or b""):
        raise WrongContentType("send JSON, with the header `Content-Type: application/json`")
    encoding = (header(scope, b"content-encoding") or b"identity").strip().lower()
    if encoding not in (b"identity", b"gzip", b"x-gzip"):
        shown = encoding[:32].decode("ascii", "replace")
        raise WrongContentType(f"Content-Encoding {shown!r} is not read: send the body as it is, or with gzip")
    is_plain = encoding == b"identity"
    announced = header(scope, b"content-length") or b""
    if announced.isdigit() and (len(announced) > 15 or int(announced) > limit):
        raise _too_large(limit)
    expected = int(announced) if announced.isdigit() and is_plain else None
    inflater = None if is_plain else _Inflater()
    chunks: list[bytes] = []
    size = arrived = 0
    try:
        with anyio.fail_after(BODY_TIMEOUT_S):
            if expected is not None and expected > SMALL_BYTES:
                await room.wait_for(expected)
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client closed the connection")
                chunk, more = message.get("body", b""), message.get("more_body", False)
                arrived += len(chunk)
                for piece in (chunk,) if inflater is None else inflater.feed(chunk, at_end=not more):
                    size += len(piece)
                    if size > limit or arrived > limit:
                        raise _too_large(limit)
                    if size > SMALL_BYTES:
                        await room.wait_for(limit if expected is None else expected)
                    else:
                        room.take(size)
                    chunks.append(piece)
                    if inflater is not None:
                        await anyio.lowlevel.checkpoint()
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    return b"".join(chunks).removeprefix(codecs.BOM_UTF8)  # some programs put it before text


class _Inflater:
    """Unpacks gzip a little at a time: who takes the pieces can stop before a bomb has gone off."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)

    def feed(self, data: bytes, *, at_end: bool) -> Iterator[bytes]:
        """:raises InvalidParameter: if it is not gzip, or ends too early."""
        try:
            while data:
                yield self._member.decompress(data, _INFLATE_BYTES)
                data = self._member.unconsumed_tail
                if self._member.eof and self._member.unused_data:  # another member follows
                    data, self._member = self._member.unused_data, zlib.decompressobj(_GZIP)
            if at_end:
                yield self._member.flush()
        except zlib.error as error:
            raise InvalidParameter("the body is not valid gzip") from error
        if at_end and not self._member.eof:
            raise InvalidParameter("the body is not valid gzip: it ends too early")


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes")
