"""multipart/form-data (RFC 7578) as it comes, without holding a part. Pure.

parser = FormParser(boundary_of(content_type))
for event in parser.push(data): …      Part, then bytes of it, then the next Part
parser.finish()
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message

import msgspec

from common.protocol.errors import InvalidParameter

MAX_HEAD_BYTES = 8 * 1024
MAX_PARTS = 32
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{1,70}")


class Part(msgspec.Struct, frozen=True):
    """A field of the form begins. `filename` is empty for one that is no file."""

    name: str
    filename: str = ""


def boundary_of(content_type: bytes) -> bytes:
    """What stands between the parts of a body with this content type.

    :raises InvalidParameter: it is no form.
    """
    said = Message()
    said["content-type"] = content_type.decode("latin-1")
    boundary = said.get_param("boundary")
    if said.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise InvalidParameter("send the file as multipart/form-data, with the fields `purpose` and `file`")
    return boundary.encode()


class FormParser:
    """See above. What it holds is bounded: a part's head, or bytes that may be the beginning of a boundary."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = b"\r\n"  # the first boundary stands at the beginning of a line, too
        self._state = "preamble"
        self._num_parts = 0

    def push(self, data: bytes) -> Iterator[Part | bytes]:
        """:raises InvalidParameter: it is no form, or one with too many or too long heads."""
        self._held += data
        while True:
            if self._state in ("preamble", "body"):
                at = self._held.find(self._delimiter)
                end = at if at >= 0 else len(self._held) - len(self._delimiter) + 1
                if end > 0:
                    if self._state == "body":
                        yield self._held[:end]
                    self._held = self._held[end:]
                if at < 0:
                    return
                self._held = self._held[len(self._delimiter) :]
                self._state = "delimiter"
            elif self._state == "delimiter":
                line, found, rest = self._held.partition(b"\r\n")
                if self._held.startswith(b"--"):
                    self._state = "end"
                    continue
                if not found:
                    if len(line) > MAX_HEAD_BYTES:
                        raise _malformed()
                    return
                if line.strip(b" \t"):
                    raise _malformed()
                self._held = b"\r\n" + rest  # so that a head without fields ends like any other
                self._state = "head"
            elif self._state == "head":
                head, found, rest = self._held.partition(b"\r\n\r\n")
                if len(head) > MAX_HEAD_BYTES:
                    raise InvalidParameter(f"a field of the form has more than {MAX_HEAD_BYTES} bytes of headers")
                if not found:
                    return
                self._num_parts += 1
                if self._num_parts > MAX_PARTS:
                    raise InvalidParameter(f"the form has more than {MAX_PARTS} fields")
                yield _part(head)
                self._held = rest
                self._state = "body"
            else:
                self._held = b""
                return

    def finish(self) -> None:
        """:raises InvalidParameter: the form's end is missing."""
        if self._state != "end":
            raise _malformed()


def _part(head: bytes) -> Part:
    for line in head.decode("utf-8", errors="replace").split("\r\n"):
        field, _, value = line.partition(":")
        if field.strip().lower() == "content-disposition":
            parsed = Message()
            parsed["content-disposition"] = value.strip()
            name = parsed.get_param("name", header="content-disposition")
            filename = parsed.get_filename()
            if parsed.get_content_disposition() == "form-data" and isinstance(name, str):
                return Part(name, filename or "")
    raise _malformed()


def _malformed() -> InvalidParameter:
    return InvalidParameter("the body is no well-formed multipart/form-data")
