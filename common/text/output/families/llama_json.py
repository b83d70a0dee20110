"""Llama 3.1, 3.2 and 3.3: `{"name": "f", "parameters": {"x": 1}}` and nothing else, at times behind `<|python_tag|>`; several
calls stand behind each other, or are parted by semicolons.

No mark tells a call from other JSON, so it must begin a line, and name a tool of the request.

Source: Llama 3.1's model card ("JSON based tool calling") and its chat template.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.text.output.call_lines import line_syntax, read_lines
from common.text.output.grammar_writer import Callee, CallSyntax, GrammarWriter, literal
from common.text.output.json_calls import object_begin, object_call, object_syntax
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

TAG = "<|python_tag|>"
_LINE_OR_TAG = Markers("\n", TAG)
_NOTHING = Markers("\0")


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    yield from read_lines(scan, sink, tools, _line, _LINE_OR_TAG)


def _line(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    """Read the calls that begin a line, if there are any."""
    scan.keep()
    yield from scan.accept(TAG)
    while (yield from scan.skip_space()) == "{":
        outcome = yield from object_call(scan, sink, tools, known=True)
        if outcome == "none":
            return
        if outcome == "open":
            yield from scan.until(_NOTHING, sink.arguments)
            sink.end()
            return
        scan.keep()
        if (yield from scan.skip_space()) == ";":
            scan.take(scan.at + 1)
    sink.text(scan.kept())


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    calls = writer.repeated(object_syntax(writer, callees, "parameters"), '"; "')
    names = " | ".join(literal(callee.name) for callee in callees)
    begun = {object_begin(each.name, "parameters"): f'{writer.arguments(each)} "}}"' for each in callees}
    # keys are read in any order and form, so no object that begins a line may have a tool's name or an escaped letter
    named = f'/"(name|function)"[\\s\\x1c-\\x1f]*:[\\s\\x1c-\\x1f]*"/ ({names}) "\\""'
    return line_syntax(writer, f"({writer.write(TAG)})? {calls}", begun, f'"{{" /(?s:.*)/ ({named} | /\\\\u00[2-7]/)', (TAG,))
