"""Llama 4 and Llama 3.2's small models: `[f(x=1, y="a"), g()]`, calls as Python writes them. `<|python_start|>` and
`<|python_end|>` may stand around them.

A list begins a line, and its first word is a tool of the request; anything else is text.

Source: the chat templates of Llama 4 and, for Llama 3.2, its model card ("zero-shot function calling").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.text.output import python_literals
from common.text.output.argument_grammar import Argument, arguments_of, separated
from common.text.output.call_lines import line_syntax, read_lines
from common.text.output.grammar_writer import MAX_CALLS, Callee, CallSyntax, GrammarWriter, literal
from common.text.output.json_text import inner, is_json, quoted
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

START, END = "<|python_start|>", "<|python_end|>"
_LINE_OR_TAG = Markers("\n", START, END)
_WORD = re.compile(r"[\w.-]")
_MAX_WORD = 256
_STRUCTURE = re.compile(r"""["'(){}\[\],]""")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_MAX_VALUE = 1024 * 1024


def read(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    yield from read_lines(scan, sink, tools, _line, _LINE_OR_TAG)


def _line(scan: Scan, sink: Sink, tools: ToolSet) -> Reading[None]:
    """Read the list that begins a line, if there is one."""
    scan.keep()
    yield from scan.accept(START)
    if (yield from scan.skip_space()) == "[":
        scan.take(scan.at + 1)
        yield from scan.skip_space()
        while True:
            name = yield from scan.match(_WORD, _MAX_WORD)
            if name not in tools or (yield from scan.skip_space()) != "(":
                break
            scan.take(scan.at + 1)
            scan.kept()
            sink.start(name)
            is_whole = yield from _arguments(scan, sink)
            sink.end()
            scan.keep()
            if not is_whole:
                break
            following = yield from scan.skip_space()
            if following not in (",", "]"):
                break
            scan.take(scan.at + 1)
            if following == "]":
                scan.kept()
                return
            yield from scan.skip_space()
    sink.text(scan.kept())


def _arguments(scan: Scan, sink: Sink) -> Reading[bool]:
    """Deliver the arguments of a call up to its closing parenthesis; false if they have none."""
    count = 0
    while True:
        character = yield from scan.skip_space()
        if character == ")":
            scan.take(scan.at + 1)
            sink.arguments("}" if count else "{}")
            return True
        scan.keep()
        name = yield from scan.match(_WORD, _MAX_WORD)
        if not name or (yield from scan.skip_space()) != "=":
            sink.arguments(scan.kept())
            return False
        scan.take(scan.at + 1)
        scan.kept()
        sink.arguments(("{" if count == 0 else ", ") + quoted(name) + ": ")
        count += 1
        value, is_whole = yield from _value(scan)
        value = value.strip()
        found = value if is_json(value) else python_literals.to_json(value)
        sink.arguments('"' + inner(value) + '"' if found is None and is_whole else found or value)
        if not is_whole:
            return False
        if (yield from scan.peek()) == ",":
            scan.take(scan.at + 1)


def _value(scan: Scan) -> Reading[tuple[str, bool]]:
    """Read up to the comma or parenthesis that ends a value, which is not read; false if none does."""
    pieces: list[str] = []
    room = _MAX_VALUE
    depth, quote, escaped = 0, "", False
    while True:
        text, start = scan.text, scan.at
        size = min(len(text), start + room)
        at = start
        while at < size:
            if quote:
                character = text[at]
                escaped, quote = (not escaped and character == "\\"), ("" if character == quote and not escaped else quote)
                at += 1
                continue
            found = _STRUCTURE.search(text, at, size)
            if found is None:
                at = size
                break
            at, character = found.end(), found[0]
            if depth == 0 and character in (",", ")", "]", "}"):
                pieces.append(scan.take(at - 1))
                return "".join(pieces), character in (",", ")")
            if character in _OPENING:
                depth += 1
            elif character in _CLOSING:
                depth -= 1
            elif character != ",":
                quote = character
        room -= at - start
        pieces.append(scan.take(at))
        if scan.ended or room == 0:
            return "".join(pieces), False
        yield


def grammar(writer: GrammarWriter, callees: Sequence[Callee]) -> CallSyntax:
    """Values are JSON, but for True, False and None."""
    rests = {callee.name: f'{_syntax_of_arguments(writer, callee)} ")"' for callee in callees}
    call = writer.either([f"{literal(name + '(')} {rest}" for name, rest in rests.items()])
    more = writer.rule(f'(", " {call}){{0,{MAX_CALLS - 1}}} "]"') if writer.many else '"]"'
    calls = f'({writer.write(START)})? "[" {call} {more} ({writer.write(END)})?'
    names = " | ".join(map(literal, rests))
    begun = {f"[{name}(": f"{rest} {more}" for name, rest in rests.items()}
    return line_syntax(writer, calls, begun, f"/\\[[\\s\\x1c-\\x1f]*/ ({names}) /[\\s\\x1c-\\x1f]*\\(/", (START, END))


def _syntax_of_arguments(writer: GrammarWriter, callee: Callee) -> str:
    if callee.parameters is None:
        value = writer.either([writer.json({}), '"True"', '"False"', '"None"'])
        argument = writer.rule(f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {value}")
        return f'({argument} (", " {argument}){{0,63}})?'
    arguments = arguments_of(callee)
    return separated(
        writer, arguments, [f"{literal(each.name + '=')} {_value_syntax(writer, each)}" for each in arguments], '", "'
    )


def _value_syntax(writer: GrammarWriter, argument: Argument) -> str:
    if argument.schema.keys() <= {"type", "title", "description", "default"} and argument.schema.get("type") == "boolean":
        return '("True" | "False")'
    return writer.json(argument.schema)
