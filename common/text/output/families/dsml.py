"""DeepSeek V3.2 and V4:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 says `tool_calls` for `function_calls`. The attribute `string` says which values are JSON.

Source: the encoding that DeepSeek publishes with V3.2, and vLLM's parser for V4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.text.output.argument_grammar import Argument, arguments_of, in_order, is_plain, raw_value
from common.text.output.grammar_writer import MAX_ARGUMENTS, Callee, CallSyntax, GrammarWriter, literal
from common.text.output.json_calls import is_name
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tagged_arguments import TaggedArguments
from common.text.output.tools import ToolSet

_BLOCKS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
_BLOCK_ENDS = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
_INVOKE, _INVOKE_END = "<｜DSML｜invoke", "</｜DSML｜invoke>"
_PARAMETER, _PARAMETER_END = "<｜DSML｜parameter", "</｜DSML｜parameter>"
_START = Markers(*_BLOCKS)
_BRACKET = Markers(">")
_VALUE_ENDS = Markers(_PARAMETER_END)
_NAME = re.compile(r'\s+name="([^"]+)"\s*')
_ARGUMENT = re.compile(r'\s+name="([^"]+)"(?:\s+string="(true|false)")?\s*')
_MAX_TAG = 512
_BREAK = r'"\n"'


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    while marker := (yield from scan.until(_START, sink.text)):
        scan.keep(marker)
        while True:
            yield from scan.skip_space()
            found = yield from scan.accept_any((_INVOKE, *_BLOCK_ENDS))
            if found in _BLOCK_ENDS:
                scan.kept()
                break
            tag, _ = (yield from scan.read_until(_BRACKET, _MAX_TAG)) if found else ("", "")
            name = _NAME.fullmatch(tag)
            if name is None or not is_name(name[1]):
                sink.text(scan.kept())
                break
            scan.kept()
            sink.start(name[1])
            yield from _body(scan, sink, tools, name[1])
            scan.keep()


def _body(scan: Scan, sink: Sink, tools: ToolSet, name: str) -> Reading[None]:
    arguments = TaggedArguments(sink, tools, name, wraps_lines=False, unknown_is_text=False)
    while True:
        scan.keep()
        yield from scan.skip_space()
        marker = yield from scan.accept_any((_PARAMETER, _INVOKE_END))
        if marker == _INVOKE_END:
            scan.kept()
            arguments.close()
            return
        if marker:
            tag, _ = yield from scan.read_until(_BRACKET, _MAX_TAG)
            if found := _ARGUMENT.fullmatch(tag):
                scan.kept()
                kind = {"true": "string", "false": "json", None: None}[found[2]]
                if not (yield from arguments.read(scan, found[1], _VALUE_ENDS, kind)):
                    sink.end()
                    return
                continue
        sink.text(arguments.end(scan, _PARAMETER, _INVOKE_END))
        return


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    kind = 0 if "function_calls" in writer.template else 1
    begins = [writer.write(f'{_INVOKE} name="{callee.name}">\n') for callee in callees]
    invokes = [f"{begin} {_syntax_of_arguments(writer, callee)}" for begin, callee in zip(begins, callees, strict=True)]
    calls = writer.repeated(f"{writer.either(invokes)} {writer.write(_INVOKE_END)} {_BREAK}")
    block = f"{_BREAK} {calls} {writer.write(_BLOCK_ENDS[kind])}"
    return writer.blocks(_BLOCKS[kind], block, repeats=False, excluded=(_BLOCKS[1 - kind],))


def _syntax_of_arguments(writer: GrammarWriter, callee: Callee) -> str:
    closing = f"{_PARAMETER_END}\n"
    if callee.parameters is None:
        begin = writer.write(f'{_PARAMETER} name="')
        is_text, is_json = literal('" string="true">'), literal('" string="false">')
        text = f"{is_text} {writer.until(closing, [_PARAMETER_END])}"
        json = f"{is_json} {writer.json({})} {writer.write(closing)}"
        return f"({begin} /[A-Za-z0-9_.-]{{1,64}}/ ({text} | {json})){{0,{MAX_ARGUMENTS}}}"
    arguments = arguments_of(callee)
    return in_order(arguments, [_argument_syntax(writer, each) for each in arguments])


def _argument_syntax(writer: GrammarWriter, argument: Argument) -> str:
    closing = f"{_PARAMETER_END}\n"
    is_raw = argument.kind == "string" and is_plain(argument)
    says = "true" if is_raw else "false"
    begin = writer.write(f'{_PARAMETER} name="{argument.name}" string="{says}">')
    if is_raw:
        return f"{begin} {raw_value(writer, argument, closing, _PARAMETER_END)}"
    return f"{begin} {writer.json(argument.schema)} {writer.write(closing)}"
