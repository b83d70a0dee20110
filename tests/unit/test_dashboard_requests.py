"""Requests as the dashboard shows them: their steps and counts, in bounded memory, under names that cancel nothing."""

from __future__ import annotations

import msgspec

from common.protocol.errors import WorkerLost
from services.gateway import request_rows
from services.gateway.actions import State
from services.gateway.handoff import handed_off
from services.gateway.history import MAX_STEPS
from services.gateway.request_rows import MAX_ENDED, MAX_RECENT, EndedRequests, flow_of, request_row, shown_name
from services.gateway.views.registry import VIEWS, new_id
from tests.unit.gateway_request import D1, D2, P1, frame, in_state, make


def test_a_request_that_moved_shows_where_it_was_and_why() -> None:
    request = make(max_tokens=4)
    request.place(P1, D1, 0.1)
    request.accepted(P1, 1, 0.2)
    request.frame(P1, frame(request, 0, [100]), 0.3)
    handed_off(request, 1, D1, 0.4)
    request.next_attempt(WorkerLost("gone"), 0.5, counted=False)
    request.place(None, D2, 0.6)
    request.frame(D2, frame(request, 1, [101, 102, 103], finish="length"), 0.7)
    row = request_row(request, "tiny", 0.7)
    steps = [(step.at_ms, step.state, step.attempt, step.prefill, step.decode, step.reason) for step in row.steps]
    assert steps == [
        (0.0, "queued", 0, "", "", ""),
        (100.0, "placing", 1, "prefill-1", "decode-1", ""),
        (200.0, "prefilling", 1, "prefill-1", "decode-1", ""),
        (300.0, "handing_off", 1, "prefill-1", "decode-1", ""),
        (400.0, "decoding", 1, "prefill-1", "decode-1", ""),
        (500.0, "queued", 1, "", "", "worker_lost"),
        (600.0, "placing", 2, "", "decode-2", ""),
        (700.0, "decoding", 2, "", "decode-2", ""),
    ]
    assert (row.first_token_ms, row.tokens, row.finish, row.code) == (300.0, 4, "length", "")


def test_nothing_of_prompt_or_answer_is_shown() -> None:
    request = in_state(State.DECODING)
    row = msgspec.to_builtins(request_row(request, "tiny", 1.0))
    assert row["prompt_tokens"] == 3 and row["tokens"] == 1
    known = {"name", "model", "state", "age_ms", "prompt_tokens", "cached_tokens", "tokens", "max_tokens", "first_token_ms"}
    assert row.keys() == known | {"steps", "finish", "code", "number"}


def test_the_history_of_a_request_that_never_rests_is_bounded() -> None:
    request = make()
    for turn in range(MAX_STEPS):
        request.place(P1, D1, float(turn))
        request.next_attempt(WorkerLost("gone"), float(turn), counted=False)
    steps = request.history.steps
    assert len(steps) == MAX_STEPS and steps[0].at == 0.0 and steps[-1].at == MAX_STEPS - 1


def test_a_shown_name_is_not_enough_to_cancel_a_request() -> None:
    for kind in VIEWS:
        minted = new_id(kind)
        shown = shown_name(minted)
        assert minted.startswith(shown) and len(minted) - len(shown) >= 16
        assert shown_name(f"{minted}-3") == f"{shown}-3"
    assert len(shown_name("x" * 500)) < 30


def test_ended_requests_are_bounded_and_given_out_once() -> None:
    ended = EndedRequests()
    for _ in range(MAX_ENDED + 10):
        request = in_state(State.DECODING)
        request.end("stop", None)
        ended.add(request, "tiny", 1.0)
    assert ended.num_ended == MAX_ENDED + 10 and ended.tokens == ended.num_ended
    assert len(list(ended.since(0))) == MAX_RECENT
    assert [row.number for row in ended.since(ended.num_ended - 2)] == [ended.num_ended - 1, ended.num_ended]
    assert list(ended.since(ended.num_ended)) == []
    assert ended.find("r") is not None and ended.find("s") is None


def test_canaries_are_no_requests_of_anyones() -> None:
    canary = in_state(State.DECODING)
    canary.only = D1
    ended = EndedRequests()
    ended.add(canary, "tiny", 1.0)
    flow = flow_of([canary, in_state(State.QUEUED), in_state(State.HANDING_OFF), in_state(State.DECODING)])
    assert (flow.queued, flow.handing_off, flow.decoding, flow.tokens) == (1, 1, 1, 2)
    assert ended.num_ended == 0 and request_rows.newest({"c": canary}, "tiny", 1.0) == []


def test_a_request_is_found_by_the_name_that_is_shown() -> None:
    request = make()
    request.client_id = "chatcmpl-00112233445566778899aabb-1"
    assert request_rows.find({request.id: request}, "chatcmpl-00112233-1") is request
    assert request_rows.find({request.id: request}, "chatcmpl-00112233") is None
    assert request_rows.find({request.id: request}, "") is None
