"""An answer as `/v1/responses` tells it: an object of items, or the events in which it came to be. Pure.

    response.created, response.in_progress
      response.output_item.added
        response.content_part.added                                   not of a call
          response.{output_text|reasoning_text|function_call_arguments|custom_tool_call_input}.delta …  and .done
        response.content_part.done
      response.output_item.done
    response.{completed|incomplete|failed}

Each event has the next sequence number. All of a delta but its number and its text is encoded when its item begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from common.protocol.errors import PenstockError
from common.text.output.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from services.gateway.bodies import Usage
from services.gateway.choices import Delta
from services.gateway.job import Job
from services.gateway.logprobs import Sink, TokenNames, chat_entries
from services.gateway.views.responses_tools import Callee, custom_input
from services.gateway.whole import Pieces

_encode = msgspec.json.Encoder().encode

Part = bytes | bytearray


class _Kind(NamedTuple):
    """A type of item. `event`: what its deltas are called. `key`: the member of a `done` event with the text. `part`: how the
    content part begins that holds it, empty if the item has no parts. `has_scores`: log-probabilities follow the text."""

    prefix: str
    event: bytes
    key: bytes
    part: bytes = b""
    has_scores: bool = False


_MESSAGE = _Kind(
    "msg",
    b"response.output_text",
    b"text",
    b'{"type":"output_text","annotations":[],"text":"',
    has_scores=True,
)
_REASONING = _Kind("rs", b"response.reasoning_text", b"text", b'{"type":"reasoning_text","text":"')
_CALL = _Kind("fc", b"response.function_call_arguments", b"arguments")
_CUSTOM = _Kind("ctc", b"response.custom_tool_call_input", b"input")
_CALL_TYPES = {_CALL: b"function_call", _CUSTOM: b"custom_tool_call"}


class Scores:
    """Encodes the log-probabilities of an answer's texts. `top`: alternatives that each token lists; -1: none are asked for."""

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names = names
        self._top = top

    @classmethod
    def of(cls, job: Job, names: TokenNames) -> Scores:
        return cls(names, job.top_logprobs)

    def of_run(self, delta: Delta, run: int) -> bytes:
        """Entries of the tokens in one run of text of the choice."""
        if self._top < 0 or not delta.scored:
            return b""
        return chat_entries([token for token in delta.scored if token.run == run], self._names, self._top)


class _Item:
    """An item of the output. `text` is that of its one part, or a call's arguments, as JSON without quotes. `scores`: entries
    of its log-probabilities. `arguments`: of a call of a custom tool, whose one text is known when they are whole."""

    def __init__(self, kind: _Kind, id: str, index: int, call_id: str = "", callee: Callee | None = None) -> None:
        self.kind = kind
        self.text = Sink()
        self.arguments: list[str] = []
        self.scores = Sink()
        name = _encode(id)
        place = b'"output_index":%d' % index
        self._head = b'{"id":' + name
        self._call = b""
        if callee is not None:
            names = {"call_id": call_id, "name": callee.name}
            if callee.namespace is not None:
                names["namespace"] = callee.namespace
            self._call = b',%s,"%s":"' % (_encode(names)[1:-1], kind.key)
            self.place = b'"item_id":%s,%s' % (name, place)
        else:
            self.place = b'"item_id":%s,%s,"content_index":0' % (name, place)
        self.output_place = place

    def body(self, status: bytes, *, is_empty: bool = False) -> list[Part]:
        """The item. `is_empty`: as it is announced."""
        if self.kind in _CALL_TYPES:
            head = self._head + b',"type":"%s","status":"%s"' % (_CALL_TYPES[self.kind], status) + self._call
            return [head, *([] if is_empty else self.text.buffers), b'"}']
        if self.kind is _MESSAGE:
            head = self._head + b',"type":"message","role":"assistant","status":"' + status + b'","content":['
        else:
            head = self._head + b',"type":"reasoning","status":"' + status + b'","summary":[],"content":['
        return [head, *([] if is_empty else self.part()), b"]}"]

    def part(self, *, is_empty: bool = False) -> list[Part]:
        return [self.kind.part, *([] if is_empty else self.text.buffers), b'"', *self.tail(is_empty=is_empty), b"}"]

    def tail(self, *, is_empty: bool = False) -> list[Part]:
        """What follows the text where all of it is told."""
        if not self.kind.has_scores:
            return []
        return [b',"logprobs":[', *([] if is_empty else self.scores.buffers), b"]"]


class Envelope:
    """The response object around the items. `echo`: the members that say what was asked for. `callees`: see `Offered`."""

    def __init__(self, head: dict[str, Any], echo: dict[str, Any], callees: Mapping[str, Callee]) -> None:
        self.callees = callees
        self._head = _encode({**head, **echo})[:-1]
        self.item_suffix = str(head["id"]).removeprefix("resp_")

    @property
    def size(self) -> int:
        return len(self._head)

    def body(
        self,
        status: bytes,
        items: list[list[Part]],
        *,
        usage: Usage | None = None,
        error: PenstockError | None = None,
    ) -> list[Part]:
        reason = b'{"reason":"max_output_tokens"}' if status == b"incomplete" else b"null"
        failed = b"null" if error is None else _encode({"code": error.code, "message": str(error)})
        pieces: list[Part] = [
            self._head,
            b',"status":"%s","error":%s,"incomplete_details":%s,"output":[' % (status, failed, reason),
        ]
        for index, item in enumerate(items):
            pieces += [b"," if index else b"", *item]
        return [*pieces, b'],"usage":', _usage(usage), b"}"]


class _Output:
    """The items so far, and the one that is open."""

    def __init__(self, envelope: Envelope, scores: Scores) -> None:
        self.envelope = envelope
        self._scores = scores
        self._num_messages = 0
        self.items: list[_Item] = []
        self.statuses: list[bytes] = []
        self.open: _Item | None = None
        self.size = envelope.size

    def begin(self, kind: _Kind) -> _Item:
        self._num_messages += kind is _MESSAGE
        return self._open(kind)

    def begin_call(self, call: CallStart) -> _Item:
        callee = self.envelope.callees.get(call.name) or Callee(call.name)
        return self._open(_CUSTOM if callee.is_custom else _CALL, call.id, callee)

    def _open(self, kind: _Kind, call_id: str = "", callee: Callee | None = None) -> _Item:
        index = len(self.items)
        self.open = _Item(kind, f"{kind.prefix}_{self.envelope.item_suffix}{index:02d}", index, call_id, callee)
        self.items.append(self.open)
        self.statuses.append(b"in_progress")
        return self.open

    def hold(self, arguments: str) -> bool:
        """Keep a piece of the open call's arguments until they are whole, if they are a custom tool's."""
        assert self.open is not None
        if self.open.kind is not _CUSTOM:
            return False
        self.open.arguments.append(arguments)
        self.size += len(arguments)
        return True

    def held(self) -> str:
        """The text of the open call, if it is one of a custom tool."""
        return custom_input("".join(self.open.arguments)) if self.open is not None and self.open.arguments else ""

    def end(self, status: bytes) -> None:
        self.statuses[-1] = status
        self.open = None

    def add(self, encoded: bytes) -> None:
        """Text for the open item."""
        assert self.open is not None
        self.open.text.add(encoded)
        self.size += len(encoded)

    def add_scores(self, delta: Delta) -> bytes:
        """Add what a delta with text of the open message says of its tokens; returns the entries."""
        assert self.open is not None
        entries = self._scores.of_run(delta, self._num_messages - 1)
        if entries:
            sink = self.open.scores
            sink.add(b"," + entries if sink.buffers else entries)
            self.size += len(entries)
        return entries

    def add_late_scores(self, delta: Delta) -> None:
        """Those of tokens that have no text, where the delta has none."""
        if delta.scored and self.open is not None and self.open.kind is _MESSAGE and not _events(delta):
            self.add_scores(delta)

    def body(self, status: bytes, *, usage: Usage | None = None, error: PenstockError | None = None) -> list[Part]:
        items = [item.body(its) for item, its in zip(self.items, self.statuses, strict=True)]
        return self.envelope.body(status, items, usage=usage, error=error)


class WholeResponse:
    """The body of an answer that is not streamed."""

    def __init__(self, envelope: Envelope, scores: Scores) -> None:
        self._output = _Output(envelope, scores)
        self._status = b"completed"
        self.size = 0

    def add(self, index: int, delta: Delta) -> None:
        output = self._output
        for event in _events(delta):
            match event:
                case Text() | Reasoning():
                    kind = _MESSAGE if isinstance(event, Text) else _REASONING
                    if output.open is None or output.open.kind is not kind:
                        self._end()
                        output.begin(kind)
                    output.add(_encode(event.text)[1:-1])
                    if kind is _MESSAGE:
                        output.add_scores(delta)
                case CallStart():
                    self._end()
                    output.begin_call(event)
                case CallArguments():
                    if not output.hold(event.text):
                        output.add(_encode(event.text)[1:-1])
                case CallEnd():
                    self._end(b"incomplete" if delta.finish == "length" else b"completed")
        output.add_late_scores(delta)
        if delta.finish == "length":
            self._status = b"incomplete"
        self.size = output.size

    def finish(self, usage: Usage) -> Pieces:
        self._end(self._status)
        return Pieces(self._output.body(self._status, usage=usage))

    def _end(self, status: bytes = b"completed") -> None:
        if self._output.open is not None:
            self._output.add(_encode(self._output.held())[1:-1])
            self._output.end(status)


class ResponseStream:
    """The events of a streamed answer, for SSE or as messages."""

    def __init__(self, envelope: Envelope, scores: Scores, usage: Callable[[], Usage], *, sse: bool) -> None:
        self._output = _Output(envelope, scores)
        self._usage = usage
        self._sse = sse
        self._after = b"}\n\n" if sse else b"}"
        self._sequence = -1
        self._delta_head = self._delta_place = self._delta_scores = self._delta_tail = b""

    @property
    def size(self) -> int:
        return self._output.size

    def opening(self) -> list[bytes]:
        body = self._output.envelope.body(b"in_progress", [])
        return [self._event(name, b'"response":', *body) for name in (b"response.created", b"response.in_progress")]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        output = self._output
        if delta.events is None and delta.text and output.open is not None and output.open.kind is _MESSAGE:
            return [self._text(delta.text, output.add_scores(delta))]  # as a rule
        chunks: list[bytes] = []
        for event in _events(delta):
            match event:
                case Text() | Reasoning():
                    kind = _MESSAGE if isinstance(event, Text) else _REASONING
                    if output.open is None or output.open.kind is not kind:
                        chunks += self._end()
                        chunks += self._begun(output.begin(kind))
                    chunks.append(self._text(event.text, output.add_scores(delta) if kind is _MESSAGE else b""))
                case CallStart():
                    chunks += self._end()
                    chunks += self._begun(output.begin_call(event))
                case CallArguments():
                    if not output.hold(event.text):
                        chunks.append(self._text(event.text))
                case CallEnd():
                    chunks += self._end(b"incomplete" if delta.finish == "length" else b"completed")
        output.add_late_scores(delta)
        return chunks

    def ending(self, index: int, delta: Delta) -> list[bytes]:
        chunks = self.delta(index, delta)
        status = b"incomplete" if delta.finish == "length" else b"completed"
        chunks += self._end(status)
        chunks.append(self._event(b"response." + status, b'"response":', *self._output.body(status, usage=self._usage())))
        return chunks

    def failure(self, error: PenstockError) -> bytes:
        if self._output.open is not None:
            self._output.end(b"incomplete")
        return self._event(b"response.failed", b'"response":', *self._output.body(b"failed", error=error))

    def _text(self, text: str, scores: bytes = b"") -> bytes:
        encoded = _encode(text)
        self._output.add(encoded[1:-1])
        self._sequence = sequence = self._sequence + 1
        return b"".join(
            (self._delta_head, b"%d" % sequence, self._delta_place, encoded, self._delta_scores, scores, self._delta_tail)
        )

    def _begun(self, item: _Item) -> list[bytes]:
        kind = item.kind
        announced = b"".join(item.body(b"in_progress", is_empty=True))
        chunks = [self._event(b"response.output_item.added", item.output_place, b',"item":', announced)]
        if kind.part:
            part = item.part(is_empty=True)
            chunks.append(self._event(b"response.content_part.added", item.place, b',"part":', *part))
        self._delta_head = self._head(kind.event + b".delta")
        self._delta_place = b"," + item.place + b',"delta":'
        self._delta_scores, self._delta_tail = (b',"logprobs":[', b"]" + self._after) if kind.has_scores else (b"", self._after)
        return chunks

    def _end(self, status: bytes = b"completed") -> list[bytes]:
        item = self._output.open
        if item is None:
            return []
        held = self._output.held()
        chunks = [self._text(held)] if held else []
        self._output.end(status)
        kind = item.kind
        key = b',"%s":"' % kind.key
        chunks += [self._event(kind.event + b".done", item.place, key, *item.text.buffers, b'"', *item.tail())]
        if kind.part:
            chunks.append(self._event(b"response.content_part.done", item.place, b',"part":', *item.part()))
        chunks.append(self._event(b"response.output_item.done", item.output_place, b',"item":', *item.body(status)))
        return chunks

    def _event(self, name: bytes, *members: Part) -> bytes:
        self._sequence += 1
        return b"".join((self._head(name), b"%d," % self._sequence, *members, self._after))

    def _head(self, name: bytes) -> bytes:
        """An event up to where its number stands."""
        before = b"event: %s\ndata: " % name if self._sse else b""
        return before + b'{"type":"%s","sequence_number":' % name


def _events(delta: Delta) -> list[Event]:
    if delta.events is not None:
        return delta.events
    return [Text(delta.text)] if delta.text else []


def _usage(usage: Usage | None) -> bytes:
    if usage is None:
        return b"null"
    return _encode(
        {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
    )
