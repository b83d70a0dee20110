"""JSON in the text of a model: a value is passed on as it is written, and only its end is looked for.

Models write broken JSON now and then. Whoever gets it must be able to see it, so nothing is repaired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from common.text.output.scan import MAX_AHEAD, Markers, Reading, Scan

End = Literal["complete", "broken", "cut"]
"""How a value ended: with its last bracket; in a string with a line break, which no JSON has; with the text."""

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\\n]')
_STRING_END = Markers('"', "\\")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]")
_MAX_SCALAR = 64
_loads = msgspec.json.Decoder().decode
_check = msgspec.json.Decoder(float_hook=len).decode  # numbers past the range of a double are JSON, too


def quoted(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inner(text: str) -> str:
    """Return `text` as it stands in a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str) -> bool:
    """Return whether `text` is one JSON value."""
    try:
        _check(text.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
    return True


def container(scan: Scan, deliver: Callable[[str], None], *, limit: int | None = None) -> Reading[End]:
    """Deliver an object or array, whose bracket comes next, up to the bracket that closes it.

    `limit`: characters after which it counts as broken.
    """
    depth, in_string, escaped = 0, False, False
    room = limit
    while True:
        text, start = scan.text, scan.at
        size = len(text) if room is None else min(len(text), start + room)
        at = start
        end: End | None = None
        while at < size:
            if escaped:
                escaped = False
                at += 1
                continue
            found = (_INSIDE if in_string else _OUTSIDE).search(text, at, size)
            if found is None:
                at = size
                break
            at = found.end()
            match found[0]:
                case '"':
                    in_string = not in_string
                case "\\":
                    escaped = True
                case "\n":
                    end = "broken"
                    at -= 1
                case "{" | "[":
                    depth += 1
                case _:
                    depth -= 1
                    end = "complete" if depth == 0 else None
            if end is not None:
                break
        if at > start:
            deliver(scan.take(at))
        if end is not None:
            return end
        if room is not None:
            room -= at - start
            if room <= 0:
                return "broken"
        if scan.ended:
            return "cut"
        yield


def string(scan: Scan, *, limit: int = MAX_AHEAD) -> Reading[str | None]:
    """Read a JSON string, whose quote comes next, and return its value; None if it is none within `limit` characters."""
    if not (yield from scan.accept('"')):
        return None
    pieces: list[str] = ['"']
    size = 0
    while size <= limit:
        piece, marker = yield from scan.read_until(_STRING_END, limit - size)
        pieces += [piece, marker]
        size += len(piece) + 1
        if marker == '"':
            break
        if marker != "\\" or not (yield from scan.peek()):
            return None
        pieces.append(scan.take(scan.at + 1))
    else:
        return None
    try:
        value = _loads("".join(pieces).encode())
    except (msgspec.DecodeError, UnicodeError):
        return None
    return value if isinstance(value, str) else None


def scalar(scan: Scan) -> Reading[str | None]:
    """Read a number, true, false or null; None if there is none."""
    text = yield from scan.match(_SCALAR, _MAX_SCALAR)
    return text if text and is_json(text) else None


def skip_value(scan: Scan) -> Reading[bool]:
    """Read any value, which comes next; false if it is none or too long."""
    character = yield from scan.skip_space()
    if character in ("{", "["):
        return (yield from container(scan, lambda _: None, limit=MAX_AHEAD)) == "complete"
    if character == '"':
        return (yield from string(scan)) is not None
    return (yield from scalar(scan)) is not None


def value_of(text: str) -> Any:
    """:raises ValueError: if `text` is no JSON."""
    try:
        return _loads(text.encode())
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("no JSON") from error
