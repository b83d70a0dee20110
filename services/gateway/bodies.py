"""The JSON of answers: chunks of a stream and errors, as OpenAI spells them (whole bodies: `whole.py`). Pure.

A chunk is sent for (nearly) every token of every stream, and all of it but the new text is known when the request begins:
`ChunkWriter` encodes that once per choice, and a chunk costs one string encoding and one join.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from common.protocol.errors import InternalError, PenstockError
from common.text.output.events import CallArguments, CallStart, Event, Reasoning, Text
from services.gateway.choices import Delta, ScoredToken
from services.gateway.logprobs import Columns, TokenNames

Kind = Literal["chat", "completion"]

SSE_DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which no client of server-sent events shows."""

_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a whole request; each prompt counts once, however many choices it has. `reasoning_tokens`: of the completion,
    None for a model that is not known to reason. `predicted_tokens`: of predictions, one for each choice, of which the answers
    have `repeated_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    predicted_tokens: int = 0
    repeated_tokens: int = 0

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        details: dict[str, int] = {}
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if self.predicted_tokens:
            details["accepted_prediction_tokens"] = self.repeated_tokens
            details["rejected_prediction_tokens"] = self.predicted_tokens - self.repeated_tokens
        return body | ({"completion_tokens_details": details} if details else {})


class Heading(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer says first, and how much it tells of each choice.

    `top_logprobs`: -1 none, else how many alternatives each token lists. `may_call`: the answer may have no text.
    `prompt_top`: as `top_logprobs`, in vLLM's `prompt_logprobs`.
    """

    kind: Kind
    id: str
    created: int
    model: str
    num_choices: int
    top_logprobs: int = -1
    may_call: bool = False
    prompt_top: int = -1

    def encoded(self, chat_object: str) -> bytes:
        """The members that open the body, without a brace behind them; `chat_object` is what a chat answer is called."""
        name = chat_object if self.kind == "chat" else "text_completion"
        return _encode({"id": self.id, "object": name, "created": self.created, "model": self.model})[:-1]


class ChunkWriter:
    """Encodes the chunks of one stream, for SSE or as messages.

    `include_usage`: a chunk with the usage comes last, and over SSE the others say `"usage":null`, as OpenAI does.
    `usage_so_far`: every chunk has the usage. A stream of messages has it in its last chunk in any case.
    """

    size = 0

    def __init__(
        self,
        heading: Heading,
        names: TokenNames,
        usage: Callable[[], Usage],
        *,
        include_usage: bool = False,
        usage_so_far: bool = False,
        sse: bool = True,
    ) -> None:
        head = (b"data: " if sse else b"") + heading.encoded("chat.completion.chunk")
        after = b"\n\n" if sse else b""
        self._sse = sse
        self._include_usage = include_usage
        self._usage = usage
        self._kind: Kind = heading.kind
        self._chat = heading.kind == "chat"
        self._first_content = b"null" if heading.may_call else b'""'
        self._names = names
        self._top = heading.top_logprobs
        self._tells_usage = usage_so_far
        self._bare = head + b',"choices":[],"usage":'
        self._choices = [head + b',"choices":[{"index":%d,' % index for index in range(heading.num_choices)]
        self._usage_tail = b',"usage":null}' if include_usage else b"}"
        self._after = after
        content = b'"delta":{"content":' if self._chat else b'"text":'
        self._text_heads = [choice + content for choice in self._choices]
        self._text_tail = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}]' + self._usage_tail + after

    def opening(self) -> list[bytes]:
        """The chunks before any text: chat names the role, once per choice."""
        if not self._chat:
            return []
        delta = b'"delta":{"role":"assistant","content":%s},"logprobs":null,"finish_reason":null}]' % self._first_content
        tail = _usage_member(msgspec.structs.replace(self._usage(), completion_tokens=0)) if self._tells_usage else self._tail()
        return [choice + delta + tail + self._after for choice in self._choices]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """The chunks of a delta: its text or its events, and its end if it has one. Nothing to tell, no chunk."""
        chunks: list[bytes] = []
        if delta.events is not None:
            chunks += self._event_chunks(index, delta.events, delta)
        elif delta.scored or (delta.text and self._tells_usage):
            chunks.append(self._chunk(index, delta, None, self._tail()))
        elif delta.text:
            chunks.append(b"".join((self._text_heads[index], _encode(delta.text), self._text_tail)))
        if delta.finish is not None:
            chunks.append(self._chunk(index, Delta(""), delta.finish, self._tail()))
        return chunks

    def ending(self, index: int, delta: Delta) -> list[bytes]:
        """The last delta of a request, and the end.

        The last of messages has finish reason and usage, and the text where there is nothing else.
        """
        usage = self._usage()
        if self._sse:
            chunks = self.delta(index, delta)
            if self._include_usage:
                chunks.append(b"".join((self._bare, _encode(usage.body()), b"}", self._after)))
            return [*chunks, SSE_DONE]
        tail = _usage_member(usage)
        if delta.events is None:
            return [self._chunk(index, delta, delta.finish, tail)]
        return [*self._event_chunks(index, delta.events, delta), self._chunk(index, Delta(""), delta.finish, tail)]

    def failure(self, error: PenstockError) -> bytes:
        return b"data: " + failure_body(error) + b"\n\n"

    def _event_chunks(self, index: int, events: list[Event], delta: Delta) -> list[bytes]:
        """A chunk for each event. Log-probabilities are in the first one."""
        chunks: list[bytes] = []
        scored = delta.scored
        for event in events:
            if member := _event_member(event):
                chunks.append(self._framed(index, b'"delta":{' + member + b"}", scored, None, self._tail()))
                scored = None
        if scored:
            chunks.append(self._framed(index, b'"delta":{}', scored, None, self._tail()))
        return chunks

    def _chunk(self, index: int, delta: Delta, finish: str | None, tail: bytes) -> bytes:
        if not self._chat:
            content = b'"text":' + _encode(delta.text)
        elif delta.text:
            content = b'"delta":{"content":' + _encode(delta.text) + b"}"
        else:
            content = b'"delta":{}'
        return self._framed(index, content, delta.scored, finish, tail)

    def _framed(self, index: int, content: bytes, scored: list[ScoredToken] | None, finish: str | None, tail: bytes) -> bytes:
        scores = [b"null"]
        if scored:
            columns = Columns(self._kind, self._names, self._top)
            columns.add(scored)
            scores = columns.body()
        ending = (b',"logprobs":', *scores, b',"finish_reason":', _encode(finish), b"}]", tail, self._after)
        return b"".join((self._choices[index], content, *ending))

    def _tail(self) -> bytes:
        return _usage_member(self._usage()) if self._tells_usage else self._usage_tail


def _event_member(event: Event) -> bytes:
    """The member of a chunk's delta that tells an event; empty for the end of a call, which OpenAI's chunks don't tell."""
    match event:
        case Text():
            return b'"content":' + _encode(event.text)
        case Reasoning():
            return b'"reasoning_content":' + _encode(event.text)
        case CallStart():
            head = call_head(event)
            return b'"tool_calls":[{"index":%d,%s"}}]' % (event.index, head)
        case CallArguments():
            return b'"tool_calls":[{"index":%d,"function":{"arguments":%s}}]' % (event.index, _encode(event.text))
        case _:
            return b""


def call_head(call: CallStart) -> bytes:
    """A call's members up to where the text of its arguments begins."""
    return b'"id":%s,"type":"function","function":{"name":%s,"arguments":"' % (_encode(call.id), _encode(call.name))


def _usage_member(usage: Usage) -> bytes:
    return b',"usage":' + _encode(usage.body()) + b"}"


_TYPES = {401: "authentication_error", 429: "rate_limit_error", 499: "cancelled_error"}
_CODES = {400: "invalid_request", 401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}


def error_type(status: int) -> str:
    """OpenAI's `type` of an error with this status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(message: str, *, status: int, code: str | None = None, param: str | None = None) -> bytes:
    """OpenAI's error object. `type` follows from the status."""
    kind = error_type(status)
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status, kind)}})


def model_body(name: str, created: int, max_context: int, *, root: str) -> dict[str, Any]:
    """One entry of /v1/models; `max_model_len`, `root` and `parent` as vLLM has them. `root`: the model that an alias means."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "root": root,
        "parent": None if name == root else root,
        "max_model_len": max_context,
    }


def failure_body(error: PenstockError) -> bytes:
    """OpenAI's error object for a typed error."""
    return error_body(str(error), status=error.http_status, code=error.code, param=error.param)


def internal_error(request: str) -> InternalError:
    """What a client is told about a fault of ours: an id to look for in the logs, never what happened inside."""
    return InternalError(f"internal error; the logs have it under {request}")
