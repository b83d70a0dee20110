"""GLM 4.5 and later:

    <tool_call>f
    <arg_key>x</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

4.7 and later write the same without line breaks. A value that is no string by the tool's schema is JSON.

Source: the chat templates of GLM 4.5, 4.6 and 4.7.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.text.output.argument_grammar import Argument, arguments_of, in_order, raw_value
from common.text.output.grammar_writer import MAX_ARGUMENTS, Callee, CallSyntax, GrammarWriter, literal
from common.text.output.json_calls import is_name
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tagged_arguments import TaggedArguments
from common.text.output.tools import ToolSet

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (OPEN, CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)
_OPEN = Markers(OPEN)
_NAME_ENDS = Markers("\n", _KEY, CLOSE)
_KEY_ENDS = Markers(_KEY_END)
_VALUE_ENDS = Markers(_VALUE_END)
_MAX_NAME = 256
_BREAK = r'"\n"?'


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    while (yield from scan.until(_OPEN, sink.text)):
        scan.keep(OPEN)
        yield from scan.skip_space()
        name, marker = yield from scan.read_until(_NAME_ENDS, _MAX_NAME)
        name = name.strip()
        if not marker or not is_name(name):
            sink.text(scan.kept())
            continue
        scan.kept()
        sink.start(name)
        yield from _body(scan, sink, TaggedArguments(sink, tools, name, wraps_lines=False, unknown_is_text=False), marker)


def _body(scan: Scan, sink: Sink, arguments: TaggedArguments, marker: str) -> Reading[None]:
    while True:
        scan.keep()
        if marker not in (_KEY, CLOSE):
            yield from scan.skip_space()
            marker = yield from scan.accept_any((_KEY, CLOSE))
        if marker == CLOSE:
            scan.kept()
            arguments.close()
            return
        if marker == _KEY:
            key, end = yield from scan.read_until(_KEY_ENDS, _MAX_NAME)
            yield from scan.skip_space()
            if end and (yield from scan.accept(_VALUE)):
                scan.kept()
                if not (yield from arguments.read(scan, key.strip(), _VALUE_ENDS)):
                    sink.end()
                    return
                marker = ""
                continue
        sink.text(arguments.end(scan, _VALUE if marker else _KEY, CLOSE))
        return


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    """Line breaks may stand where GLM 4.5 has them."""
    calls = [f"{literal(callee.name)} {_BREAK} {_syntax_of_arguments(writer, callee)}" for callee in callees]
    return writer.blocks(OPEN, f"{writer.either(calls)} {writer.write(CLOSE)}", separator=_BREAK)


def _syntax_of_arguments(writer: GrammarWriter, callee: Callee) -> str:
    if callee.parameters is None:
        key = f"{writer.write(_KEY)} /[A-Za-z0-9_.-]{{1,64}}/ {writer.write(_KEY_END)}"
        value = f"{_BREAK} {writer.write(_VALUE)} {writer.until(_VALUE_END, [_VALUE_END])} {_BREAK}"
        return f"({key} {value}){{0,{MAX_ARGUMENTS}}}"
    arguments = arguments_of(callee)
    return in_order(arguments, [_argument_syntax(writer, each) for each in arguments])


def _argument_syntax(writer: GrammarWriter, argument: Argument) -> str:
    if argument.kind in ("string", "nullable"):
        value = raw_value(writer, argument, _VALUE_END, _VALUE_END)
    else:
        value = f"{writer.json(argument.schema)} {writer.write(_VALUE_END)}"
    return f"{writer.write(_KEY + argument.name + _KEY_END)} {_BREAK} {writer.write(_VALUE)} {value} {_BREAK}"
