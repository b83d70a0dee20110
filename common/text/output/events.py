"""What a model's answer is made of, in the order in which it came.

Text that a model writes is one of these: its reasoning, text for the reader, or calls of tools. A call is a start, its
arguments in pieces (together the JSON text that the model wrote, valid or not), and an end. Calls are numbered from 0.
"""

from __future__ import annotations

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of what the model thinks before it answers."""

    text: str


class Text(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer's text."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """The model calls tool `name`. `id` is what the tool's result will refer to."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the arguments of call `index`."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """Call `index` is complete, or was cut by the end of the answer."""

    index: int


Event = Reasoning | Text | CallStart | CallArguments | CallEnd


def merged(events: list[Event]) -> list[Event]:
    """Return `events` with neighbouring pieces of the same kind put together."""
    if len(events) < 2:
        return events
    result: list[Event] = []
    for event in events:
        before = result[-1] if result else None
        match event, before:
            case (Text(), Text()) | (Reasoning(), Reasoning()):
                result[-1] = type(event)(before.text + event.text)
            case CallArguments(), CallArguments() if before.index == event.index:
                result[-1] = CallArguments(event.index, before.text + event.text)
            case _:
                result.append(event)
    return result
