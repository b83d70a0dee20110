"""From a body's bytes to a request, in steps: whatever a body holds, none of them takes more than a few milliseconds. Pure.

    steps = parse("chat", body, max_prompt_tokens=8191, notes=Notes())
    next(steps), next(steps), …  until StopIteration, whose value is the request

A body of up to SMALL_BYTES is decoded at once. In a larger one, members are found first (`json_slices`); what is not obeyed is
never decoded, all but `prompt` and `messages` must be small, and those two are decoded piece by piece and refused as soon as
they are known to be too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import Raw

from common.protocol.errors import ContextLengthExceeded, InvalidParameter
from services.gateway import arguments, openai, tools
from services.gateway.arguments import Notes, Scope
from services.gateway.decoding import decode, joined, malformed
from services.gateway.json_slices import SLICE_BYTES, Span, Steps, elements
from services.gateway.objects import FreeObjects, Objects, cleaned, judged_members, large_objects, large_text
from services.gateway.openai import ChatMessage, ChatRequest, CompletionRequest, ContentPart, TokenId

SMALL_BYTES = 64 * 1024
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
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_ids = msgspec.json.Decoder(list[TokenId])
_entries = msgspec.json.Decoder(list[str | TokenId | list[TokenId]])


def _too_many_messages(_: str = "") -> InvalidParameter:
    return InvalidParameter(f"messages has more than {openai.MAX_MESSAGES} entries", param="messages")


def _too_many_parts(_: str = "") -> InvalidParameter:
    return InvalidParameter(f"messages have more than {openai.MAX_PARTS} content parts", param="messages")


TOOLS = FreeObjects(tools.MAX_TOOLS, tools.MAX_TOOL_BYTES, tools.MAX_TOOLS_BYTES, lambda _: tools.too_many_tools())
_DOCUMENTS = FreeObjects(openai.MAX_DOCUMENTS, openai.MAX_DOCUMENT_BYTES, openai.MAX_DOCUMENTS_BYTES, openai.too_many_documents)
_CALLS = FreeObjects(
    tools.MAX_CALLS,
    tools.MAX_CALL_BYTES,
    tools.MAX_CALLS * tools.MAX_CALL_BYTES,
    lambda place: tools.too_many_calls(place.rsplit(".", 1)[0]),
)
_PARTS = Objects(ContentPart, _PART, limit=openai.MAX_PARTS, too_many=_too_many_parts, texts=("text",), numbered=False)
_MESSAGES = Objects(
    ChatMessage,
    _MESSAGE,
    limit=openai.MAX_MESSAGES,
    too_many=_too_many_messages,
    texts=("content", "reasoning_content", "reasoning"),
    lists={"content": _PARTS},
    free={"tool_calls": _CALLS},
)


def parse(
    kind: Literal["chat", "completion"], body: bytes, *, max_prompt_tokens: int, notes: Notes
) -> Steps[ChatRequest | CompletionRequest]:
    """What is ignored is told to `notes`, which may refuse it.

    :raises InvalidParameter: naming the argument, for anything that a well-formed request does not have.
    :raises ContextLengthExceeded: if the prompt holds more token ids than `max_prompt_tokens`.
    """
    if kind == "chat":
        request = _parse_chat(body, notes) if len(body) <= SMALL_BYTES else (yield from _parse_large_chat(body, notes))
        yield from openai.check_chat(request)
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
    """The request in `body`. Only one with unknown fields in its inner objects, or 8.0 for 8, is decoded twice."""
    found = decode(_shallow, body)
    for name, raw in found.items():
        if name not in scope.obeyed:
            notes.judge(scope, name, raw)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not openai.is_unknown_field(error) and not openai.is_float_for_integer(error):
            raise openai.explain(error) from error
    except Exception as error:
        raise malformed(error) from error
    known = {name: raw for name, raw in found.items() if name in scope.obeyed}
    if (options := known.get("stream_options")) is not None:
        known["stream_options"] = Raw(cleaned(options, _STREAM_OPTIONS, notes, "stream_options"))
    if (messages := known.get("messages")) is not None:
        known["messages"] = Raw(_MESSAGES.cleaned_many(messages, notes, "messages"))
    return decode(decoder, joined(known))


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
    _leave_large_prediction(found, "prompt", notes)
    request = cast(CompletionRequest, decode_small_members(_completion, body, found, "prompt", b'""', notes, _COMPLETION))
    if "prompt" not in found:
        raise InvalidParameter("prompt is missing", param="prompt")
    prompt = yield from text_or_ids(body, found["prompt"], max_prompt_tokens)
    return msgspec.structs.replace(request, prompt=prompt)


def _parse_large_chat(body: bytes, notes: Notes) -> Steps[ChatRequest]:
    found = yield from judged_members(body, None, _CHAT, notes)
    offered, shown = found.pop("tools", None), found.pop("documents", None)
    _leave_large_prediction(found, "messages", notes)
    request = cast(ChatRequest, decode_small_members(_chat, body, found, "messages", b"[]", notes, _CHAT))
    if "messages" not in found:
        raise InvalidParameter("messages is missing", param="messages")
    messages = yield from large_messages(body, found["messages"], notes)
    if not messages:
        raise InvalidParameter("messages is empty: send at least one message", param="messages")
    tools = yield from large_tools(body, offered)
    documents = yield from large_documents(body, shown)
    return msgspec.structs.replace(request, messages=messages, tools=tools, documents=documents)


def _leave_large_prediction(found: dict[str, Span], large: str, notes: Notes) -> None:
    """Leave out a prediction that is too large to be decoded at once with all members but `large`. It changes only how fast an
    answer comes, so this is no error."""
    if (span := found.get("prediction")) is None:
        return
    together = sum(one.size for name, one in found.items() if name != large)
    if span.size > openai.MAX_PREDICTION_BYTES or together > SMALL_BYTES:
        del found["prediction"]
        notes.note("prediction", "larger than is looked up")


def large_tools(body: bytes, span: Span | None) -> Steps[list[dict[str, Any]] | None]:
    """The tools of a large body; None if there are none."""
    return (yield from _large_objects(body, span, "tools", TOOLS))


def large_documents(body: bytes, span: Span | None) -> Steps[list[dict[str, Any]] | None]:
    """The documents of a large body; None if there are none."""
    return (yield from _large_objects(body, span, "documents", _DOCUMENTS))


def _large_objects(body: bytes, span: Span | None, name: str, kind: FreeObjects) -> Steps[list[dict[str, Any]] | None]:
    if span is None or body[span.start : span.end] == b"null":
        return None
    return (yield from large_objects(body, span, name, kind))


def decode_small_members(
    decoder: msgspec.json.Decoder[_T],
    body: bytes,
    found: Mapping[str, Span],
    large: str,
    stand_in: bytes,
    notes: Notes,
    scope: Scope,
) -> _T:
    """Return the request with `stand_in` in the place of its one large member.

    :raises InvalidParameter: another member is wrong, or they are too large together.
    """
    others = {name: span for name, span in found.items() if name != large}
    if sum(span.size for span in others.values()) > SMALL_BYTES:
        largest = max(others, key=lambda name: others[name].size)
        raise InvalidParameter(f"{largest} is too large", param=largest)
    small: dict[str, bytes] = {name: body[span.start : span.end] for name, span in others.items()}
    return decode_object(decoder, joined({**small, large: stand_in}), scope, notes)


def text_or_ids(
    body: bytes, span: Span, max_tokens: int, *, place: str = "prompt", limit: int = openai.MAX_CHOICES
) -> Steps[str | list[Any]]:
    """Return a string, strings, token ids or lists of them, decoded in pieces; at most `limit` strings or lists.

    :raises InvalidParameter: it is none of these. :raises ContextLengthExceeded: there are more ids than `max_tokens`.
    """
    kind = body[span.start : span.start + 1]
    if kind == b'"':
        return (yield from large_text(body, span, place))
    if kind != b"[":
        raise InvalidParameter(f"invalid {place}: expected a string or an array", param=place)
    array = yield from elements(body, span, limit=max(max_tokens, limit))
    inner = body[span.start + 1 : span.start + _HEAD_BYTES].lstrip()[:1]
    if inner not in (b'"', b"[") and array.total > max_tokens:
        raise _too_many_ids(max_tokens, place)
    if inner in (b'"', b"[") and array.total > limit:
        raise InvalidParameter(f"{place} has more than {limit} entries", param=place)
    prompt: list[Any] = []
    for piece in array.pieces:
        if piece.size <= 2 * SLICE_BYTES:
            prompt += decode(_entries, b"[" + body[piece.start : piece.end] + b"]", place=place, first=len(prompt))
        elif body[piece.start : piece.start + 1] == b"[":
            prompt.append((yield from large_ids(body, piece, max_tokens, place)))
        else:
            prompt.append((yield from large_text(body, piece, place)))
        yield
    return prompt


def large_ids(body: bytes, span: Span, max_tokens: int, place: str = "prompt") -> Steps[list[int]]:
    """Return an array of at most `max_tokens` token ids, decoded in pieces.

    :raises InvalidParameter: it is none. :raises ContextLengthExceeded: there are more.
    """
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
    parts = 0

    def check(messages: list[ChatMessage], first: int) -> None:
        nonlocal parts
        parts = check_messages(messages, first, parts)

    return (yield from _MESSAGES.large_many(body, span, notes, "messages", check))


# ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _too_many_ids(limit: int, place: str = "prompt") -> ContextLengthExceeded:
    what = "the prompt has" if place == "prompt" else f"{place} has"
    return ContextLengthExceeded(f"{what} more than {limit} tokens; at most {limit} fit", param=place)
