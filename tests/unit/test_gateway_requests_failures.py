"""One request through every failure of a worker or the bus: it goes on with the next token, or ends typed."""

from __future__ import annotations

import pytest

from common.protocol import errors
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Redirect, SamplingParams
from services.gateway.actions import Ask, Ended, Free, Limits, Requeue, Reroute, State, Tell
from services.gateway.handoff import handoff_failed, redirect
from services.gateway.losses import Suspicion
from services.gateway.patience import tick
from services.gateway.requests import GenerationRequest, Request
from tests.unit.gateway_request import (
    D1,
    D2,
    GATEWAY,
    HOLDERS,
    P1,
    P2,
    PROMPT,
    fetches,
    frame,
    freed,
    in_state,
    kinds,
    make,
    next_task,
)

# -- workers die


def test_a_prefill_worker_lost_before_its_first_token_is_replaced() -> None:
    request = in_state(State.PREFILLING)
    actions = request.worker_lost(P1, 0.5)
    assert kinds(actions) == {Free, Requeue}
    assert freed(actions) == {D1}
    task = next_task(request, P2, D1)
    assert (task.generation.attempt, token_bytes.unpack(task.generation.tokens)) == (2, PROMPT)


def test_a_prefill_worker_lost_after_its_first_token_is_replaced_and_the_token_is_kept() -> None:
    request = in_state(State.HANDING_OFF)
    assert Requeue in kinds(request.worker_lost(P1, 0.5))
    task = next_task(request, P2, D2)
    assert token_bytes.unpack(task.generation.tokens) == [*PROMPT, 100]
    assert task.generation.prompt_tokens == len(PROMPT)


def test_a_prefill_worker_lost_after_the_handoff_is_not_missed() -> None:
    request = in_state(State.DECODING)
    assert request.worker_lost(P1, 0.5) == ()
    assert request.state is State.DECODING


def test_a_decode_worker_lost_mid_stream_leaves_no_gap_and_no_duplicate() -> None:
    request = in_state(State.DECODING)
    request.frame(D1, frame(request, 1, [101, 102]), 0.1)
    assert kinds(request.worker_lost(D1, 0.5)) == {Requeue}
    task = next_task(request, None, D2)
    assert token_bytes.unpack(task.generation.tokens) == [*PROMPT, 100, 101, 102]
    late = request.frame(D1, frame(request, 3, [666], attempt=1), 0.6)
    assert late == [Free(D1, 1)]
    request.frame(D2, frame(request, 3, [103]), 0.7)
    assert request.transcript.take().tokens == [100, 101, 102, 103]


def test_a_planned_decode_worker_that_dies_before_the_handoff_costs_only_a_redirect() -> None:
    request = in_state(State.PREFILLING)
    assert request.worker_lost(D1, 0.5) == ()
    request.frame(P1, frame(request, 0, [100]), 0.6)
    assert Reroute in kinds(handoff_failed(request, P1, 1, "no_responders", 0.7))
    (tell,) = redirect(request, D2, 0.8)
    assert isinstance(tell, Tell)
    assert (tell.worker, tell.message) == (P1, Redirect(request=request.id, attempt=1, decode=D2))


def test_workers_lost_after_they_gave_tokens_are_replaced_for_as_long_as_the_deadline_allows() -> None:
    request = make(deadline_s=60.0, max_tokens=100)
    for turn in range(50):
        request.place(None, D1, float(turn))
        request.frame(D1, frame(request, turn, [100 + turn]), float(turn))
        assert Requeue in kinds(request.worker_lost(D1, turn + 0.5))
        assert not request.losses.suspicion
    assert isinstance(tick(request, 60.0)[-1], Ended)
    assert isinstance(request.transcript.take().error, errors.DeadlineExceeded)


def test_the_third_worker_lost_with_nothing_to_show_for_it_is_the_last() -> None:
    request = make()
    for expected in (Suspicion.SOME, Suspicion.STRONG):
        request.place(None, D1, 0.0)
        assert Requeue in kinds(request.worker_lost(D1, 0.1))
        assert request.losses.suspicion is expected
    request.place(None, D2, 0.2, alone=True)
    assert request.alone_on == D2
    assert kinds(request.worker_lost(D2, 0.3)) == {Ended}
    assert isinstance(request.transcript.take().error, errors.WorkersDied)


def test_a_request_that_kills_in_the_middle_of_its_answer_has_three_lives_too() -> None:
    request = make()
    request.place(None, D1, 0.0)
    request.frame(D1, frame(request, 0, [100, 101]), 0.1)
    request.worker_lost(D1, 0.2)
    assert not request.losses.suspicion
    request.place(None, D2, 0.3)
    request.worker_lost(D2, 0.4)
    assert request.must_be_alone
    request.place(None, D2, 0.5, alone=True)
    assert kinds(request.worker_lost(D2, 0.6)) == {Ended}


def test_a_token_clears_a_suspect_and_others_may_run_beside_it() -> None:
    request = make()
    request.place(None, D1, 0.0)
    request.worker_lost(D1, 0.1)
    (ask,) = request.place(None, D2, 0.2, alone=True)
    assert isinstance(ask, Ask) and ask.message.generation.alone
    assert request.alone_on == D2
    request.frame(D2, frame(request, 0, [100]), 0.3)
    assert request.alone_on is None and request.is_unsettled and not request.losses.suspicion


def test_a_gateway_that_was_away_goes_on_with_its_streams_under_a_new_epoch() -> None:
    for state, held in HOLDERS.items():
        request = in_state(state)
        again = WorkerRef(GATEWAY.role, GATEWAY.id, 2)
        actions = request.new_life(again, 50.0)
        assert freed(actions) == held and (Requeue in kinds(actions)) == (state is not State.QUEUED)
        task = next_task(request, None, D2)
        assert task.generation.gateway == again and token_bytes.unpack(task.generation.tokens)[:3] == PROMPT
        assert request.failures == 0 and not request.losses.suspicion


def test_an_answer_without_tokens_is_no_sign_of_life_of_an_engine_that_makes_no_progress() -> None:
    for stuck in (False, True):
        request = make(stall_s=1.0, max_fetches=2)
        request.place(None, D1, 0.0)
        request.accepted(D1, 1, 0.0)
        request.frame(D1, frame(request, 0, [100]), 0.0)
        moved = False
        for second in range(1, 12):
            moved = moved or Requeue in kinds(tick(request, float(second), stuck=stuck))
            if not moved:
                request.frame(D1, frame(request, 1, []), second + 0.01)
        assert moved is stuck and (D1.id in request.avoid) is stuck


def test_a_lost_last_frame_ends_the_request_instead_of_repeating_it() -> None:
    request = make(stop=[2])
    request.place(None, D1, 0.0)
    request.frame(D1, frame(request, 0, [100, 2]), 0.1)  # the worker died before it could say "stop"
    assert kinds(request.worker_lost(D1, 0.2)) == {Ended}
    assert request.transcript.take().finish == "stop"


def test_a_stop_token_before_min_tokens_does_not_end_the_request() -> None:
    sampling = SamplingParams(max_tokens=8, min_tokens=5, stop_token_ids=[2])
    asked = GenerationRequest(id="r", prompt=PROMPT, sampling=sampling, deadline_s=60.0)
    request = Request(asked, wire_id="r/1", gateway=GATEWAY, limits=Limits(), now=0.0, wall_ms=0)
    request.place(None, D1, 0.0)
    request.frame(D1, frame(request, 0, [100, 2]), 0.1)
    assert Requeue in kinds(request.worker_lost(D1, 0.2))


# -- workers say no


@pytest.mark.parametrize("code", ["out_of_credits", "out_of_blocks", "shutting_down", "no_responders"])
def test_a_full_worker_is_asked_again_for_ever(code: str) -> None:
    request = make(max_attempts=2)
    for _ in range(20):
        request.place(P1, D1, 0.0)
        actions = request.refused(P1, request.attempt, errors.from_wire(code, ""), 0.0)
        assert actions == [Requeue(0.0)]  # nothing was taken, so there is nothing to free
    assert request.state is State.QUEUED


def test_a_task_that_nobody_answered_may_be_held_and_is_freed() -> None:
    request = make()
    request.place(P1, D1, 0.0)
    actions = request.refused(P1, 1, errors.RequestTimeout("no answer"), 4.0)
    assert freed(actions) == {P1, D1}
    assert request.accepted(P1, 1, 4.1) == [Free(P1, 1)]


def test_other_failures_are_retried_a_few_times_then_reported_without_the_workers_words() -> None:
    request = make(max_attempts=3)
    for turn in range(3):
        assert request.state is State.QUEUED
        request.place(None, D1, float(turn))
        failed = frame(request, 0, [], finish="error", error_code="internal_error", error_message="/secret")
        request.frame(D1, failed, float(turn))
    assert request.state is State.DONE
    error = request.transcript.take().error
    assert isinstance(error, errors.InternalError)
    assert "secret" not in str(error)


def test_failures_while_the_bus_was_away_are_not_held_against_the_request() -> None:
    request = make(max_attempts=1)
    request.place(None, D1, 0.0)
    assert Requeue in kinds(request.refused(D1, 1, errors.RequestTimeout(), 4.0, bus_was_away=True))


def test_what_no_worker_can_do_ends_the_request_at_once() -> None:
    request = make()
    request.place(None, D1, 0.0)
    assert kinds(request.refused(D1, 1, errors.ContextLengthExceeded("too long"), 0.1)) == {Ended}
    assert isinstance(request.transcript.take().error, errors.ContextLengthExceeded)


def test_a_continuation_that_no_longer_fits_the_context_ends_as_too_long() -> None:
    request = in_state(State.DECODING)
    request.worker_lost(D1, 0.1)
    request.place(None, D2, 0.2)
    assert kinds(request.refused(D2, 2, errors.ContextLengthExceeded(), 0.3)) == {Ended}
    assert request.transcript.take().finish == "length"


# -- the bus goes away


def test_after_an_outage_missed_frames_are_asked_for_at_once_and_time_away_does_not_count() -> None:
    request = in_state(State.DECODING)
    request.frame(D1, frame(request, 1, [101]), 1.0)
    assert fetches(request.reconnected(50.0)) == {D1: 2}
    assert Requeue not in kinds(tick(request, 50.5))


def test_after_an_outage_during_the_handoff_both_sides_are_asked() -> None:
    assert fetches(in_state(State.HANDING_OFF).reconnected(50.0)) == {P1: 1, D1: 1}
