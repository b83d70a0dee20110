"""What kvstores and draft workers remember of requests, how much, and the spans that come of it."""

from __future__ import annotations

from collections.abc import Iterable

from common.protocol.explain_messages import RequestContext, WorkerEvent
from common.protocol.handles import WorkerRef
from common.protocol.trace_context import traceparent
from common.runtime.request_records import MAX_ATTEMPTS, MAX_EVENTS, MAX_NAME, MAX_REQUESTS, RequestRecords
from common.runtime.spans import Begun, Span
from services.draft.drafting_notes import DraftingNotes

ME = WorkerRef("kvstore", "kvstore-1", 1)
DECODE = WorkerRef("decode", "decode-1", 1)
EVENT = WorkerEvent("lookup", 9.0, 10.0, peer="prefill-1", facts=(("memory_hit_blocks", 3),))


class Recording:
    """Tracing that keeps the spans."""

    enabled = True

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def begin(self, traceparent: str, tracestate: str) -> Begun | None:
        return None

    def record(self, spans: Iterable[Span], now: float) -> None:
        self.spans += spans

    async def close(self) -> None:
        pass


def records(tracing: Recording | None = None) -> RequestRecords:
    kept = tracing or Recording()
    return RequestRecords(lambda: kept, lambda: ME, lambda: 20.0)


def test_a_request_is_remembered_by_attempt() -> None:
    kept = records()
    kept.note(RequestContext("r", 1), EVENT)
    kept.note(RequestContext("r", 2), EVENT)
    kept.note(RequestContext("other", 1), EVENT)
    told = kept.explain("r")
    assert (told.worker, told.now) == (ME, 20.0)
    assert [(record.attempt, record.admitted_at, record.events) for record in told.records] == [
        (1, 9.0, [EVENT]),
        (2, 9.0, [EVENT]),
    ]
    assert kept.explain("nobody").records == []


def test_what_is_remembered_is_bounded() -> None:
    kept = records()
    for number in range(MAX_REQUESTS + 5):
        kept.note(RequestContext(f"r{number}", 1), EVENT)
    assert len(kept) == MAX_REQUESTS and kept.explain("r4").records == [] and kept.explain("r5").records
    for attempt in range(10):
        for _ in range(MAX_EVENTS + 3):
            kept.note(RequestContext("r5", attempt), EVENT)
    assert [record.attempt for record in kept.explain("r5").records] == list(range(10 - MAX_ATTEMPTS, 10))
    assert {len(record.events) for record in kept.explain("r5").records} == {MAX_EVENTS}
    for name in ("", "x" * (MAX_NAME + 1)):
        kept.note(RequestContext(name, 1), EVENT)
        assert kept.explain(name).records == []


def test_an_event_of_a_traced_request_is_a_span_below_the_sender() -> None:
    tracing, parent = Recording(), traceparent("ab" * 16, "cd" * 8)
    kept = records(tracing)
    kept.note(RequestContext("r", 1), EVENT)
    assert not tracing.spans
    kept.note(RequestContext("r", 1, parent), EVENT)
    (span,) = tracing.spans
    assert (span.name, span.parent, span.began_at, span.ended_at) == ("kvstore lookup", parent, 9.0, 10.0)
    assert span.facts == {"penstock.memory_hit_blocks": 3, "penstock.peer": "prefill-1"}


def test_a_draft_worker_tells_of_a_mirror_while_it_is_held_and_afterwards() -> None:
    notes, key = DraftingNotes(records()), (DECODE, "r")
    notes.updated(key, None, 1.0)
    assert len(notes) == 0, "a decode worker that names no request"
    notes.updated(key, RequestContext("r", 2), 1.0)
    notes.updated(key, None, 2.0)
    notes.proposed(key, 5)
    notes.resynced(key)
    facts = (("updates", 2), ("proposals_sent", 1), ("proposed_tokens", 5), ("resyncs", 1))
    (held,) = notes.explain("r", 3.0).records
    assert (held.attempt, held.events) == (2, [WorkerEvent("drafting", 1.0, 3.0, peer="decode-1", facts=facts)])
    notes.closed(key, 4.0)
    notes.closed(key, 5.0)
    (left,) = notes.explain("r", 9.0).records
    assert left.events == [WorkerEvent("drafting", 1.0, 4.0, peer="decode-1", facts=facts)] and len(notes) == 0
    notes.updated(key, RequestContext("r", 3), 5.0)
    notes.all_closed(6.0)
    assert [record.attempt for record in notes.explain("r", 9.0).records] == [2, 3]
