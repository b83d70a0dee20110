"""W3C trace context as it travels with a request: the text of a `traceparent`, and the ids in it.

A request's spans are children of one another across processes. The id of an attempt's span is a function of the request's, so
that a task can name its parent before that span is made.
"""

from __future__ import annotations

import hashlib

ID_BYTES = 8


def traceparent(trace_id: str, span_id: str) -> str:
    """Return the text for a sampled span. `trace_id`: 32 hexadecimal digits; `span_id`: 16."""
    return f"00-{trace_id}-{span_id}-01"


def trace_id_of(parent: str) -> str:
    """Return the trace's id of a text that `traceparent` made."""
    return parent[3:35]


def span_id_of(parent: str) -> str:
    """Return the span's id of a text that `traceparent` made."""
    return parent[36:52]


def child_of(parent: str, name: str) -> str:
    """Return the traceparent of the child called `name`, always the same for the same parent. Empty stays empty."""
    if not parent:
        return ""
    digest = hashlib.blake2b(f"{span_id_of(parent)}/{name}".encode(), digest_size=ID_BYTES).hexdigest()
    return traceparent(trace_id_of(parent), digest)
