"""gpt-oss: everything is a message on a channel.

    <|channel|>analysis<|message|>…<|end|>                                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                                      the answer

The recipient may stand in the role as well: `<|start|>assistant to=functions.f<|channel|>…`. Commentary for nobody is text:
it is meant for the reader (a plan before calls).

Source: OpenAI's "Harmony response format", and the chat template of gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.text.output import json_text
from common.text.output.grammar_writer import Callee, CallSyntax, GrammarWriter
from common.text.output.json_calls import is_name
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (_START, _CHANNEL, _MESSAGE, _END, _RETURN, _CALL, "<|constrain|>")
_HEADER = Markers(_START, _CHANNEL, _MESSAGE)
_HEADER_END = Markers(_MESSAGE)
_BODY_END = Markers(_END, _RETURN, _CALL, _START, _CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_MAX_HEADER = 512
_MAX_MESSAGES = 32
"""Before the call or the answer, where a grammar counts them."""


def read(scan: Scan, sink: Sink, tools: ToolSet | None) -> Reading[None]:
    """Without `tools`, a call is text."""
    marker = ""
    while marker or (marker := (yield from scan.until(_HEADER, sink.text))):
        scan.keep(marker)
        header = marker
        if marker != _MESSAGE:
            more, end = yield from scan.read_until(_HEADER_END, _MAX_HEADER)
            if not end:
                sink.text(scan.kept())
                marker = ""
                continue
            header += more
        scan.kept()
        marker = yield from _message(scan, sink, tools, header)
        if marker not in (_START, _CHANNEL):
            marker = ""


def _message(scan: Scan, sink: Sink, tools: ToolSet | None, header: str) -> Reading[str]:
    """Deliver the message behind `header`; returns what ended it."""
    channel = _CHANNEL_NAME.search(header)
    recipient = _RECIPIENT.search(header)
    if recipient is not None and tools is not None and is_name(recipient[1]):
        sink.start(recipient[1])
        if (yield from scan.skip_space()) == "{":  # marks in its strings are no marks
            yield from json_text.container(scan, sink.arguments)
        marker = yield from scan.until(_BODY_END, sink.arguments)
        sink.end()
    elif channel is not None and channel[1] == "analysis":
        sink.open_reasoning()
        marker = yield from scan.until(_BODY_END, sink.reasoning)
        sink.close_reasoning()
    else:
        marker = yield from scan.until(_BODY_END, sink.text)
    return marker


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    """A call ends the turn, so there is one. Reasoning comes before, and a plan for the reader where text is allowed."""
    bodies = writer.until(_END + _START + "assistant", MARKERS)
    thought = f"{writer.write(_CHANNEL + 'analysis' + _MESSAGE)} {bodies}"
    plan = f"{writer.write(_CHANNEL + 'commentary' + _MESSAGE)} {bodies}"
    thoughts = f"({thought}){{0,{_MAX_MESSAGES}}}"
    begins = [writer.write(f"{_CHANNEL}commentary to=functions.{each.name} <|constrain|>json{_MESSAGE}") for each in callees]
    calls = [f"{begin} {writer.arguments(each)}" for begin, each in zip(begins, callees, strict=True)]
    call, final = writer.either(calls), writer.write(_CHANNEL + "final" + _MESSAGE)
    return CallSyntax(
        calls=f"{thoughts} {call}",
        free=f"({thought} | {plan}){{0,{_MAX_MESSAGES}}} ({call} | {final} {writer.free_text(MARKERS)})",
        frame=f"{thoughts} {final}",
    )
