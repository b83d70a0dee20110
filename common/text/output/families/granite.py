"""Granite 3: `<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]`, all calls in one list.

Source: the chat templates of Granite 3.0 to 3.3, and vLLM's `granite_tool_parser.py`. Granite 4 writes as Hermes does.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.text.output.grammar_writer import Callee, CallSyntax, GrammarWriter
from common.text.output.json_calls import list_of_calls, list_syntax
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

OPEN = "<|tool_call|>"
_OPEN = Markers(OPEN)


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    marker = ""
    while marker or (yield from scan.until(_OPEN, sink.text)):
        scan.keep(OPEN)
        marker = ""
        if (yield from scan.skip_space()) == "[":
            marker = yield from list_of_calls(scan, sink, tools, _OPEN)
        else:
            sink.text(scan.kept())


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    return writer.blocks(OPEN, list_syntax(writer, callees), repeats=False)
