"""Arguments that are written one by one between tags: put together to one JSON object.

A string is delivered while it comes, everything else when it is whole: the tool's schema says which it is.
"""

from __future__ import annotations

from common.text.output import python_literals
from common.text.output.json_text import inner, is_json, quoted
from common.text.output.scan import Markers, Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import Kind, ToolSet

_MAX_VALUE = 1024 * 1024
"""Characters of a value that is held until it is whole."""


class TaggedArguments:
    """The arguments of one call that was started.

    `wraps_lines`: a value stands between two line breaks that are not part of it. `unknown_is_text`: what the schema does not
    know is a string; else it is what it looks like.
    """

    def __init__(self, sink: Sink, tools: ToolSet, tool: str, *, wraps_lines: bool, unknown_is_text: bool) -> None:
        self._sink = sink
        self._tools = tools
        self._tool = tool
        self._wraps_lines = wraps_lines
        self._unknown_is_text = unknown_is_text
        self._count = 0

    def read(self, scan: Scan, name: str, ends: Markers, kind: Kind | None = None) -> Reading[str]:
        """Read the value of argument `name` up to one of `ends`, which is returned; empty if the text ends before.

        `kind`: what the value is, if the format says so itself.
        """
        sink = self._sink
        sink.arguments(("{" if self._count == 0 else ", ") + quoted(name) + ": ")
        self._count += 1
        kind = kind or self._tools.kind_of(self._tool, name)
        if self._wraps_lines:
            yield from scan.accept("\n")
        if kind == "string" or (kind == "unknown" and self._unknown_is_text):
            return (yield from self._stream(scan, ends))
        value, marker = yield from scan.read_until(ends, _MAX_VALUE)
        if not marker and not scan.ended:
            sink.arguments('"' + inner(value))  # too long to be judged
            marker = yield from scan.until(ends, lambda piece: sink.arguments(inner(piece)))
            sink.arguments('"')
            return marker
        if not marker:
            sink.arguments(value.strip())
            return ""
        sink.arguments(_as_json(value.removesuffix("\n") if self._wraps_lines else value, kind))
        return marker

    def _stream(self, scan: Scan, ends: Markers) -> Reading[str]:
        held = ""

        def deliver(piece: str) -> None:
            nonlocal held
            piece = held + piece
            held = "\n" if self._wraps_lines and piece.endswith("\n") else ""
            self._sink.arguments(inner(piece[: len(piece) - len(held)]))

        self._sink.arguments('"')
        marker = yield from scan.until(ends, deliver)
        if marker:
            self._sink.arguments('"')
        else:
            self._sink.arguments(inner(held))
        return marker

    def end(self, scan: Scan, *expected: str) -> str:
        """End the call where none of `expected` came; return what was kept, which is text: nothing if one of them was cut."""
        is_cut = scan.is_cut(*expected)
        read = scan.kept()
        if not is_cut:
            self.close()
            return read
        self._sink.end()
        return ""

    def close(self) -> None:
        """End the object and the call. Not called for arguments that were cut off."""
        self._sink.arguments("}" if self._count else "{}")
        self._sink.end()


def _as_json(value: str, kind: Kind) -> str:
    stripped = value.strip()
    if kind == "nullable":
        return "null" if stripped in ("null", "None") else quoted(value)
    if is_json(stripped):
        return stripped
    literal = python_literals.to_json(stripped)
    return quoted(value) if literal is None else literal
