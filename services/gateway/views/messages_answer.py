"""An answer as `/v1/messages` tells it: a message of blocks, or the events in which it came to be. Pure.

message_start
  content_block_start, content_block_delta …, content_block_stop        for each block
message_delta (stop reason and usage), message_stop
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from common.protocol.errors import PenstockError
from common.text.output.events import CallArguments, CallEnd, CallStart, Reasoning, Text
from services.gateway.bodies import Usage
from services.gateway.choices import Delta
from services.gateway.logprobs import Sink
from services.gateway.whole import Pieces

_encode = msgspec.json.Encoder().encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_DELTAS = {
    "text": b'{"type":"text_delta","text":',
    "thinking": b'{"type":"thinking_delta","thinking":',
    "tool_use": b'{"type":"input_json_delta","partial_json":',
}


class MessageHead(msgspec.Struct, frozen=True):
    """`cut_off`: why an answer ended that was not finished."""

    id: str
    model: str
    cut_off: str

    def encoded(self) -> bytes:
        """The members that open a message, without a brace behind them."""
        return _encode({"id": self.id, "type": "message", "role": "assistant", "model": self.model})[:-1]


def error_type(status: int) -> str:
    """What Anthropic calls an error of this status."""
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(error: PenstockError) -> bytes:
    """Anthropic's error object for a typed error."""
    kind = error_type(error.http_status)
    where = f"{error.param}: " if error.param and error.param not in str(error) else ""
    return _encode({"type": "error", "error": {"type": kind, "message": where + str(error), "code": error.code}})


class MessageStream:
    """The events of a streamed answer, for SSE or as messages."""

    size = 0

    def __init__(self, head: MessageHead, usage: Callable[[], Usage], *, sse: bool) -> None:
        self._head = head
        self._usage = usage
        self._sse = sse
        self._after = b"}\n\n" if sse else b"}"
        self._num_blocks = 0
        self._kind = ""  # of the open block
        self._delta_head = b""
        self._delta_tail = b"}" + self._after

    def opening(self) -> list[bytes]:
        usage = usage_body(msgspec.structs.replace(self._usage(), completion_tokens=0, reasoning_tokens=None))
        rest = b',"content":[],"stop_reason":null,"stop_sequence":null,"usage":' + _encode(usage) + b"}"
        return [self._event(b"message_start", b'"message":', self._head.encoded(), rest)]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        if delta.events is None:
            if not delta.text:
                return []
            if self._kind == "text":
                return [self._delta(delta.text)]  # as a rule
            return self._piece("text", delta.text)
        chunks: list[bytes] = []
        for event in delta.events:
            match event:
                case Text():
                    chunks += self._piece("text", event.text)
                case Reasoning():
                    chunks += self._piece("thinking", event.text)
                case CallStart():
                    chunks += self._start("tool_use", event)
                case CallArguments():
                    chunks.append(self._delta(event.text))
                case CallEnd():
                    chunks += self._stop()
        return chunks

    def ending(self, index: int, delta: Delta) -> list[bytes]:
        chunks = self.delta(index, delta)
        chunks += self._stop()
        end = b'"delta":%s,"usage":%s' % (_encode(_stop(delta, self._head)), _encode(usage_body(self._usage())))
        return [*chunks, self._event(b"message_delta", end), self._event(b"message_stop")]

    def failure(self, error: PenstockError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _piece(self, kind: str, text: str) -> list[bytes]:
        chunks = [] if self._kind == kind else self._start(kind)
        chunks.append(self._delta(text))
        return chunks

    def _delta(self, text: str) -> bytes:
        return b"".join((self._delta_head, _encode(text), self._delta_tail))

    def _start(self, kind: str, call: CallStart | None = None) -> list[bytes]:
        chunks = self._stop()
        block: dict[str, Any] = {"type": kind}
        if call is not None:
            block |= {"id": call.id, "name": call.name, "input": {}}
        elif kind == "thinking":
            block |= {"thinking": "", "signature": ""}
        else:
            block["text"] = ""
        place = b'"index":%d,' % self._num_blocks
        chunks.append(self._event(b"content_block_start", place, b'"content_block":', _encode(block)))
        self._delta_head = self._open(b"content_block_delta") + b"," + place + b'"delta":' + _DELTAS[kind]
        self._kind = kind
        return chunks

    def _stop(self) -> list[bytes]:
        if not self._kind:
            return []
        self._kind = ""
        self._num_blocks += 1
        return [self._event(b"content_block_stop", b'"index":%d' % (self._num_blocks - 1))]

    def _event(self, name: bytes, *members: bytes) -> bytes:
        return b"".join((self._open(name), b"," if members else b"", *members, self._after))

    def _open(self, name: bytes) -> bytes:
        """An event up to its members."""
        return (b"event: %s\ndata: " % name if self._sse else b"") + b'{"type":"%s"' % name


class _Block:
    """`text` is JSON without quotes; a call's arguments are JSON themselves, and kept as they are."""

    def __init__(self, kind: str, call: CallStart | None = None) -> None:
        self.kind = kind
        self.call = call
        self.text = Sink()

    def add(self, text: str) -> int:
        data = text.encode("utf-8", "replace") if self.call is not None else _encode(text)[1:-1]
        self.text.add(data)
        return len(data)

    def body(self) -> list[bytes | bytearray]:
        if self.call is not None:
            head = b'{"type":"tool_use","id":%s,"name":%s,"input":' % (_encode(self.call.id), _encode(self.call.name))
            return [head, _arguments(b"".join(self.text.buffers)), b"}"]
        if self.kind == "thinking":
            return [b'{"type":"thinking","thinking":"', *self.text.buffers, b'","signature":""}']
        return [b'{"type":"text","text":"', *self.text.buffers, b'"}']


class WholeMessage:
    """The body of an answer that is not streamed."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._blocks: list[_Block] = []
        self._is_open = False
        self._end: dict[str, str | None] = {"stop_reason": "end_turn", "stop_sequence": None}
        self.size = 0

    def add(self, index: int, delta: Delta) -> None:
        if delta.text:
            self._piece("text", delta.text)
        for event in delta.events or ():
            match event:
                case Text():
                    self._piece("text", event.text)
                case Reasoning():
                    self._piece("thinking", event.text)
                case CallStart():
                    self._blocks.append(_Block("tool_use", event))
                    self._is_open = True
                case CallArguments():
                    self.size += self._blocks[-1].add(event.text)
                case CallEnd():
                    self._is_open = False
        if delta.finish is not None:
            self._end = _stop(delta, self._head)

    def finish(self, usage: Usage) -> Pieces:
        parts: list[bytes | bytearray] = [self._head.encoded(), b',"content":[']
        for index, block in enumerate(self._blocks):
            parts += [b"," if index else b"", *block.body()]
        ending = b"],%s,%s" % (_encode(self._end)[1:-1], _encode({"usage": usage_body(usage)})[1:])
        return Pieces([*parts, ending])

    def _piece(self, kind: str, text: str) -> None:
        if not self._is_open or self._blocks[-1].kind != kind:
            self._blocks.append(_Block(kind))
            self._is_open = True
        self.size += self._blocks[-1].add(text)


def usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic's `input_tokens` are those that were neither read from a cache nor written to one."""
    body: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


def _stop(delta: Delta, head: MessageHead) -> dict[str, str | None]:
    """Why the answer ended."""
    if delta.finish == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if delta.finish == "length":
        return {"stop_reason": head.cut_off, "stop_sequence": None}
    return {"stop_reason": "end_turn" if delta.stopped_by is None else "stop_sequence", "stop_sequence": delta.stopped_by}


def _arguments(raw: bytes) -> bytes:
    """The object that a call's arguments are; one around the text, where a model wrote no JSON object."""
    if not raw:
        return b"{}"
    try:
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _encode({"invalid_json": raw.decode("utf-8", "replace")})
    return raw
