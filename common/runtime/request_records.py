"""What a kvstore or a draft worker remembers of requests, for `penstock explain`, and the spans that it makes of that.

    note ─► a record in a ring, by request and attempt ─► explain
         └► a span at once, if the request is traced

The ring holds the last MAX_REQUESTS requests, MAX_ATTEMPTS of each with MAX_EVENTS events: some 2 MB as a rule, 16 MB at most.
Names, times and numbers are kept, and neither text nor tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from common.protocol.explain_messages import Explained, RequestContext, WorkerEvent, WorkerRecord
from common.protocol.handles import WorkerRef
from common.runtime.spans import Fact, Span
from common.runtime.tracing import Tracing

MAX_REQUESTS = 2048
MAX_ATTEMPTS = 4
MAX_EVENTS = 16
MAX_NAME = 256
"""Characters of a request's name; one that is longer is not remembered."""


class RequestRecords:
    """`tracing`, `me`: asked for each event, since a worker takes a new epoch when it is fenced."""

    def __init__(self, tracing: Callable[[], Tracing], me: Callable[[], WorkerRef], clock: Callable[[], float]) -> None:
        self._tracing = tracing
        self._me = me
        self._clock = clock
        self._requests: OrderedDict[str, dict[int, list[WorkerEvent]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def note(self, context: RequestContext, event: WorkerEvent) -> None:
        """Something has ended that was done for a request. Nothing is noted where the sender did not name one."""
        if not 0 < len(context.request) <= MAX_NAME:
            return
        attempts = self._requests.pop(context.request, {})
        self._requests[context.request] = attempts
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        events = attempts.setdefault(context.attempt, [])
        if len(attempts) > MAX_ATTEMPTS:
            del attempts[min(attempts)]
        if len(events) >= MAX_EVENTS:
            del events[1]
        events.append(event)
        if context.trace and (tracing := self._tracing()).enabled:
            tracing.record([self._span(context, event)], self._clock())

    def explain(self, request: str) -> Explained:
        """Return what is remembered of a request."""
        attempts = self._requests.get(request, {})
        records = [
            WorkerRecord(attempt=attempt, admitted_at=events[0].began_at, events=events)
            for attempt, events in attempts.items()
            if events
        ]
        return Explained(worker=self._me(), now=self._clock(), records=records)

    def _span(self, context: RequestContext, event: WorkerEvent) -> Span:
        me = self._me()
        facts: dict[str, Fact] = {f"penstock.{name}": value for name, value in event.facts}
        if event.num_bytes:
            facts["penstock.bytes"] = event.num_bytes
        if event.peer:
            facts["penstock.peer"] = event.peer
        return Span(
            name=f"{me.role} {event.name}",
            parent=context.trace,
            began_at=event.began_at,
            ended_at=event.ended_at,
            facts=facts,
            error=event.error,
        )
