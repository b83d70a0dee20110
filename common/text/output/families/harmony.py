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
        marker = yield from scan.until(_BODY_END, sink.arguments)
        sink.end()
    elif channel is not None and channel[1] == "analysis":
        sink.open_reasoning()
        marker = yield from scan.until(_BODY_END, sink.reasoning)
        sink.close_reasoning()
    else:
        marker = yield from scan.until(_BODY_END, sink.text)
    return marker
