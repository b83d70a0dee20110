"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]`, and from tokenizer version 11 on `[TOOL_CALLS]f[ARGS]{"x": 1}`
for each call, with `[CALL_ID]…` before `[ARGS]` in some models.

Source: mistral-common's instruct tokenizers (v3 to v13), and the chat templates of Mistral 7B v0.3 and Mistral Small.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.text.output import json_text
from common.text.output.grammar_writer import Callee, CallSyntax, GrammarWriter
from common.text.output.json_calls import is_name, list_of_calls, list_syntax
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

OPEN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKERS = (OPEN, _ARGUMENTS, _ID)
ID_LENGTH = 9
"""Of the ids of calls, which the templates insist on: letters and digits."""
_OPEN = Markers(OPEN)
_WORD = re.compile(r"[\w.:-]")
_MAX_WORD = 256


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    marker = ""
    while marker or (yield from scan.until(_OPEN, sink.text)):
        scan.keep(OPEN)
        if (yield from scan.skip_space()) == "[":
            marker = yield from list_of_calls(scan, sink, tools, _OPEN)
        else:
            marker = yield from _named(scan, sink)


def _named(scan: Scan, sink: Sink) -> Reading[str]:
    name = yield from scan.match(_WORD, _MAX_WORD)
    if is_name(name):
        if (yield from scan.accept(_ID)):
            yield from scan.match(_WORD, _MAX_WORD)
        yield from scan.accept(_ARGUMENTS)
        if (yield from scan.skip_space()) == "{":
            scan.kept()
            sink.start(name)
            marker = ""
            if (yield from json_text.container(scan, sink.arguments)) != "complete":
                marker = yield from scan.until(_OPEN, sink.arguments)
            sink.end()
            return marker
    sink.text(scan.kept())
    return ""


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    if _ARGUMENTS in writer.template:
        named = [f"{writer.write(callee.name + _ARGUMENTS)} {writer.arguments(callee)}" for callee in callees]
        return writer.blocks(OPEN, writer.either(named))
    return writer.blocks(OPEN, list_syntax(writer, callees), repeats=False)
