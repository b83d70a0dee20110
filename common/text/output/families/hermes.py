"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, one element for each call.

Source: NousResearch/Hermes-Function-Calling, and the chat templates of Hermes 2 Pro and 3, Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.text.output.grammar_writer import Callee, CallSyntax, GrammarWriter
from common.text.output.json_calls import object_call, object_syntax
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN = Markers(OPEN)
_EITHER = Markers(CLOSE, OPEN)
_BREAK = r'"\n"'
_LEFTOVER = re.compile(r"[}\],\s]")
"""What models write too much behind a call."""


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    marker = ""
    while marker or (yield from scan.until(_OPEN, sink.text)):
        marker = yield from _calls(scan, sink, tools)


def _calls(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[str]:
    """Read what stands behind an opening tag; returns another one if it ended this."""
    scan.keep(OPEN)
    while (yield from scan.skip_space()) == "{":
        outcome = yield from object_call(scan, sink, tools, known=False)
        if outcome == "none":
            return ""
        if outcome == "open":
            marker = yield from scan.until(_EITHER, sink.arguments)
            sink.end()
            return OPEN if marker == OPEN else ""
        scan.keep()
        yield from scan.match(_LEFTOVER, 64)
        if (yield from scan.accept(CLOSE)):
            scan.kept()
            return ""
    sink.text(scan.kept())
    return ""


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    call = object_syntax(writer, callees, "arguments")
    return writer.blocks(OPEN, f"{_BREAK} {call} {_BREAK} {writer.write(CLOSE)}", separator=f"{_BREAK}?")
