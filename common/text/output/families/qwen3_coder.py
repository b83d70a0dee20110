"""Qwen3-Coder, and models that follow it:

    <tool_call>
    <function=f>
    <parameter=x>
    1
    </parameter>
    </function>
    </tool_call>

Values stand as they are, so the tool's schema says what is a string. Models leave out the outer tags now and then.

Source: the chat template of Qwen3-Coder and its `qwen3coder_tool_parser.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.text.output.argument_grammar import Argument, arguments_of, in_order, raw_value
from common.text.output.grammar_writer import MAX_ARGUMENTS, Callee, CallSyntax, GrammarWriter
from common.text.output.json_calls import is_name
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tagged_arguments import TaggedArguments
from common.text.output.tools import ToolSet


class Tags(NamedTuple):
    """The outer ones."""

    opening: str
    closing: str

    @property
    def starts(self) -> Markers:
        """What a call may begin with."""
        return Markers(self.opening, _FUNCTION)


TAGS = Tags("<tool_call>", "</tool_call>")
_FUNCTION, _END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_BRACKET = Markers(">")
_MAX_NAME = 256
_VALUE_ENDS = Markers(_PARAMETER_END)


def read(scan: Scan, sink: Sink, tools: ToolSet, tags: Tags = TAGS) -> Reading[None]:
    starts = tags.starts
    while marker := (yield from scan.until(starts, sink.text)):
        scan.keep(marker)
        if marker == tags.opening:
            yield from scan.skip_space()
            if not (yield from scan.accept(_FUNCTION)):
                sink.text(scan.kept())
                continue
        name, bracket = yield from scan.read_until(_BRACKET, _MAX_NAME)
        name = name.strip()
        if not bracket or not is_name(name):
            sink.text(scan.kept())
            continue
        scan.kept()
        sink.start(name)
        yield from _body(scan, sink, tools, name, tags.closing)


def _body(scan: Scan, sink: Sink, tools: ToolSet, name: str, closing: str) -> Reading[None]:
    arguments = TaggedArguments(sink, tools, name, wraps_lines=True, unknown_is_text=True)
    while True:
        scan.keep()
        yield from scan.skip_space()
        marker = yield from scan.accept_any((_PARAMETER, _END, closing))
        if marker == _PARAMETER:
            argument, bracket = yield from scan.read_until(_BRACKET, _MAX_NAME)
            if bracket:
                scan.kept()
                if not (yield from arguments.read(scan, argument.strip(), _VALUE_ENDS)):
                    sink.end()
                    return
                continue
        if marker not in (_END, closing):
            sink.text(arguments.end(scan, *(() if marker else (_PARAMETER, _END, closing))))
            return
        scan.kept()
        arguments.close()
        if marker == _END:
            scan.keep()
            yield from scan.skip_space()
            sink.text("" if (yield from scan.accept(closing)) else scan.kept())
            scan.kept()
        return


def grammar(writer: GrammarWriter, callees: Sequence[Callee], tags: Tags = TAGS) -> CallSyntax:
    begins = [writer.write(f"\n{_FUNCTION}{callee.name}>\n") for callee in callees]
    calls = [f"{begin} {_syntax_of_arguments(writer, callee)}" for begin, callee in zip(begins, callees, strict=True)]
    end = writer.write(f"{_END}\n{tags.closing}")
    return writer.blocks(tags.opening, f"{writer.either(calls)} {end}", separator=r'"\n"?', excluded=(_FUNCTION,))


def _syntax_of_arguments(writer: GrammarWriter, callee: Callee) -> str:
    if callee.parameters is None:
        value = writer.until(f"\n{_PARAMETER_END}\n", [_PARAMETER_END])
        return f'({writer.write(_PARAMETER)} /[A-Za-z0-9_.-]{{1,64}}/ ">\\n" {value}){{0,{MAX_ARGUMENTS}}}'
    arguments = arguments_of(callee)
    return in_order(arguments, [_argument_syntax(writer, each) for each in arguments])


def _argument_syntax(writer: GrammarWriter, argument: Argument) -> str:
    closing = f"\n{_PARAMETER_END}\n"
    begin = writer.write(f"{_PARAMETER}{argument.name}>\n")
    if argument.kind == "json":
        return f"{begin} {writer.json(argument.schema)} {writer.write(closing)}"
    return f"{begin} {raw_value(writer, argument, closing, _PARAMETER_END)}"
