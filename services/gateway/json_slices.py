"""Finds the members of a large JSON object and the elements of a large array, in slices, without making objects of them. Pure.

    found = yield from members(body)                               {"model": Span, "prompt": Span}
    array = yield from elements(body, found["prompt"], limit=8192)     refuses nothing itself: look at `total`
    for piece in array.pieces: …                                   small elements together, a large one alone

Both are generators that yield about once a millisecond, so that whoever drives them can let others have a turn. A slice costs
the same whatever it holds (a few passes of numpy), so no body is more expensive than another of its size.

Only structure is looked at: quotes, brackets, commas and colons. What lies between them is for the decoder of a piece to check;
a piece that nobody decodes is not checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.protocol.errors import InvalidParameter

SLICE_BYTES = 64 * 1024
MAX_DEPTH = 64
MAX_MEMBERS = 1024
MAX_NAME_BYTES = 4096
MAX_BLANKS = 256 * 1024

_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_BLANKS = b" \t\r\n"
_OPEN, _CLOSE, _TO_CURLY = 0x7B, 0x7D, 0x20  # `[` and `]` are the curly ones but for this bit

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Work in steps: `next` until it returns a `_T`."""


class Span(NamedTuple):
    """body[start:end]."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class Elements(NamedTuple):
    """An array's elements. `total` is right up to the limit; beyond it, all that is known is that there are more.

    `pieces` cover the inside of the array, without the commas between them: each is at most two slices long, or one element.
    """

    total: int
    pieces: list[Span]


class _Slice(NamedTuple):
    """`commas` and `colons` are the positions of those at depth 1, counted from the object or array that is looked at."""

    commas: NDArray[np.intp]
    colons: NDArray[np.intp]


def members(body: bytes, span: Span | None = None) -> Steps[dict[str, Span]]:
    """The values of the object in `span` by name; of two with the same name the last.

    :raises InvalidParameter: if it is no object, has more than MAX_MEMBERS members, or is nested deeper than MAX_DEPTH.
    """
    span = _trimmed(body, span or Span(0, len(body)))
    if body[span.start : span.start + 1] != b"{":
        raise InvalidParameter("invalid body: expected a JSON object")
    commas: list[int] = []
    colons: list[int] = []
    for found in _structure(body, span):
        commas += found.commas.tolist()
        colons += found.colons.tolist()
        if len(colons) > MAX_MEMBERS or len(commas) > MAX_MEMBERS:
            raise InvalidParameter(f"the body has an object of more than {MAX_MEMBERS} members")
        yield
    ends = [*commas, span.end - 1]
    starts = [span.start, *commas]
    if not colons and not commas and not body[span.start + 1 : span.end - 1].strip():
        return {}
    if len(colons) != len(ends) or any(not start < colon < end for start, colon, end in zip(starts, colons, ends, strict=True)):
        raise _not_json()
    found_members: dict[str, Span] = {}
    for start, colon, end in zip(starts, colons, ends, strict=True):
        found_members[_name(body[start + 1 : colon])] = _trimmed(body, Span(colon + 1, end))
    return found_members


def elements(body: bytes, span: Span, *, limit: int) -> Steps[Elements]:
    """The elements of the array in `span`. Stops looking when there are more than `limit`.

    :raises InvalidParameter: if it is not an array, or is nested deeper than MAX_DEPTH.
    """
    span = _trimmed(body, span)
    if body[span.start : span.start + 1] != b"[":
        raise InvalidParameter("invalid body: expected an array")
    cuts: list[int] = [span.start]
    count = 1
    for found in _structure(body, span):
        commas = found.commas
        if len(commas):
            count += len(commas)
            cuts += [int(commas[0]), int(commas[-1])][: len(commas)]
            if count > limit:
                return Elements(count, [])
        yield
    cuts.append(span.end - 1)
    pieces = [_trimmed(body, Span(start + 1, end)) for start, end in itertools.pairwise(cuts)]
    if len(pieces) == 1 and not pieces[0].size:
        return Elements(0, [])
    if not all(piece.size for piece in pieces):
        raise _not_json()
    return Elements(count, pieces)


def _structure(body: bytes, span: Span) -> Generator[_Slice]:
    """Depth-1 commas and colons of the object or array in `span`, which begins and ends with its brackets."""
    data = np.frombuffer(body, np.uint8)
    depth = 0
    in_string = False
    backslashes = 0  # at the end of the slice before
    for at in range(span.start, span.end, SLICE_BYTES):
        chunk = data[at : min(at + SLICE_BYTES, span.end)]
        quotes = chunk == _QUOTE
        backslash = chunk == _BACKSLASH
        if backslashes or backslash.any():
            backslashes = _drop_escaped(quotes, backslash, backslashes)
        inside = np.bitwise_xor.accumulate(quotes)
        if in_string:
            inside = ~inside
        in_string = bool(inside[-1])
        outside = ~inside
        folded = chunk | _TO_CURLY
        opened = (folded == _OPEN) & outside
        closed = (folded == _CLOSE) & outside
        depths = depth + np.cumsum(opened.view(np.int8) - closed.view(np.int8), dtype=np.int32)
        depth = int(depths[-1])
        last = at + len(chunk) == span.end
        if int(depths.max()) > MAX_DEPTH:
            raise InvalidParameter("the body is nested too deeply")
        if int((depths[:-1] if last else depths).min(initial=1)) < 1 or (last and (depth != 0 or in_string)):
            raise _not_json()
        shallow = outside & (depths == 1)
        yield _Slice(
            np.flatnonzero(shallow & (chunk == _COMMA)) + at,
            np.flatnonzero(shallow & (chunk == _COLON)) + at,
        )


def _drop_escaped(quotes: NDArray[np.bool_], backslash: NDArray[np.bool_], before: int) -> int:
    """Clears quotes behind an odd run of backslashes, of which `before` precede the slice; returns the run at its end."""
    positions = np.arange(len(backslash), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(backslash, np.int32(-1), positions))
    run = np.where(last_other < 0, positions + 1 + before, positions - last_other)  # backslashes up to and with each byte
    escaped = np.empty_like(quotes)
    escaped[0] = before % 2 == 1
    escaped[1:] = run[:-1] % 2 == 1
    quotes &= ~escaped
    return int(run[-1])


def _name(raw: bytes) -> str:
    if len(raw) > MAX_NAME_BYTES:
        raise InvalidParameter(f"the body has an argument whose name is longer than {MAX_NAME_BYTES} bytes")
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json() from error


def _trimmed(body: bytes, span: Span) -> Span:
    """Without the white space around it.

    :raises InvalidParameter: if there is more than MAX_BLANKS of it.
    """
    head = body[span.start : min(span.end, span.start + MAX_BLANKS)]
    tail = body[max(span.start, span.end - MAX_BLANKS) : span.end]
    start = span.start + len(head) - len(head.lstrip(_BLANKS))
    end = span.end - len(tail) + len(tail.rstrip(_BLANKS))
    if span.size > MAX_BLANKS and (start == span.start + MAX_BLANKS or end == span.end - MAX_BLANKS):
        raise InvalidParameter(f"the body has {MAX_BLANKS} characters of white space in a row")
    return Span(start, max(start, end))


def _not_json() -> InvalidParameter:
    return InvalidParameter("the body is not valid JSON")
