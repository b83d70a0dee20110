"""A call written as a JSON object: `{"name": "f", "arguments": {"x": 1}}`, in any order, with whatever else it holds.

The arguments are delivered while they come, if the name comes before them, as every template asks for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from common.text.output import json_text
from common.text.output.grammar_writer import Callee, GrammarWriter, literal
from common.text.output.scan import MAX_AHEAD, Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet

Outcome = Literal["call", "junk", "open", "none"]
"""What was read: a whole call; a whole call, and behind its arguments something that no object has; a call whose arguments are
broken or cut, which the reader has to end; none (what was read was delivered as text)."""

_NAME_KEYS = frozenset({"name", "function"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_CALLABLE = re.compile(r"[\w.:-]{1,256}")


def is_name(name: str) -> bool:
    """Return whether `name` can be a tool's."""
    return _CALLABLE.fullmatch(name) is not None


def object_call(scan: Scan, sink: Sink, tools: ToolSet, *, known: bool) -> Reading[Outcome]:
    """Read an object whose brace comes next. The caller has called `scan.keep`.

    `known`: only a tool of the request is called; a format without marks would take other JSON for calls otherwise.
    """
    name = ""
    held: list[str] = []  # arguments that came before the name
    yield from scan.accept("{")
    character = yield from scan.skip_space()
    while character == '"' and not scan.looks_too_far:
        key = yield from json_text.string(scan, limit=1024)
        if key is None or (yield from scan.skip_space()) != ":":
            break
        scan.take(scan.at + 1)
        character = yield from scan.skip_space()
        if key in _NAME_KEYS and character == '"' and not name:
            name = (yield from json_text.string(scan, limit=1024)) or ""
            if not is_name(name) or (known and name not in tools):
                break
        elif key in _ARGUMENT_KEYS and name:
            scan.kept()
            sink.start(name)
            return (yield from _stream(scan, sink, character))
        elif key in _ARGUMENT_KEYS and character == "{" and not held:
            if (yield from json_text.container(scan, held.append, limit=MAX_AHEAD)) != "complete":
                break
        elif not (yield from json_text.skip_value(scan)):
            break
        character = yield from scan.skip_space()
        if character == ",":
            scan.take(scan.at + 1)
            character = yield from scan.skip_space()
        elif character == "}" and name:
            scan.take(scan.at + 1)
            scan.kept()
            sink.start(name)
            sink.arguments("".join(held) or "{}")
            sink.end()
            return "call"
        else:
            break
    sink.text(scan.kept())
    return "none"


def _stream(scan: Scan, sink: Sink, character: str) -> Reading[Outcome]:
    """Deliver the arguments, which begin with `character`, and read the rest of the object."""
    if not (yield from arguments(scan, sink, character)):
        return "open"
    sink.end()
    while True:
        character = yield from scan.skip_space()
        if character == "}":
            scan.take(scan.at + 1)
            return "call"
        if character != ",":
            return "junk"
        scan.take(scan.at + 1)
        if (yield from scan.skip_space()) != '"' or (yield from json_text.string(scan, limit=1024)) is None:
            return "junk"
        if (yield from scan.skip_space()) != ":":
            return "junk"
        scan.take(scan.at + 1)
        if not (yield from json_text.skip_value(scan)):
            return "junk"


def arguments(scan: Scan, sink: Sink, character: str) -> Reading[bool]:
    """Deliver a value, which begins with `character`, as the arguments of the call that was started; false if it does not end
    as JSON does. A string that holds JSON is delivered as what it holds, null as no arguments."""
    if character in ("{", "["):
        return (yield from json_text.container(scan, sink.arguments)) == "complete"
    scan.keep()
    if character == '"':
        value = yield from json_text.string(scan)
        read = scan.kept()
        if value is None:
            sink.arguments(read)
            return False
        sink.arguments(value if json_text.is_json(value) else read)
        return True
    value = yield from json_text.scalar(scan)
    read = scan.kept()
    sink.arguments("{}" if value == "null" else read)
    return value is not None


def list_of_calls(scan: Scan, sink: Sink, tools: ToolSet, opening: Markers) -> Reading[str]:
    """Read a list of such objects, whose bracket comes next, behind a mark. The caller has called `scan.keep`.

    Returns one of the marks `opening` if it ended the list, whose last call was broken or cut.
    """
    scan.take(scan.at + 1)
    while (yield from scan.skip_space()) == "{":
        outcome = yield from object_call(scan, sink, tools, known=False)
        if outcome == "none":
            return ""
        if outcome == "open":
            marker = yield from scan.until(opening, sink.arguments)
            sink.end()
            return marker
        scan.keep()
        following = yield from scan.skip_space()
        if following not in (",", "]"):
            break
        scan.take(scan.at + 1)
        if following == "]":
            scan.kept()
            return ""
    sink.text(scan.kept())
    return ""


def list_syntax(writer: GrammarWriter, callees: Sequence[Callee]) -> str:
    """Return an expression for a list of calls as objects with `arguments`."""
    calls = writer.repeated(object_syntax(writer, callees, "arguments"), '", "')
    return f'"[" {calls} "]"'


def object_syntax(writer: GrammarWriter, callees: Sequence[Callee], key: str) -> str:
    """Return an expression for a call of one of `callees` as an object, whose arguments are its `key`."""
    begins = [literal(object_begin(callee.name, key)) for callee in callees]
    return writer.either([f'{begin} {writer.arguments(callee)} "}}"' for begin, callee in zip(begins, callees, strict=True)])


def object_begin(name: str, key: str) -> str:
    """Return the text of a call up to its arguments, as templates write it."""
    return f'{{"name": {json_text.quoted(name)}, {json_text.quoted(key)}: '
