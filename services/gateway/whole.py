"""The body of an answer that is not streamed, encoded delta by delta as it comes. Pure.

Encoding a large answer at its end would hold the event loop for seconds. So everything is encoded at once, and the end only
puts pieces behind each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from common.text.output.events import CallArguments, CallStart, Event, Reasoning, Text
from services.gateway.bodies import Heading, Usage, call_head
from services.gateway.choices import Delta
from services.gateway.logprobs import BUFFER_BYTES, Columns, Sink, TokenNames
from services.gateway.prompt_scores import encoded_scores

_encode = msgspec.json.Encoder().encode


class _Choice:
    def __init__(self, columns: Columns | None) -> None:
        self.text = Sink()
        self.reasoning = Sink()
        self.calls: list[tuple[bytes, Sink]] = []
        self.finish = "stop"
        self.columns = columns
        self.prompt = Sink()

    def add(self, event: Event) -> int:
        """Return how many bytes it added."""
        match event:
            case Text():
                return _add(self.text, event.text)
            case Reasoning():
                return _add(self.reasoning, event.text)
            case CallStart():
                self.calls.append((call_head(event), Sink()))
                return len(self.calls[-1][0])
            case CallArguments():
                return _add(self.calls[-1][1], event.text)
            case _:
                return 0

    def message(self) -> list[bytes | bytearray]:
        """The message of a chat. Without text, its content is null if there is anything else."""
        has_more = self.calls or self.reasoning.buffers
        parts: list[bytes | bytearray] = [b'"message":{"role":"assistant","content":']
        parts += [b'"', *self.text.buffers, b'"'] if self.text.buffers or not has_more else [b"null"]
        parts.append(b',"refusal":null')
        if self.reasoning.buffers:
            parts += [b',"reasoning_content":"', *self.reasoning.buffers, b'"']
        for index, (head, arguments) in enumerate(self.calls):
            parts += [b",{" if index else b',"tool_calls":[{', head, *arguments.buffers, b'"}}']
        return [*parts, b"]}" if self.calls else b"}"]


class WholeBody:
    """`size`: bytes so far, but for a few."""

    def __init__(self, heading: Heading, names: TokenNames) -> None:
        self._chat = heading.kind == "chat"
        self._head = heading.encoded("chat.completion")
        self._names, self._prompt_top = names, heading.prompt_top
        kind, top = heading.kind, heading.top_logprobs
        self._choices = [_Choice(Columns(kind, names, top) if top >= 0 else None) for _ in range(heading.num_choices)]
        self.size = 0

    def add(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        if delta.text:
            self.size += _add(choice.text, delta.text)
        for event in delta.events or ():
            self.size += choice.add(event)
        if choice.columns is not None and delta.scored:
            self.size += choice.columns.add(delta.scored)
        if delta.prompt:
            entries = encoded_scores(delta.prompt, self._names, self._prompt_top)
            choice.prompt.add(b"," + entries if choice.prompt.buffers else entries)
            self.size += len(entries)
        if delta.finish is not None:
            choice.finish = delta.finish

    def finish(self, usage: Usage) -> Pieces:
        """The body; nothing can be added any more."""
        parts: list[bytes | bytearray] = [self._head, b',"choices":[']
        for index, choice in enumerate(self._choices):
            head = b'%s{"index":%d,' % (b"," if index else b"", index)
            text = choice.message() if self._chat else [b'"text":"', *choice.text.buffers, b'"']
            parts += [head, *text, b',"logprobs":']
            parts += choice.columns.body() if choice.columns is not None else [b"null"]
            parts += [b',"finish_reason":', _encode(choice.finish)]
            parts += [b"}"] if self._chat else [*self._prompt_member(choice), b"}"]
        parts += [b'],"usage":', _encode(usage.body())]
        parts += [*self._prompt_member(self._choices[0]), b"}"] if self._chat else [b"}"]
        return Pieces(parts)

    def _prompt_member(self, choice: _Choice) -> list[bytes | bytearray]:
        if self._prompt_top < 0:
            return []
        return [b',"prompt_logprobs":[', *choice.prompt.buffers, b"]"]


def _add(sink: Sink, text: str) -> int:
    encoded = _encode(text)[1:-1]
    sink.add(encoded)
    return len(encoded)


class Pieces:
    """A body in parts, which are put together to about BUFFER_BYTES as they are taken."""

    def __init__(self, parts: list[bytes | bytearray]) -> None:
        self._parts = parts
        self.size = sum(map(len, parts))

    def __iter__(self) -> Iterator[bytes]:
        gathered: list[bytes | bytearray] = []
        size = 0
        for part in self._parts:
            gathered.append(part)
            size += len(part)
            if size >= BUFFER_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
        if gathered:
            yield b"".join(gathered)
