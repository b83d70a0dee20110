"""DeepSeek V3, R1 and V3.1, whose calls stand between special tokens:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

That is V3.1; before, a call was `function<｜tool▁sep｜>f`, and its arguments a block of Markdown.

Source: the chat templates of DeepSeek-V3, DeepSeek-R1 and DeepSeek-V3.1.
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

_BLOCK, _BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (_BLOCK, _BLOCK_END, _CALL, _CALL_END, _SEPARATOR)
_START = Markers(_BLOCK, _CALL)
_NAME_ENDS = Markers(_SEPARATOR)
_LINE_ENDS = Markers("\n")
_ENDS = Markers(_CALL_END, _BLOCK_END)
_MAX_NAME = 256
_FENCE = re.compile(r"[`\s]")


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    while marker := (yield from scan.until(_START, sink.text)):
        scan.keep(marker)
        is_call = marker == _CALL
        while True:
            if not is_call:
                yield from scan.skip_space()
                marker = yield from scan.accept_any((_CALL, _BLOCK_END))
                if marker == _BLOCK_END:
                    scan.kept()
                    break
            is_call = False
            if not marker or not (yield from _call(scan, sink)):
                sink.text(scan.kept())
                break
            scan.keep()


def _call(scan: Scan, sink: Sink) -> Reading[bool]:
    """Read one call; false if there is none, and what was read is still kept."""
    name, separator = yield from scan.read_until(_NAME_ENDS, _MAX_NAME)
    name = name.strip()
    if not separator:
        return False
    if name == "function" and (yield from scan.skip_space()) != "{":
        name, line_end = yield from scan.read_until(_LINE_ENDS, _MAX_NAME)
        name = name.strip()
        yield from scan.skip_space()
        if not line_end or not (yield from scan.accept("```")):
            return False
        yield from scan.accept("json")
    if not is_name(name) or (yield from scan.skip_space()) != "{":
        return False
    scan.kept()
    sink.start(name)
    if (yield from json_text.container(scan, sink.arguments)) != "complete":
        yield from scan.until(_ENDS, sink.arguments)
        sink.end()
        return True
    sink.end()
    yield from scan.match(_FENCE, 64)
    yield from scan.accept(_CALL_END)
    return True


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    is_fenced = "```json" in writer.template  # before V3.1
    begin, end = ("function" + _SEPARATOR, "\n```" + _CALL_END) if is_fenced else ("", _CALL_END)
    name_end = "\n```json\n" if is_fenced else _SEPARATOR
    call = writer.either([f"{writer.write(_CALL + begin + each.name + name_end)} {writer.arguments(each)}" for each in callees])
    calls = writer.repeated(f"{call} {writer.write(end)}", r'"\n"?')
    return writer.blocks(_BLOCK, f"{calls} {writer.write(_BLOCK_END)}", repeats=False, excluded=(_CALL,))
