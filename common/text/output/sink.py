"""Where parsers deliver what they have read.

White space between reasoning, text and calls says nothing and is left out: behind `</think>`, before and after a call. So it is
held until what follows is known.
"""

from __future__ import annotations

from collections.abc import Callable

from common.text.output.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text

_MAX_SPACE = 1024
"""White space that is held; of more, the first is delivered."""


class Sink:
    """Collects events for `take`. `call_id` names call number n. With `max_calls` delivered, `is_full` is true, and the rest of
    the answer is dropped."""

    def __init__(self, call_id: Callable[[int], str], *, trims: bool, max_calls: int | None = None) -> None:
        """`trims`: white space may have to be left out; without it, text is never held."""
        self.num_calls = 0
        self.is_full = False
        self._call_id = call_id
        self._trims = trims
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._space = ""
        self._at_edge = False  # what comes next begins behind reasoning or a call
        self.in_reasoning = False

    @property
    def num_held(self) -> int:
        """Characters of white space that are held."""
        return len(self._space)

    def take(self) -> list[Event]:
        """Return what is new."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        if not self.is_full and (text := self._trimmed(text)):
            self._events.append(Text(text))

    def open_reasoning(self) -> None:
        self._leave_out_space()
        self.in_reasoning = True

    def reasoning(self, text: str) -> None:
        if not self.is_full and (text := self._trimmed(text)):
            self._events.append(Reasoning(text))

    def close_reasoning(self) -> None:
        self._leave_out_space()
        self.in_reasoning = False

    def start(self, name: str) -> None:
        """Begin a call. White space before it is left out."""
        if self.is_full:
            return
        self._leave_out_space()
        self._events.append(CallStart(self.num_calls, self._call_id(self.num_calls), name))

    def arguments(self, text: str) -> None:
        if text and not self.is_full:
            self._events.append(CallArguments(self.num_calls, text))

    def end(self) -> None:
        """End the call that `start` began."""
        if self.is_full:
            return
        self._events.append(CallEnd(self.num_calls))
        self.num_calls += 1
        self._leave_out_space()
        self.is_full = self.num_calls == self._max_calls

    def finish(self) -> None:
        """Nothing follows: space at the end of a text belongs to it, behind reasoning or a call it is left out."""
        if self._space and not self.is_full and not self.in_reasoning:
            self._events.append(Text(self._space))
        self._space = ""

    def _leave_out_space(self) -> None:
        self._space = ""
        self._at_edge = True

    def _trimmed(self, text: str) -> str:
        if not self._trims:
            return text
        if self._at_edge:
            text = text.lstrip()
            if not text:
                return ""
            self._at_edge = False
        body = text.rstrip()
        if not body:
            text, self._space = "", self._space + text
        elif len(body) < len(text):
            text, self._space = self._space + body, text[len(body) :]
        elif self._space:
            text, self._space = self._space + text, ""
        if len(self._space) > _MAX_SPACE:
            text += self._space[:-_MAX_SPACE]
            self._space = self._space[-_MAX_SPACE:]
        return text
