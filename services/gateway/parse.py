"""From a body's bytes to a request, in steps: whatever a body holds, none of them takes more than a few milliseconds. Pure.

    steps = parse("chat", body, max_prompt_tokens=8191, notes=Notes())
    next(steps), next(steps), …  until StopIteration, whose value is the request

A body of up to SMALL_BYTES is decoded at once. In a larger one, members are found first (`json_slices`); what is not obeyed is
never decoded, all but `prompt` and `messages` must be small, and those two are decoded piece by piece and refused as soon as
they are known to be too long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import Raw

from common.protocol.errors import ContextLengthExceeded, InvalidParameter
from services.gateway import arguments, openai, tools
from services.gateway.arguments import Notes, Scope
from services.gateway.decoding import decode, joined, malformed
from services.gateway.json_slices import SLICE_BYTES, Span, Steps, elements, members
from services.gateway.openai import ChatMessage, ChatRequest, CompletionRequest, ContentPart, TokenId

SMALL_BYTES = 64 * 1024
_MAX_ESCAPE_BYTES = 12  # of one character: a surrogate pair of two \uXXXX
_TEXT_BYTES = 1024 * 1024  # of a string decoded at a time: one to two milliseconds
_CUT_SEARCH = 64
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_HEAD_BYTES = 80

_CHAT = Scope(ChatRequest.__struct_fields__, arguments.REFUSED, arguments.IGNORED)
_COMPLETION = Scope(CompletionRequest.__struct_fields__, arguments.REFUSED, arguments.IGNORED)
_STREAM_OPTIONS = Scope(openai.StreamOptions.__struct_fields__, {}, arguments.IGNORED, "stream_options.")
_MESSAGE = Scope(ChatMessage.__struct_fields__, arguments.MESSAGE_REFUSED, arguments.MESSAGE_IGNORED, "messages[].")
_PART = Scope(
    ContentPart.__struct_fields__,
    arguments.PART_REFUSED,
    arguments.PART_IGNORED,
    "messages[].content[].",
    "content with {} is not supported yet: send text",
)
SCOPES: dict[type[msgspec.Struct], Scope] = {ChatRequest: _CHAT, CompletionRequest: _COMPLETION}
SCOPES |= {openai.StreamOptions: _STREAM_OPTIONS, ChatMessage: _MESSAGE, ContentPart: _PART}
"""Every type that something in a body is decoded with, and how the rest of the object is judged."""

_T = TypeVar("_T")
_shallow = msgspec.json.Decoder(dict[str, Raw])
_shallow_list = msgspec.json.Decoder(list[Raw])
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_messages = msgspec.json.Decoder(list[ChatMessage])
_message = msgspec.json.Decoder(ChatMessage)
_parts = msgspec.json.Decoder(list[ContentPart])
_objects = msgspec.json.Decoder(list[dict[str, Any]])
_text = msgspec.json.Decoder(str)
_ids = msgspec.json.Decoder(list[TokenId])
_entries = msgspec.json.Decoder(list[str | TokenId | list[TokenId]])


def parse(
    kind: Literal["chat", "completion"], body: bytes, *, max_prompt_tokens: int, notes: Notes
) -> Steps[ChatRequest | CompletionRequest]:
    """What is ignored is told to `notes`, which may refuse it.

    :raises InvalidParameter: naming the argument, for anything that a well-formed request does not have.
    :raises ContextLengthExceeded: if the prompt holds more token ids than `max_prompt_tokens`.
    """
    if kind == "chat":
        request = _parse_chat(body, notes) if len(body) <= SMALL_BYTES else (yield from _parse_large_chat(body, notes))
        openai.check_chat(request)
        return request
    if len(body) <= SMALL_BYTES:
        completion = cast(CompletionRequest, decode_object(_completion, body, _COMPLETION, notes))
    else:
        completion = yield from _parse_large_completion(body, max_prompt_tokens, notes)
    openai.check_completion(completion)
    return completion


# ── small bodies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parse_chat(body: bytes, notes: Notes) -> ChatRequest:
    request = cast(ChatRequest, decode_object(_chat, body, _CHAT, notes))
    if not request.messages:
        raise InvalidParameter("messages is empty: send at least one message", param="messages")
    check_messages(request.messages, 0, 0)
    return request


def decode_object(decoder: msgspec.json.Decoder[_T], body: bytes, scope: Scope, notes: Notes) -> _T:
    """The request in `body`. Only one with unknown fields in its inner objects is decoded twice."""
    found = decode(_shallow, body)
    for name, raw in found.items():
        if name not in scope.obeyed:
            notes.judge(scope, name, raw)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not openai.is_unknown_field(error):
            raise openai.explain(error) from error
    except Exception as error:
        raise malformed(error) from error
    known = {name: raw for name, raw in found.items() if name in scope.obeyed}
    if (options := known.get("stream_options")) is not None:
        known["stream_options"] = Raw(_cleaned(options, _STREAM_OPTIONS, notes, "stream_options"))
    if (messages := known.get("messages")) is not None:
        known["messages"] = Raw(_cleaned_messages(messages, notes, 0))
    return decode(decoder, joined(known))


def _cleaned(raw: Raw, scope: Scope, notes: Notes, place: str) -> bytes:
    """An object without what `scope` does not obey; anything else as it is."""
    if bytes(memoryview(raw)[:1]) != b"{":
        return bytes(raw)
    found = decode(_shallow, raw)
    for name, value in found.items():
        if name not in scope.obeyed:
            notes.judge(scope, name, value, place=place)
    return joined({name: value for name, value in found.items() if name in scope.obeyed})


def _cleaned_messages(raw: Raw | bytes, notes: Notes, first: int) -> bytes:
    """A list of messages without unknown fields. `first` is the number of the first one."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return bytes(raw)
    cleaned: list[bytes] = []
    for index, message in enumerate(decode(_shallow_list, raw), start=first):
        place = f"messages[{index}]"
        known = _cleaned(message, _MESSAGE, notes, place)
        fields = decode(_shallow, known) if known[:1] == b"{" else {}
        content = fields.get("content")
        if content is not None and bytes(memoryview(content)[:1]) == b"[":
            parts = [_cleaned(part, _PART, notes, f"{place}.content") for part in decode(_shallow_list, content)]
            known = joined({**fields, "content": b"[" + b",".join(parts) + b"]"})
        cleaned.append(known)
    return b"[" + b",".join(cleaned) + b"]"


def check_messages(messages: Iterable[ChatMessage], first: int, parts: int) -> int:
    """Returns how many parts there are, with `parts` of the messages before."""
    index = first
    for index, message in enumerate(messages, start=first):
        parts += openai.check_message(message, index)
    if index >= openai.MAX_MESSAGES:
        raise _too_many_messages()
    if parts > openai.MAX_PARTS:
        raise _too_many_parts()
    return parts


# ── large bodies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parse_large_completion(body: bytes, max_prompt_tokens: int, notes: Notes) -> Steps[CompletionRequest]:
    found = yield from judged_members(body, None, _COMPLETION, notes)
    request = cast(CompletionRequest, decode_small_members(_completion, body, found, "prompt", b'""', notes, _COMPLETION))
    if "prompt" not in found:
        raise InvalidParameter("prompt is missing", param="prompt")
    prompt = yield from _prompt(body, found["prompt"], max_prompt_tokens)
    return msgspec.structs.replace(request, prompt=prompt)


def _parse_large_chat(body: bytes, notes: Notes) -> Steps[ChatRequest]:
    found = yield from judged_members(body, None, _CHAT, notes)
    offered = found.pop("tools", None)
    request = cast(ChatRequest, decode_small_members(_chat, body, found, "messages", b"[]", notes, _CHAT))
    if "messages" not in found:
        raise InvalidParameter("messages is missing", param="messages")
    messages = yield from large_messages(body, found["messages"], notes)
    if not messages:
        raise InvalidParameter("messages is empty: send at least one message", param="messages")
    objects = yield from large_tools(body, offered)
    return msgspec.structs.replace(request, messages=messages, tools=objects)


def large_tools(body: bytes, span: Span | None) -> Steps[list[dict[str, Any]] | None]:
    """The tools of a large body; None if there are none."""
    if span is None or body[span.start : span.end] == b"null":
        return None
    if span.size > tools.MAX_TOOLS_BYTES:
        raise InvalidParameter(f"tools is larger than {tools.MAX_TOOLS_BYTES} bytes", param="tools")
    return (yield from _large_objects(body, span, "tools", tools.MAX_TOOLS, tools.MAX_TOOL_BYTES, tools.too_many_tools))


def _large_objects(
    body: bytes, span: Span, place: str, limit: int, max_bytes: int, too_many: Callable[[], InvalidParameter]
) -> Steps[list[dict[str, Any]]]:
    """An array of at most `limit` objects of at most `max_bytes` each, decoded in pieces."""
    if body[span.start : span.start + 1] != b"[":
        raise InvalidParameter(f"invalid {place}: expected an array", param=place)
    array = yield from elements(body, span, limit=limit)
    if array.total > limit:
        raise too_many()
    objects: list[dict[str, Any]] = []
    for piece in array.pieces:
        if piece.size > max(max_bytes, 2 * SLICE_BYTES):
            raise InvalidParameter(f"{place} has an entry of more than {max_bytes} bytes", param=place)
        objects += decode(_objects, b"[" + body[piece.start : piece.end] + b"]", place=place, first=len(objects))
        yield
    return objects


def judged_members(body: bytes, span: Span | None, scope: Scope, notes: Notes, place: str = "") -> Steps[dict[str, Span]]:
    """The members that `scope` obeys."""
    found = yield from members(body, span)
    for name, value in found.items():
        if name not in scope.obeyed:
            notes.judge(scope, name, _head(body, value), place=place)
    return {name: value for name, value in found.items() if name in scope.obeyed}


def _head(body: bytes, span: Span) -> bytes:
    return body[span.start : min(span.end, span.start + _HEAD_BYTES)]


def decode_small_members(
    decoder: msgspec.json.Decoder[_T],
    body: bytes,
    found: Mapping[str, Span],
    large: str,
    stand_in: bytes,
    notes: Notes,
    scope: Scope,
) -> _T:
    """The request with `stand_in` in the place of its one large member."""
    others = {name: span for name, span in found.items() if name != large}
    if sum(span.size for span in others.values()) > SMALL_BYTES:
        largest = max(others, key=lambda name: others[name].size)
        raise InvalidParameter(f"{largest} is too large", param=largest)
    small: dict[str, bytes] = {name: body[span.start : span.end] for name, span in others.items()}
    return decode_object(decoder, joined({**small, large: stand_in}), scope, notes)


def _prompt(body: bytes, span: Span, max_tokens: int) -> Steps[str | list[Any]]:
    kind = body[span.start : span.start + 1]
    if kind == b'"':
        return (yield from large_text(body, span, "prompt"))
    if kind != b"[":
        raise InvalidParameter("invalid prompt: expected a string or an array", param="prompt")
    array = yield from elements(body, span, limit=max(max_tokens, openai.MAX_CHOICES))
    inner = body[span.start + 1 : span.start + _HEAD_BYTES].lstrip()[:1]
    if inner not in (b'"', b"[") and array.total > max_tokens:
        raise _too_many_ids(max_tokens)
    if inner in (b'"', b"[") and array.total > openai.MAX_CHOICES:
        raise InvalidParameter(f"prompt has more than {openai.MAX_CHOICES} entries", param="prompt")
    prompt: list[Any] = []
    for piece in array.pieces:
        if piece.size <= 2 * SLICE_BYTES:
            prompt += decode(_entries, b"[" + body[piece.start : piece.end] + b"]", place="prompt", first=len(prompt))
        elif body[piece.start : piece.start + 1] == b"[":
            prompt.append((yield from large_ids(body, piece, max_tokens)))
        else:
            prompt.append((yield from large_text(body, piece, "prompt")))
        yield
    return prompt


def large_text(body: bytes, span: Span, place: str) -> Steps[str]:
    """A string, decoded in pieces."""
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


def large_ids(body: bytes, span: Span, max_tokens: int, place: str = "prompt") -> Steps[list[int]]:
    """An array of at most `max_tokens` token ids, decoded in pieces."""
    if body[span.start : span.start + 1] != b"[":
        raise InvalidParameter(f"invalid {place}: expected an array", param=place)
    array = yield from elements(body, span, limit=max_tokens)
    if array.total > max_tokens:
        raise _too_many_ids(max_tokens, place)
    ids: list[int] = []
    for piece in array.pieces:
        if piece.size > 2 * SLICE_BYTES:
            raise InvalidParameter(f"invalid {place}: expected token ids", param=place)
        ids += decode(_ids, b"[" + body[piece.start : piece.end] + b"]", place=place, first=len(ids))
        yield
    return ids


def large_messages(body: bytes, span: Span, notes: Notes) -> Steps[list[ChatMessage]]:
    if body[span.start : span.start + 1] != b"[":
        raise InvalidParameter("invalid messages: expected an array", param="messages")
    array = yield from elements(body, span, limit=openai.MAX_MESSAGES)
    if array.total > openai.MAX_MESSAGES:
        raise _too_many_messages()
    messages: list[ChatMessage] = []
    parts = 0
    for piece in array.pieces:
        if piece.size <= 2 * SLICE_BYTES:
            more = _decode_messages(b"[" + body[piece.start : piece.end] + b"]", notes, len(messages))
        else:
            more = [(yield from _large_message(body, piece, notes, f"messages[{len(messages)}]"))]
        parts = check_messages(more, len(messages), parts)
        messages += more
        yield
    return messages


def _decode_messages(raw: bytes, notes: Notes, first: int) -> list[ChatMessage]:
    try:
        return _messages.decode(raw)
    except msgspec.ValidationError as error:
        if not openai.is_unknown_field(error):
            raise openai.explain(error, place="messages", first=first) from error
    except Exception as error:
        raise malformed(error) from error
    return decode(_messages, _cleaned_messages(raw, notes, first), place="messages", first=first)


def _large_message(body: bytes, span: Span, notes: Notes, place: str) -> Steps[ChatMessage]:
    if body[span.start : span.start + 1] != b"{":
        raise InvalidParameter(f"{place} must be an object with a role and a content", param=place)
    found = yield from judged_members(body, span, _MESSAGE, notes, place)
    content, calls = found.pop("content", None), found.pop("tool_calls", None)
    message = decode(_message, joined({name: body[at.start : at.end] for name, at in found.items()}), place=place)
    if calls is not None and body[calls.start : calls.end] != b"null":

        def too_many() -> InvalidParameter:
            return tools.too_many_calls(place)

        limit, size = tools.MAX_CALLS, tools.MAX_CALL_BYTES
        objects = yield from _large_objects(body, calls, f"{place}.tool_calls", limit, size, too_many)
        message = msgspec.structs.replace(message, tool_calls=objects)
    if content is None or body[content.start : content.end] == b"null":
        return message
    if body[content.start : content.start + 1] != b"[":
        text = yield from large_text(body, content, f"{place}.content")
        return msgspec.structs.replace(message, content=text)
    array = yield from elements(body, content, limit=openai.MAX_PARTS)
    if array.total > openai.MAX_PARTS:
        raise _too_many_parts()
    parts: list[ContentPart] = []
    for piece in array.pieces:
        if piece.size <= 2 * SLICE_BYTES:
            parts += _decode_parts(b"[" + body[piece.start : piece.end] + b"]", notes, f"{place}.content")
        else:
            part = yield from judged_members(body, piece, _PART, notes, f"{place}.content")
            fields = {name: body[at.start : at.end] for name, at in part.items()}
            parts += decode(_parts, b"[" + joined(fields) + b"]", place=f"{place}.content")
        yield
    return msgspec.structs.replace(message, content=parts)


def _decode_parts(raw: bytes, notes: Notes, place: str) -> list[ContentPart]:
    try:
        return _parts.decode(raw)
    except msgspec.ValidationError as error:
        if not openai.is_unknown_field(error):
            raise openai.explain(error, place=place) from error
    except Exception as error:
        raise malformed(error) from error
    cleaned = [_cleaned(part, _PART, notes, place) for part in decode(_shallow_list, raw)]
    return decode(_parts, b"[" + b",".join(cleaned) + b"]", place=place)


# ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _too_many_ids(limit: int, place: str = "prompt") -> ContextLengthExceeded:
    what = "the prompt has" if place == "prompt" else f"{place} has"
    return ContextLengthExceeded(f"{what} more than {limit} tokens; at most {limit} fit", param=place)


def _too_many_messages() -> InvalidParameter:
    return InvalidParameter(f"messages has more than {openai.MAX_MESSAGES} entries", param="messages")


def _too_many_parts() -> InvalidParameter:
    return InvalidParameter(f"messages have more than {openai.MAX_PARTS} content parts", param="messages")
