"""What a gateway remembers of requests, how much of it, under which names, and the timeline that it makes."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from common.protocol import errors
from common.protocol.explain_messages import Explained, ExplainedEvent, Explanation, WorkerEvent, WorkerRecord
from common.protocol.explain_messages import Explanations as Answer
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message, SamplingParams
from services.gateway import history
from services.gateway.actions import Limits, State
from services.gateway.batches.records import LineKind
from services.gateway.batches.results import answered, refused
from services.gateway.explainer import Explainer
from services.gateway.explanations import MAX_ENDED, Explanations, Told, explanation, record_of, workers_of
from services.gateway.handoff import handed_off, handoff_failed, redirect
from services.gateway.requests import GenerationRequest, Request
from services.gateway.routes import Choice, Costed
from services.gateway.views.registry import new_id
from tests.unit.gateway_request import D1, D2, GATEWAY, P1, P2, PROMPT, frame


def asked(
    id: str, *, shown_id: str = "", tenant: str = "", received_at: float = 0.0, now: float = 1.0, only: WorkerRef | None = None
) -> Request:
    wanted = GenerationRequest(
        id=id,
        prompt=PROMPT,
        sampling=SamplingParams(max_tokens=8),
        deadline_s=60.0,
        shown_id=shown_id,
        tenant=tenant,
        received_at=received_at,
    )
    return Request(wanted, wire_id=f"{id}/1/1", gateway=GATEWAY, limits=Limits(), now=now, wall_ms=1000, only=only)


def running(*requests: Request) -> list[tuple[str, dict[str, Request]]]:
    return [("tiny", {request.id: request for request in requests})]


def told(request: Request, *answers: Told, now: float) -> Explanation:
    record = record_of(request, "tiny", now)
    return explanation(record, answers, gateway="gateway-1", silent={}, now=now, wall_s=1000.0)


def names(one: Explanation, service: str = "gateway") -> list[tuple[str, float]]:
    return [(event.event, event.at_ms) for event in one.events if event.service == service]


def event(one: Explanation, name: str) -> ExplainedEvent:
    return next(each for each in one.events if each.event == name)


# -- the ring


def test_the_ring_forgets_the_oldest() -> None:
    kept = Explanations()
    for number in range(MAX_ENDED + 1):
        kept.add(asked(f"r{number}"), "tiny", 2.0)
    assert kept.find("r0", [], 3.0) == []
    assert [record.id for record in kept.find("r1", [], 3.0)] == ["r1/1/1"]
    assert [record.id for record in kept.find(f"r{MAX_ENDED}", [], 3.0)] == [f"r{MAX_ENDED}/1/1"]


def test_canaries_are_left_out() -> None:
    kept = Explanations()
    kept.add(asked("canary", only=D1), "tiny", 2.0)
    assert kept.find("canary", running(asked("canary", only=D1)), 3.0) == []


def test_a_request_is_found_by_each_of_its_names_while_it_runs_and_afterwards() -> None:
    kept, request = Explanations(), asked("chatcmpl-ab", shown_id="my-id")
    for name in ("chatcmpl-ab", "my-id", "chatcmpl-ab/1/1"):
        assert [record.client_id for record in kept.find(name, running(request), 3.0)] == ["chatcmpl-ab"]
    kept.add(request, "tiny", 2.0)
    for name in ("chatcmpl-ab", "my-id", "chatcmpl-ab/1/1"):
        assert [record.client_id for record in kept.find(name, [], 3.0)] == ["chatcmpl-ab"]
    for name in ("chatcmpl-a", "chatcmpl-abc", "", "my", "tiny"):
        assert kept.find(name, running(request), 3.0) == []


@pytest.mark.parametrize("kind", get_args(LineKind))
def test_the_request_of_a_batch_s_line_is_found_by_the_line_s_id(kind: LineKind) -> None:
    kept, id, other = Explanations(), new_id(kind), new_id(kind)
    for each in (f"{id}-0", f"{id}-1", other):
        kept.add(asked(each), "tiny", 2.0)
    results = (answered("mine", id, b"{}"), refused("mine", id, errors.NoWorkers("none")))
    lines = [msgspec.json.decode(result.data)["id"] for result in results]
    for line in lines:
        assert line.startswith("batch_req_")
        assert [record.client_id for record in kept.find(line, [], 3.0)] == [f"{id}-0", f"{id}-1"]
        assert kept.find(line[:-1], [], 3.0) == kept.find("batch_req_", [], 3.0) == []


def test_choices_are_found_together_and_of_two_requests_of_one_name_the_later() -> None:
    kept = Explanations()
    for id in ("first-0", "first-1", *(f"second-{number}" for number in range(12))):
        kept.add(asked(id, shown_id="again"), "tiny", 2.0)
    assert [record.client_id for record in kept.find("again", [], 3.0)] == [f"second-{number}" for number in range(12)]
    assert [record.client_id for record in kept.find("first", [], 3.0)] == ["first-0", "first-1"]
    assert [record.client_id for record in kept.find("first-1", [], 3.0)] == ["first-1"]


def test_the_reading_of_a_prompt_is_found_with_its_answer_or_alone() -> None:
    """`echo` with `logprobs` reads the prompt first, and with `max_tokens` 0 does nothing else."""
    kept = Explanations()
    for id in ("one-prompt", "one", "two-0-prompt", "two-1-prompt", "two-1", "two-0", "alone-prompt"):
        kept.add(asked(id, shown_id=f"my-{id.partition('-')[0]}"), "tiny", 2.0)
    for name, found in {
        "one": ["one-prompt", "one"],
        "my-one": ["one-prompt", "one"],
        "two": ["two-0-prompt", "two-0", "two-1-prompt", "two-1"],
        "my-two": ["two-0-prompt", "two-0", "two-1-prompt", "two-1"],
        "two-1": ["two-1-prompt", "two-1"],
        "two-1-prompt": ["two-1-prompt"],
        "alone": ["alone-prompt"],
        "alone-prompt/1/1": ["alone-prompt"],
    }.items():
        assert [record.client_id for record in kept.find(name, [], 3.0)] == found, name


def test_a_prompt_that_is_read_is_told_whole() -> None:
    wanted = GenerationRequest(id="r-prompt", prompt=PROMPT[:1], given=PROMPT[1:], sampling=SamplingParams(), deadline_s=60.0)
    request = Request(wanted, wire_id="r-prompt/1/1", gateway=GATEWAY, limits=Limits(), now=1.0, wall_ms=1000, only=None)
    request.place(P1, None, 1.1)
    request.accepted(P1, 1, 1.2)
    request.frame(P1, frame(request, 0, PROMPT[1:]), 1.5)
    assert request.first_token_at == 1.5
    one = told(request, now=2.0)
    assert (one.prompt_tokens, one.output_tokens) == (len(PROMPT), 0)
    assert one.first_token_ms is None and "first token" not in [event.event for event in one.events], "nothing was generated"


def test_a_tenant_finds_its_own_alone() -> None:
    kept = Explanations()
    kept.add(asked("a", shown_id="same", tenant="acme"), "tiny", 2.0)
    kept.add(asked("z", shown_id="same", tenant="zoo"), "tiny", 2.0)
    assert [record.client_id for record in kept.find("same", [], 3.0, "acme")] == ["a"]
    assert kept.find("a", [], 3.0, "zoo") == []
    assert kept.find("a", running(asked("a", tenant="")), 3.0, "zoo") == []
    assert [record.client_id for record in kept.find("same", [], 3.0)] == ["z"]


def test_a_history_is_bounded() -> None:
    request = asked("r")
    for number in range(100):
        choice = Choice(P1, D1, 3, reason="path_given", costs=[Costed("prefill", P1.id, 0.1, 0)])
        request.place(P1, D1, float(number))
        request.history.routed(float(number), request.attempt, choice)
        request.history.stalled(float(number), number + 1.5, number)
    kept = request.history
    assert (len(kept.routes), len(kept.stalls), len(kept.steps)) == (history.MAX_ROUTES, history.MAX_STALLS, history.MAX_STEPS)
    assert [kept.routes[0].attempt, kept.routes[-1].attempt] == [1, 100]
    placed = [event for event in told(request, now=200.0).events if event.event == "routed"]
    assert len(placed) > history.MAX_COMPARISONS and all(event.facts["reason"] for event in placed), "each has its reason"
    assert sum(bool(route.costs) for route in kept.routes) == history.MAX_COMPARISONS


def test_hand_offs_that_were_refused_push_out_no_placement() -> None:
    request = asked("r")
    request.history.routed(2.0, 1, Choice(P1, D1, 3, reason="path_given"))
    request.place(P1, D1, 2.0)
    for number in range(100):
        request.enter(State.HANDING_OFF, 3.0 + number)
    request.enter(State.DECODING, 200.0)
    steps = [event for event in told(request, now=201.0).events if event.event != "stalled"]
    assert [event.event for event in steps[:4]] == ["received", "queued", "routed", "handing off"]
    assert steps[3].at_ms == 2000.0 and steps[-1].event == "decoding"
    assert len(steps) == history.MAX_STEPS + 1


# -- the timeline


def served() -> Request:
    request = asked("r", received_at=0.5)
    costs = [
        Costed("prefill", "prefill-1", 0.03, 2),
        Costed("decode", "decode-2", 0.004, 0),
        Costed("decode", "decode-1", 0.002, 0),
    ]
    request.history.routed(1.25, 1, Choice(P1, D1, 1, costs).because("long_uncached_prompt"))
    request.place(P1, D1, 1.25)
    request.accepted(P1, 1, 1.5)
    request.frame(P1, frame(request, 0, [77123]), 2.0)
    handed_off(request, 1, D1, 2.5)
    request.frame(D1, frame(request, 1, [77124]), 3.0)
    return request


def test_the_gateways_part_is_in_ms_since_the_edge_had_the_request() -> None:
    request = served()
    request.frame(D1, frame(request, 2, [102], finish="stop"), 3.5)
    one = told(request, now=3.5)
    assert names(one) == [
        ("received", 0.0),
        ("queued", 500.0),
        ("routed", 750.0),
        ("accepted", 1000.0),
        ("handing off", 1500.0),
        ("first token", 1500.0),
        ("decoding", 2000.0),
        ("last token", 3000.0),
        ("ended", 3000.0),
    ]
    assert (one.finish, one.code, one.state, one.output_tokens, one.first_token_ms) == ("stop", "", "done", 3, 1500.0)
    assert one.duration_ms == 3000.0 and one.received_at == 997.0
    assert event(one, "queued").duration_ms == 250.0 and event(one, "decoding").duration_ms == 1000.0


def test_a_route_tells_why_and_what_others_would_have_cost() -> None:
    routed = event(told(served(), now=3.0), "routed")
    assert routed.facts == {
        "prefill": "prefill-1",
        "decode": "decode-1",
        "path": "prefill",
        "reason": "the uncached part of the prompt is long",
        "uncached_tokens": 1,
    }
    assert [(each.part, each.worker, each.cost_ms, each.cached_tokens, each.chosen) for each in routed.candidates] == [
        ("prefill", "prefill-1", 30.0, 2, True),
        ("decode", "decode-1", 2.0, 0, True),
        ("decode", "decode-2", 4.0, 0, False),
    ]


def test_a_worker_that_dies_is_a_move_and_names_who_was_left() -> None:
    request = served()
    request.worker_lost(D1, 4.0)
    request.place(P1, D2, 4.5)
    request.end(None, errors.Cancelled("the request was cancelled"))
    one = told(request, now=5.0)
    assert event(one, "moved").facts == {"error": "worker_lost", "decode": "decode-1"} and event(one, "moved").at_ms == 3500.0
    assert names(one)[-1] == ("ended", 4500.0)
    assert event(one, "ended").facts == {"finish": "error", "error": "cancelled"}
    assert workers_of(record_of(request, "tiny", 5.0)) == [P1, D1, D2]


def test_a_refusal_is_a_retry() -> None:
    request = asked("r")
    request.place(P1, D1, 1.0)
    request.refused(P1, 1, errors.OutOfCredits("full"), 1.5)
    assert event(told(request, now=2.0), "retried").facts["error"] == "out_of_credits"


class AskedHost:
    """A gateway whose workers all answer that they know nothing of a request."""

    clock = staticmethod(lambda: 5.0)
    ref = GATEWAY

    async def ask(self, to: WorkerRef, message: Message, timeout_s: float, *, repeat: bool = False) -> Message:
        return Explained(worker=to, now=5.0, records=[])


async def test_of_workers_that_know_nothing_only_those_that_took_the_request_are_named() -> None:
    request = asked("r")
    request.place(P1, D1, 1.0)
    request.refused(P1, 1, errors.OutOfCredits("full"), 1.5)
    request.place(P2, D1, 2.0)
    request.accepted(P2, 2, 2.1)
    handoff_failed(request, P2, 2, "out_of_blocks", 3.0)
    redirect(request, D2, 3.5)
    handed_off(request, 2, D2, 4.0)
    explainer = Explainer(AskedHost(), lambda: running(request), reply_prefixes=(), tenants=False)
    answer = msgspec.json.decode(await explainer.explain("r", None), type=Answer)
    assert set(answer.requests[0].silent) == {P2.id, D2.id}


def test_a_stall_is_told_when_it_is_over_and_while_it_lasts() -> None:
    request = served()
    request.frame(D1, frame(request, 2, [102]), 5.5)
    (stalled,) = [each for each in told(request, now=6.0).events if each.event == "stalled"]
    assert (stalled.at_ms, stalled.duration_ms) == (2500.0, 2500.0)
    (_, second) = [each for each in told(request, now=9.0).events if each.event == "stalled"]
    assert (second.at_ms, second.duration_ms) == (5000.0, 3500.0)


def test_workers_tell_their_part_on_their_own_clocks() -> None:
    prefill = WorkerRecord(
        attempt=1,
        admitted_at=101.5,
        first_token_at=102.0,
        left_at=102.5,
        prompt_tokens=3,
        local_tokens=1,
        events=[
            WorkerEvent("prefix", 101.5, 101.6, 1),
            WorkerEvent("chunk", 101.75, 102.0, 2),
            WorkerEvent("part", 102.0, 102.0, 2, peer="decode-1"),
            WorkerEvent("hand-off", 102.0, 102.25, peer="decode-1", facts=(("sent_us", 300),)),
        ],
    )
    pull = WorkerEvent("pull", 2.25, 2.5, 0, peer="prefill-1", error="stale_handle")
    decode = WorkerRecord(
        attempt=1,
        admitted_at=2.25,
        events=[
            WorkerEvent("part", 2.0, 2.25, 2, peer="prefill-1", facts=(("queued_us", 5), ("copy_us", 70))),
            pull,
            WorkerEvent("chunk", 2.5, 2.75, 4),
        ],
        error="internal_error",
        left_at=3.0,
        recomputed_tokens=4,
    )
    answers = [
        Told(Explained(worker=P1, now=0.0, records=[prefill]), -100.0),
        Told(Explained(worker=D1, now=0.0, records=[decode]), 0.0),
    ]
    one = told(served(), *answers, now=3.5)
    assert names(one, "prefill") == [
        ("admitted", 1000.0),
        ("kvstore", 1000.0),
        ("prefill chunk", 1250.0),
        ("KV part", 1500.0),
        ("hand-off", 1500.0),
        ("token computed", 1500.0),
        ("let go", 2000.0),
    ]
    assert event(one, "admitted").facts == {"local_hit_tokens": 1} and event(one, "kvstore").facts == {"kvstore_hit_tokens": 1}
    assert event(one, "hand-off").facts == {"to": "decode-1", "sent_us": 300}
    told_part, copied_part = (each for each in one.events if each.event == "KV part")
    assert told_part.facts == {"tokens": 2, "to": "decode-1"} and told_part.duration_ms is None
    assert copied_part.facts == {"tokens": 2, "from": "prefill-1", "queued_us": 5, "copy_us": 70}
    assert copied_part.duration_ms == 250.0
    received = event(one, "KV received")
    assert received.facts["error"] == "stale_handle" and received.facts["recomputed_tokens"] == 4
    assert names(one, "decode")[-1] == ("gave up", 2500.0)
    assert [each.at_ms for each in one.events] == sorted(each.at_ms for each in one.events)


def test_no_token_is_in_it() -> None:
    encoded = msgspec.json.encode(told(served(), now=3.5))
    assert all(str(token).encode() not in encoded for token in (77123, 77124))
