"""A model's answer as it comes, turned into events (`events.py`). Pure.

    parser = OutputParser(dialect, tools=ToolSet(tools), is_open=False, call_id=id_of)
    parser.push("<think>Hm") → [Reasoning("Hm")]
    parser.finish()          → what was still held

However the text is cut into pieces, the events are the same, but for where pieces of text, reasoning and arguments are cut.
Text that turns out to be no call is delivered as text; all that is left out are marks, and white space beside them. What is
held is bounded (`scan.MAX_AHEAD`, and one megabyte for an argument that must be whole), and no text is looked at twice.
"""

from __future__ import annotations

from collections.abc import Callable

from common.text.output.events import Event, merged
from common.text.output.families import harmony, think
from common.text.output.formats import Dialect
from common.text.output.scan import Reading, Scan
from common.text.output.sink import Sink
from common.text.output.tools import ToolSet


class OutputParser:
    """Reads one answer. `tools`: those that may be called, None where none may.

    `is_open`: the prompt ended inside reasoning. `call_id` names call number n. `max_calls`: of more, nothing is delivered.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        tools: ToolSet | None = None,
        is_open: bool = False,
        call_id: Callable[[int], str] = lambda index: f"call_{index}",
        max_calls: int | None = None,
    ) -> None:
        self._scan = Scan()
        reasons = dialect.reasoning != "none"
        self._sink = Sink(call_id, trims=reasons or tools is not None, max_calls=max_calls)
        self._reading: Reading[None] | None = _read(self._scan, self._sink, dialect, tools, is_open)
        next(self._reading)

    @property
    def in_reasoning(self) -> bool:
        return self._sink.in_reasoning

    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        return self._sink.num_calls

    @property
    def is_full(self) -> bool:
        """Whether `max_calls` were delivered."""
        return self._sink.is_full

    @property
    def num_held(self) -> int:
        """Characters of which is not known yet what they are."""
        return self._scan.num_held + self._sink.num_held

    def push(self, text: str) -> list[Event]:
        """Return what `text` adds."""
        if not text:
            return []
        self._scan.put(text)
        self._go_on()
        return merged(self._sink.take())

    def finish(self) -> list[Event]:
        """Return what was held. Nothing can be pushed any more."""
        self._scan.ended = True
        self._go_on()
        self._sink.finish()
        return merged(self._sink.take())

    def _go_on(self) -> None:
        if self._reading is None:
            self._scan.at = len(self._scan.text)
            return
        try:
            next(self._reading)
        except StopIteration:
            self._reading = None


def _read(scan: Scan, sink: Sink, dialect: Dialect, tools: ToolSet | None, is_open: bool) -> Reading[None]:
    yield  # nothing has come yet
    reasoning = dialect.reasoning_format
    if reasoning is not None and reasoning.opening:
        yield from think.read(scan, sink, reasoning.opening, reasoning.closing, is_open=is_open)
    if "harmony" in (dialect.tools, dialect.reasoning):
        yield from harmony.read(scan, sink, tools)
    elif tools is not None and dialect.tool_format is not None:
        yield from dialect.tool_format.read(scan, sink, tools)
    while True:  # text is all there is
        if scan.at < len(scan.text):
            sink.text(scan.take(len(scan.text)))
        if scan.ended:
            return
        yield
