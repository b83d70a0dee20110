"""Calls in formats without marks of their own: they begin a line. What `families.llama_json` and `families.pythonic` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.text.output.grammar_writer import MAX_CALLS, CallSyntax, GrammarWriter, literal
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet


def read_lines(
    scan: Scan, sink: Sink, tools: ToolSet, read_line: Callable[[Scan, Sink, ToolSet], Reading[None]], marks: Markers
) -> Reading[None]:
    """Deliver text, and at the beginning of each line what `read_line` finds. `marks`: a line break, and what is left out and
    begins a line as well."""
    while True:
        yield from read_line(scan, sink, tools)
        marker = yield from scan.until(marks, sink.text)
        if not marker:
            return
        if marker == "\n":
            sink.text(marker)


def line_syntax(
    writer: GrammarWriter, calls: str, begun: Mapping[str, str], beginning: str, excluded: tuple[str, ...]
) -> CallSyntax:
    """Return the syntax of a format. `begun`: how calls begin in text, and what follows that. `beginning`: a terminal's
    expression for whatever the parser may take for a call's beginning. `excluded`: marks that text can't hold."""
    space = r"/[\s\x1c-\x1f]*/"
    begins = rf"/((?s:.*)\n)?/ {space} /;?/ {space} ({beginning})"
    said = writer.free_text(excluded, also=begins)
    line = writer.terminal(f"{said} & /((?s:.*)\\n)?/")
    begins = [writer.terminal(f"{line} {literal(begin)}") for begin in begun]
    found = writer.either([f"{begin} {rest}" for begin, rest in zip(begins, begun.values(), strict=True)])
    free = f"{found}{{0,{MAX_CALLS}}} {said}" if writer.many else f"{found} | {said}"
    return CallSyntax(calls=writer.rule(calls), free=writer.either([calls, free]), is_marked=False)
