"""Objects of a body that are decoded strictly, whatever their size, and what else of a large body is decoded in steps. Pure.

    MESSAGES = Objects(ChatMessage, scope, limit=8192, texts=("content",), lists={"content": PARTS})

A small array or object is decoded at once; only one with unknown members, which are judged by `scope`, is decoded twice. A
large one is decoded in pieces, so no step takes more than a few milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from common.protocol.errors import InvalidParameter
from services.gateway import json_slices, openai
from services.gateway.arguments import Notes, Scope
from services.gateway.decoding import decode, joined, malformed
from services.gateway.json_slices import Span, Steps, elements, members

_MAX_ESCAPE_BYTES = 12  # of one character: a surrogate pair of two \uXXXX
_TEXT_BYTES = 1024 * 1024  # of a string decoded at a time: one to two milliseconds
_CUT_SEARCH = 64
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_HEAD_BYTES = 80
_MAX_SMALL_BYTES = 128 * 1024  # of the members of an object that are decoded together

_T = TypeVar("_T")
_shallow = msgspec.json.Decoder(dict[str, Raw])
_shallow_list = msgspec.json.Decoder(list[Raw])
_free = msgspec.json.Decoder(list[dict[str, Any]])
_text = msgspec.json.Decoder(str)


class FreeObjects(NamedTuple):
    """An array of at most `limit` objects of any form, of at most `max_bytes` each and `max_total` together. `too_many`: the
    error, by place."""

    limit: int
    max_bytes: int
    max_total: int
    too_many: Callable[[str], InvalidParameter]


def _never_too_many(place: str) -> InvalidParameter:
    return InvalidParameter(f"{place} has too many entries", param=place)


class Objects(Generic[_T]):
    """Objects of one kind. `kind` is a struct that forbids unknown members.

    `limit`: of an array. `texts`: members that may be long texts. `lists`: those that may be arrays of other objects. `free`:
    arrays of free objects. `inner`: single objects, which are small. `required`: what stands for members that are read apart.
    `numbered`: errors name an object by its number.
    """

    def __init__(
        self,
        kind: type[_T],
        scope: Scope,
        *,
        limit: int = 0,
        too_many: Callable[[str], InvalidParameter] = _never_too_many,
        texts: Collection[str] = (),
        lists: Mapping[str, Objects[Any]] | None = None,
        free: Mapping[str, FreeObjects] | None = None,
        inner: Mapping[str, Scope] | None = None,
        required: Mapping[str, bytes] | None = None,
        numbered: bool = True,
    ) -> None:
        self.scope = scope
        self.limit = limit
        self.too_many = too_many
        self._texts = texts
        self._lists = lists or {}
        self._free = free or {}
        self._inner = inner or {}
        self._required = required or {}
        self._numbered = numbered
        self._one = msgspec.json.Decoder(kind)
        many: Any = list[kind]
        self._many: msgspec.json.Decoder[list[_T]] = msgspec.json.Decoder(many)

    # -- small

    def one(self, raw: bytes, notes: Notes, place: str = "") -> _T:
        """Decode one object."""
        try:
            return self._one.decode(raw)
        except msgspec.ValidationError as error:
            if not openai.is_unknown_field(error) and not openai.is_float_for_integer(error):
                raise openai.explain(error, place=place) from error
        except Exception as error:
            raise malformed(error) from error
        return decode(self._one, self.cleaned(raw, notes, place), place=place)

    def many(self, raw: bytes, notes: Notes, place: str, first: int = 0) -> list[_T]:
        """Decode an array, whose first element is number `first` of those at `place`."""
        try:
            return self._many.decode(raw)
        except msgspec.ValidationError as error:
            if not openai.is_unknown_field(error):
                raise openai.explain(error, place=place, first=first) from error
        except Exception as error:
            raise malformed(error) from error
        return decode(self._many, self.cleaned_many(raw, notes, place, first), place=place, first=first)

    def cleaned(self, raw: Raw | bytes, notes: Notes, place: str) -> bytes:
        """An object without what `scope` does not obey; anything else as it is."""
        known = cleaned(raw, self.scope, notes, place)
        if known[:1] != b"{" or not (self._lists or self._inner):
            return known
        fields = decode(_shallow, known)
        for name, value in fields.items():
            inside = f"{place}.{name}".lstrip(".")
            if name in self._lists and _begins(value, b"["):
                fields[name] = Raw(self._lists[name].cleaned_many(value, notes, inside))
            elif name in self._inner:
                fields[name] = Raw(cleaned(value, self._inner[name], notes, inside))
        return joined(fields)

    def cleaned_many(self, raw: Raw | bytes, notes: Notes, place: str, first: int = 0) -> bytes:
        """An array of objects without what `scope` does not obey; anything else as it is."""
        if not _begins(raw, b"["):
            return bytes(raw)
        found = enumerate(decode(_shallow_list, raw), start=first)
        return b"[" + b",".join([self.cleaned(item, notes, self._place(place, number)) for number, item in found]) + b"]"

    # -- large

    def large_many(
        self, body: bytes, span: Span, notes: Notes, place: str, check: Callable[[list[_T], int], None] | None = None
    ) -> Steps[list[_T]]:
        """Decode an array in steps. `check` is called with each piece and the number of its first object.

        :raises InvalidParameter: it is no array, has too many objects, or a wrong one.
        """
        if body[span.start : span.start + 1] != b"[":
            raise InvalidParameter(f"invalid {place}: expected an array", param=place)
        array = yield from elements(body, span, limit=self.limit)
        if array.total > self.limit:
            raise self.too_many(place)
        objects: list[_T] = []
        for piece in array.pieces:
            if piece.size <= 2 * json_slices.SLICE_BYTES:
                more = self.many(b"[" + body[piece.start : piece.end] + b"]", notes, place, len(objects))
            else:
                more = [(yield from self.large(body, piece, notes, self._place(place, len(objects))))]
            if check is not None:
                check(more, len(objects))
            objects += more
            yield
        return objects

    def large(self, body: bytes, span: Span | None, notes: Notes, place: str = "") -> Steps[_T]:
        """Decode one object in steps; `span` None is the whole body.

        :raises InvalidParameter: it is no object, or has a wrong member.
        """
        if span is not None and body[span.start : span.start + 1] != b"{":
            raise InvalidParameter(f"{place} must be an object", param=place)
        found = yield from judged_members(body, span, self.scope, notes, place)
        apart = {name: at for name, at in found.items() if self._is_apart(body, name, at)}
        small = {name: at for name, at in found.items() if name not in apart}
        if sum(at.size for at in small.values()) > _MAX_SMALL_BYTES:
            largest = max(small, key=lambda name: small[name].size)
            inside = f"{place}.{largest}".lstrip(".")
            raise InvalidParameter(f"{inside} is too large", param=inside)
        raw = {name: body[at.start : at.end] for name, at in small.items()}
        raw |= {name: self._required[name] for name in apart if name in self._required}
        value = self.one(joined(raw), notes, place)
        changes: dict[str, Any] = {}
        for name, at in apart.items():
            inside = f"{place}.{name}".lstrip(".")
            if body[at.start : at.start + 1] == b'"':
                changes[name] = yield from large_text(body, at, inside)
            elif name in self._lists:
                changes[name] = yield from self._lists[name].large_many(body, at, notes, inside)
            else:
                changes[name] = yield from large_objects(body, at, inside, self._free[name])
        return msgspec.structs.replace(value, **changes) if changes else value  # pyright: ignore[reportArgumentType, reportCallIssue]

    def _is_apart(self, body: bytes, name: str, at: Span) -> bool:
        """Whether a member is decoded in steps of its own."""
        kind = body[at.start : at.start + 1]
        return (kind == b'"' and name in self._texts) or (kind == b"[" and (name in self._lists or name in self._free))

    def _place(self, place: str, number: int) -> str:
        return f"{place}[{number}]" if self._numbered else place


def cleaned(raw: Raw | bytes, scope: Scope, notes: Notes, place: str) -> bytes:
    """An object without what `scope` does not obey; anything else as it is."""
    if not _begins(raw, b"{"):
        return bytes(raw)
    found = decode(_shallow, raw)
    for name, value in found.items():
        if name not in scope.obeyed:
            notes.judge(scope, name, value, place=place)
    return joined({name: value for name, value in found.items() if name in scope.obeyed})


def judged_members(body: bytes, span: Span | None, scope: Scope, notes: Notes, place: str = "") -> Steps[dict[str, Span]]:
    """The members that `scope` obeys."""
    found = yield from members(body, span)
    for name, value in found.items():
        if name not in scope.obeyed:
            notes.judge(scope, name, body[value.start : min(value.end, value.start + _HEAD_BYTES)], place=place)
    return {name: value for name, value in found.items() if name in scope.obeyed}


def large_objects(body: bytes, span: Span, place: str, kind: FreeObjects) -> Steps[list[dict[str, Any]]]:
    """Return an array of free objects, decoded in pieces.

    :raises InvalidParameter: it is no array of objects, or is too large.
    """
    if body[span.start : span.start + 1] != b"[":
        raise InvalidParameter(f"invalid {place}: expected an array", param=place)
    if span.size > kind.max_total:
        raise InvalidParameter(f"{place} is larger than {kind.max_total} bytes", param=place)
    array = yield from elements(body, span, limit=kind.limit)
    if array.total > kind.limit:
        raise kind.too_many(place)
    objects: list[dict[str, Any]] = []
    for piece in array.pieces:
        if piece.size > max(kind.max_bytes, 2 * json_slices.SLICE_BYTES):
            raise InvalidParameter(f"{place} has an entry of more than {kind.max_bytes} bytes", param=place)
        objects += decode(_free, b"[" + body[piece.start : piece.end] + b"]", place=place, first=len(objects))
        yield
    return objects


def large_text(body: bytes, span: Span, place: str) -> Steps[str]:
    """Return a string, decoded in pieces.

    :raises InvalidParameter: it is none.
    """
    if body[span.start : span.start + 1] != b'"' or body[span.end - 1 : span.end] != b'"' or span.size < 2:
        raise InvalidParameter(f"invalid {place}: expected a string", param=place)
    pieces: list[str] = []
    at, end = span.start + 1, span.end - 1
    while at < end:
        cut = _safe_cut(body, at, end)
        pieces.append(decode(_text, b'"' + body[at:cut] + b'"', place=place))
        at = cut
        yield
    return "".join(pieces)


def _safe_cut(body: bytes, at: int, end: int) -> int:
    """Where a string that was cut at `at` may be cut again, _TEXT_BYTES on: not inside a character or an escape."""
    wanted = at + _TEXT_BYTES
    if wanted >= end:
        return end
    for cut in range(wanted, max(at, wanted - _CUT_SEARCH), -1):
        if body[cut : cut + 1] == b"\\":
            before = body[at:cut]
            backslashes = len(before) - len(before.rstrip(b"\\"))
            if backslashes % 2 == 0 and not _HIGH_SURROGATE.fullmatch(before[-6:]):
                return cut
        elif body[cut] & 0xC0 != 0x80 and b"\\" not in body[cut - _MAX_ESCAPE_BYTES : cut]:
            return cut
    return end


def _begins(raw: Raw | bytes, bracket: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == bracket
