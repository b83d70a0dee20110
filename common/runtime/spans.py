"""What a trace is made of, whoever exports it: intervals with a name, a parent and facts. Pure.

Spans are made from the typed events that a request leaves where it passes (`History` at a gateway, `Timeline` at a worker),
once it has ended there. Nothing of its text is in them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

Fact = str | bool | int | float | list[str]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """`parent`: the traceparent of the span around it, empty for the root of a trace; `own`: its own traceparent, empty if it
    has no children. `began_at` and `ended_at`: seconds on the clock of `Tracing.record`. `error`: the code of what ended it;
    empty: it ended well. `state`: the trace's `tracestate`."""

    name: str
    began_at: float
    ended_at: float
    parent: str = ""
    own: str = ""
    kind: Literal["internal", "server"] = "internal"
    facts: dict[str, Fact] = {}
    error: str = ""
    state: str = ""


class Begun(NamedTuple):
    """The span of a request that came from outside: its own traceparent; that of the client's span, empty without one; the
    client's tracestate."""

    own: str
    parent: str
    state: str
