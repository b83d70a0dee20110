"""What a request's history at the gateway becomes."""

from __future__ import annotations

from common.protocol import errors
from common.protocol.messages import SamplingParams
from common.protocol.trace_context import child_of, traceparent
from common.runtime.spans import Span
from services.gateway.actions import Actions, Ask, Limits
from services.gateway.handoff import handed_off
from services.gateway.request_spans import spans_of
from services.gateway.requests import GenerationRequest, Request
from tests.unit.gateway_request import D1, D2, GATEWAY, P1, P2, PROMPT, frame, make

PARENT = traceparent("ab" * 16, "cd" * 8)


def traced() -> Request:
    asked = GenerationRequest(id="r", prompt=PROMPT, sampling=SamplingParams(max_tokens=8), deadline_s=60.0, trace=PARENT)
    return Request(asked, wire_id="r/1", gateway=GATEWAY, limits=Limits(), now=0.0, wall_ms=1000)


def attempt_asked(actions: Actions) -> str:
    """The traceparent in the one task that is to be sent."""
    (ask,) = actions
    assert isinstance(ask, Ask)
    return ask.message.generation.trace


def told(spans: list[Span]) -> list[tuple[str, float, float, str]]:
    return [(span.name, span.began_at, span.ended_at, span.error) for span in spans]


def test_a_good_request_has_one_attempt_with_four_parts() -> None:
    request = traced()
    attempt = child_of(PARENT, "r/1/1")
    assert attempt_asked(request.place(P1, D1, 1.0)) == attempt
    request.accepted(P1, 1, 2.0)
    request.frame(P1, frame(request, 0, [100]), 3.0)
    handed_off(request, 1, D1, 4.0)
    request.frame(D1, frame(request, 1, [101], finish="stop"), 5.0)
    spans = list(spans_of(request, 5.0))
    assert told(spans) == [
        ("queue", 0.0, 1.0, ""),
        ("attempt", 1.0, 5.0, ""),
        ("placement", 1.0, 2.0, ""),
        ("prefill", 2.0, 3.0, ""),
        ("hand-off", 3.0, 4.0, ""),
        ("decode", 4.0, 5.0, ""),
    ]
    assert [span.parent for span in spans] == [PARENT, PARENT, *[attempt] * 4]
    assert spans[1].own == attempt
    assert spans[1].facts["penstock.prefill.worker"] == P1.id and spans[1].facts["penstock.decode.worker"] == D1.id


def test_a_lost_worker_is_a_failed_attempt_and_another_one() -> None:
    request = traced()
    request.place(P1, D1, 1.0)
    request.worker_lost(P1, 2.0)
    request.place(P2, D2, 4.0)
    request.accepted(P2, 2, 5.0)
    request.fail(errors.Cancelled("left"))
    spans = list(spans_of(request, 6.0))
    assert told(spans) == [
        ("queue", 0.0, 1.0, ""),
        ("attempt", 1.0, 2.0, "worker_lost"),
        ("placement", 1.0, 2.0, "worker_lost"),
        ("queue", 2.0, 4.0, ""),
        ("attempt", 4.0, 6.0, "cancelled"),
        ("placement", 4.0, 5.0, ""),
        ("prefill", 5.0, 6.0, "cancelled"),
    ]
    assert [span.facts["penstock.attempt"] for span in spans if span.name in ("queue", "attempt")] == [1, 1, 2, 2]


def test_one_that_never_got_a_worker_has_waited_in_vain() -> None:
    request = traced()
    request.fail(errors.NoWorkers("none"))
    assert told(list(spans_of(request, 7.0))) == [("queue", 0.0, 7.0, "no_workers")]


def test_a_request_without_a_trace_asks_for_none() -> None:
    assert attempt_asked(make().place(P1, D1, 1.0)) == ""
