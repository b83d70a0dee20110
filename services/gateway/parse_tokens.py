"""From the bytes of a body for `/tokenize` or `/detokenize` to a request, in steps as in `parse.py`. Pure."""

from __future__ import annotations

import msgspec

from common.protocol.errors import InvalidParameter
from services.gateway import arguments
from services.gateway.arguments import Notes, Scope, Table
from services.gateway.json_slices import Span, Steps
from services.gateway.objects import judged_members, large_text
from services.gateway.openai import ChatRequest, CompletionRequest
from services.gateway.parse import (
    SMALL_BYTES,
    check_messages,
    decode_object,
    decode_small_members,
    large_documents,
    large_ids,
    large_messages,
    large_tools,
)
from services.gateway.token_bodies import DetokenizeRequest, TokenizeRequest, check_tokenize

_REFUSED: Table = {
    "functions": ([],),
    "prompt_embeds": (),
    "suffix": ("",),
    "system": ("",),
    "truncate_prompt_tokens": (),
}
"""What would change a prompt. The other arguments of a generation say nothing of it."""

_IGNORED: Table = dict.fromkeys((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__), ()) | arguments.IGNORED

_TOKENIZE = Scope(TokenizeRequest.__struct_fields__, _REFUSED, _IGNORED)
_DETOKENIZE = Scope(DetokenizeRequest.__struct_fields__, {}, {})
TOKEN_SCOPES: dict[type[msgspec.Struct], Scope] = {TokenizeRequest: _TOKENIZE, DetokenizeRequest: _DETOKENIZE}
_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes, notes: Notes) -> Steps[TokenizeRequest]:
    """What is ignored is told to `notes`, which may refuse it.

    :raises InvalidParameter: naming the argument, for anything that a well-formed request does not have.
    """
    if len(body) <= SMALL_BYTES:
        request = decode_object(_tokenize, body, _TOKENIZE, notes)
        check_messages(request.messages or (), 0, 0)
    else:
        request = yield from _large_tokenize(body, notes)
    yield from check_tokenize(request)
    return request


def parse_detokenize(body: bytes, notes: Notes, *, max_tokens: int) -> Steps[DetokenizeRequest]:
    """As `parse_tokenize`.

    :raises ContextLengthExceeded: if there are more ids than `max_tokens`. :raises InvalidParameter: for any other mistake.
    """
    if len(body) <= SMALL_BYTES:
        return decode_object(_detokenize, body, _DETOKENIZE, notes)
    found = yield from judged_members(body, None, _DETOKENIZE, notes)
    request = decode_small_members(_detokenize, body, found, "tokens", b"[]", notes, _DETOKENIZE)
    if "tokens" not in found:
        raise InvalidParameter("tokens is missing", param="tokens")
    tokens = yield from large_ids(body, found["tokens"], max_tokens, "tokens")
    return msgspec.structs.replace(request, tokens=tokens)


def _large_tokenize(body: bytes, notes: Notes) -> Steps[TokenizeRequest]:
    found = yield from judged_members(body, None, _TOKENIZE, notes)
    found = {name: span for name, span in found.items() if not _is_null(body, span)}
    offered, shown = found.pop("tools", None), found.pop("documents", None)
    large, stand_in = ("messages", b"[]") if "messages" in found else ("prompt", b'""')
    request = decode_small_members(_tokenize, body, found, large, stand_in, notes, _TOKENIZE)
    others = {"tools": (yield from large_tools(body, offered)), "documents": (yield from large_documents(body, shown))}
    if large not in found:
        return msgspec.structs.replace(request, prompt=None, **others)
    if large == "prompt":
        prompt = yield from large_text(body, found["prompt"], "prompt")
        return msgspec.structs.replace(request, prompt=prompt, **others)
    messages = yield from large_messages(body, found["messages"], notes)
    return msgspec.structs.replace(request, messages=messages, **others)


def _is_null(body: bytes, span: Span) -> bool:
    return body[span.start : span.end] == b"null"
