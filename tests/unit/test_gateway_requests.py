"""One request from state to state: it reaches its end, or ends typed, and nobody holds it afterwards."""

from __future__ import annotations

import pytest

from common.protocol import errors
from common.protocol import tokens as token_bytes
from common.protocol.messages import DecodeTask, PrefillTask
from services.gateway.actions import Ended, Free, Requeue, Reroute, State
from services.gateway.handoff import handed_off, handoff_failed, redirect, stranded
from services.gateway.patience import tick
from tests.unit.gateway_request import D1, D2, HOLDERS, P1, P2, PROMPT, frame, freed, in_state, kinds, make, next_task

# -- the way it should go


def test_a_request_goes_through_prefill_and_decode_to_its_end() -> None:
    request = make(max_tokens=3)
    task = next_task(request, P1, D1)
    assert isinstance(task, PrefillTask)
    assert task.decode == D1
    assert token_bytes.unpack(task.generation.tokens) == PROMPT
    assert request.accepted(P1, 1, 0.0) == ()
    assert request.frame(P1, frame(request, 0, [100], cached_tokens=2), 0.1) == ()
    assert handed_off(request, 1, D1, 0.1) == ()
    assert request.frame(D1, frame(request, 1, [101]), 0.2) == ()
    actions = request.frame(D1, frame(request, 2, [102], finish="length"), 0.3)
    assert kinds(actions) == {Free, Ended}
    assert freed(actions) == {D1}
    output = request.transcript.take()
    assert (output.tokens, output.finish, output.cached_tokens) == ([100, 101, 102], "length", 2)


def test_a_worker_whose_answer_was_lost_but_whose_tokens_came_keeps_the_request() -> None:
    request = make()
    request.place(None, D1, 0.0)
    request.frame(D1, frame(request, 0, [100]), 0.1)
    assert request.refused(D1, 1, errors.RequestTimeout("no answer"), 4.0) == ()
    assert request.holder == D1


def test_the_direct_path_needs_no_prefill_worker() -> None:
    request = make()
    assert isinstance(next_task(request, None, D1), DecodeTask)
    request.accepted(D1, 1, 0.0)
    request.frame(D1, frame(request, 0, [100, 101]), 0.1)
    assert (request.state, request.tokens) == (State.DECODING, [100, 101])


def test_workers_are_told_how_soon_the_first_token_is_due() -> None:
    assert next_task(make(), None, D1).generation.first_token_ms == 0, "there is no objective"
    request = make(first_token_s=2.5)
    assert next_task(request, None, D1).generation.first_token_ms == 1500, "it waited for a second"
    request.frame(D1, frame(request, 0, [100]), 1.1)
    request.worker_lost(D1, 1.2)
    assert next_task(request, None, D2).generation.first_token_ms == 0, "it has come"
    assert next_task(make(first_token_s=0.5), None, D1).generation.first_token_ms == 0, "it is late"
    assert next_task(make(first_token_s=2.5, background=True), None, D1).generation.first_token_ms == 0


def test_frames_that_overtake_the_answer_to_the_task_count() -> None:
    request = make()
    request.place(P1, D1, 0.0)
    request.frame(P1, frame(request, 0, [100]), 0.0)
    request.frame(D1, frame(request, 1, [101]), 0.0)
    assert request.accepted(P1, 1, 0.0) == [Free(P1, 1)]  # prefill's part is over
    assert handed_off(request, 1, D1, 0.0) == ()
    assert (request.state, request.tokens) == (State.DECODING, [100, 101])


def test_outputs_between_two_reads_are_one() -> None:
    request = in_state(State.DECODING)
    for index in range(1, 4):
        request.frame(D1, frame(request, index, [100 + index]), 0.0)
    assert request.transcript.take().tokens == [100, 101, 102, 103]
    assert not request.transcript.unread


# -- handoff


def test_a_refused_handoff_is_redirected_and_the_refuser_may_be_asked_again_later() -> None:
    request = in_state(State.HANDING_OFF)
    assert handoff_failed(request, P1, 1, "out_of_credits", 0.1) == [Reroute()]
    assert D1.id not in request.tried
    redirect(request, D2, 0.2)
    handed_off(request, 1, D2, 0.3)
    request.frame(D2, frame(request, 1, [101]), 0.4)
    assert request.tokens == [100, 101]


def test_a_decode_worker_whose_answer_was_lost_is_freed_and_its_frames_are_dropped() -> None:
    request = in_state(State.HANDING_OFF)
    actions = handoff_failed(request, P1, 1, "bus_timeout", 0.1)
    assert freed(actions) == {D1}
    assert D1.id in request.tried
    redirect(request, D2, 0.2)
    assert request.frame(D1, frame(request, 1, [101]), 0.3) == [Free(D1, 1)]
    assert request.tokens == [100]


def test_a_handoff_that_is_too_long_for_one_goes_to_another_and_ends_where_it_is_for_all() -> None:
    request = in_state(State.HANDING_OFF)
    assert handoff_failed(request, P1, 1, "context_length_exceeded", 0.1) == [Reroute()]
    assert D1.id in request.tried
    redirect(request, D2, 0.2)
    handoff_failed(request, P1, 1, "context_length_exceeded", 0.3)
    assert freed(stranded(request, 0.4)) == {P1}
    assert (request.state, request.transcript.take().finish, request.tokens) == (State.DONE, "length", [100])


def test_a_handoff_that_nobody_takes_ends_in_another_attempt() -> None:
    request = in_state(State.HANDING_OFF)
    handoff_failed(request, P1, 1, "out_of_credits", 0.0)
    actions = tick(request, 10.1)
    assert freed(actions) == {P1}
    assert Requeue in kinds(actions)


def test_a_handoff_of_an_older_attempt_is_undone() -> None:
    request = in_state(State.HANDING_OFF)
    request.worker_lost(P1, 0.1)
    request.place(P2, D2, 0.2)
    assert handed_off(request, 1, D1, 0.3) == [Free(D1, 1)]


def test_a_lost_handed_off_is_made_up_for_by_the_first_frame_of_decode() -> None:
    request = in_state(State.HANDING_OFF)
    request.frame(D1, frame(request, 1, [101]), 0.1)
    assert (request.state, request.tokens) == (State.DECODING, [100, 101])
    assert handed_off(request, 1, D1, 0.2) == ()  # late


# -- the end, from every state


@pytest.mark.parametrize("state", HOLDERS)
def test_a_cancel_frees_whoever_may_hold_the_request(state: State) -> None:
    request = in_state(state)
    actions = request.fail(errors.Cancelled())
    assert freed(actions) == HOLDERS[state]
    assert isinstance(actions[-1], Ended)
    assert isinstance(request.transcript.take().error, errors.Cancelled)
    assert request.fail(errors.Cancelled()) == ()


@pytest.mark.parametrize("state", HOLDERS)
def test_a_deadline_frees_whoever_may_hold_the_request(state: State) -> None:
    request = in_state(state)
    actions = tick(request, request.deadline)
    assert freed(actions) == HOLDERS[state]
    assert isinstance(request.transcript.take().error, errors.DeadlineExceeded)


def test_what_comes_after_the_deadline_is_no_answer() -> None:
    request = make(deadline_s=1.0)
    request.place(None, D1, 0.0)
    request.frame(D1, frame(request, 0, [5]), 0.9)
    actions = request.frame(D1, frame(request, 1, [6], finish="stop"), 1.0)
    assert Ended in kinds(actions)
    taken = request.transcript.take()
    assert taken.tokens == [5] and isinstance(taken.error, errors.DeadlineExceeded)


@pytest.mark.parametrize("state", HOLDERS)
def test_after_the_end_everyone_who_still_speaks_is_told_to_let_go(state: State) -> None:
    request = in_state(state)
    request.fail(errors.Cancelled())
    assert request.frame(D1, frame(request, 0, [1], attempt=1), 0.2) == [Free(D1, 1)]
    assert handed_off(request, 1, D1, 0.2) == [Free(D1, 1)]
    assert request.accepted(P1, 1, 0.2) == [Free(P1, 1)]
    assert request.unknown(D1, 1, 0.2) == ()
    assert handoff_failed(request, P1, 1, "no_responders", 0.2) == ()
    assert request.worker_lost(D1, 0.2) == ()


def test_a_reader_that_reads_nothing_is_cut_off() -> None:
    request = in_state(State.DECODING)
    for second in range(1, 32):
        request.frame(D1, frame(request, 1, []), float(second))
        assert tick(request, float(second)) == ()
    assert freed(tick(request, 31.5)) >= {D1}
    assert isinstance(request.transcript.take().error, errors.Cancelled)


def test_a_reader_that_waits_for_the_next_token_is_not_slow() -> None:
    request = in_state(State.DECODING)
    request.transcript.take()
    for second in range(1, 50):
        request.frame(D1, frame(request, 1, []), float(second))
        assert tick(request, float(second)) == ()
