"""One request through every failure: it goes on with the next token, or ends typed, and nobody holds it afterwards."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from common.protocol import errors
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import (
    DecodeTask,
    FetchFrames,
    PrefillTask,
    Redirect,
    SamplingParams,
    TokenFrame,
    TokenLogprobs,
)
from services.gateway.actions import Action, Ask, Ended, Free, Limits, Requeue, Reroute, State, Tell
from services.gateway.requests import GenerationRequest, Request

GATEWAY = WorkerRef("gateway", "gateway-1", 1)
P1, P2 = (WorkerRef("prefill", f"prefill-{n}", 1) for n in (1, 2))
D1, D2 = (WorkerRef("decode", f"decode-{n}", 1) for n in (1, 2))
PROMPT = [11, 12, 13]


def make(*, deadline_s: float = 60.0, max_tokens: int = 8, logprobs: int = -1, stop: Iterable[int] = (), **limits) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, stop_token_ids=list(stop))
    request = GenerationRequest(id="r", prompt=PROMPT, sampling=sampling, deadline_s=deadline_s)
    return Request(request, wire_id="r/1", gateway=GATEWAY, limits=Limits(**limits), now=0.0, wall_ms=1000)


def frame(request: Request, start: int, tokens: Iterable[int], **more) -> TokenFrame:
    attempt = more.pop("attempt", request.attempt)
    return TokenFrame(request=request.id, attempt=attempt, start=start, tokens=list(tokens), **more)


def freed(actions: Iterable[Action]) -> set[WorkerRef]:
    return {action.worker for action in actions if isinstance(action, Free)}


def kinds(actions: Iterable[Action]) -> set[type]:
    return {type(action) for action in actions}


def fetches(actions: Iterable[Action]) -> dict[WorkerRef, int]:
    return {a.worker: a.message.start for a in actions if isinstance(a, Tell) and isinstance(a.message, FetchFrames)}


def in_state(state: State) -> Request:
    """A request that has come as far as `state` on P1 and D1; it has one token from `handing_off` on."""
    request = make()
    if state is State.QUEUED:
        return request
    request.place(P1, D1, 0.0)
    if state is State.PLACING:
        return request
    request.accepted(P1, request.attempt, 0.0)
    if state is State.PREFILLING:
        return request
    request.frame(P1, frame(request, 0, [100]), 0.0)
    if state is State.HANDING_OFF:
        return request
    request.handed_off(request.attempt, D1, 0.0)
    assert request.state is State.DECODING
    return request


HOLDERS = {
    State.QUEUED: set(),
    State.PLACING: {P1, D1},
    State.PREFILLING: {P1, D1},
    State.HANDING_OFF: {P1, D1},
    State.DECODING: {P1, D1},
}


def next_task(request: Request, prefill: WorkerRef | None, decode: WorkerRef) -> PrefillTask | DecodeTask:
    (ask,) = request.place(prefill, decode, 1.0)
    assert isinstance(ask, Ask)
    return ask.message


# -- the way it should go


def test_a_request_goes_through_prefill_and_decode_to_its_end() -> None:
    request = make(max_tokens=3)
    task = next_task(request, P1, D1)
    assert isinstance(task, PrefillTask)
    assert task.decode == D1
    assert token_bytes.unpack(task.generation.tokens) == PROMPT
    assert request.accepted(P1, 1, 0.0) == ()
    assert request.frame(P1, frame(request, 0, [100], cached_tokens=2), 0.1) == ()
    assert request.handed_off(1, D1, 0.1) == ()
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


def test_frames_that_overtake_the_answer_to_the_task_count() -> None:
    request = make()
    request.place(P1, D1, 0.0)
    request.frame(P1, frame(request, 0, [100]), 0.0)
    request.frame(D1, frame(request, 1, [101]), 0.0)
    assert request.accepted(P1, 1, 0.0) == [Free(P1, 1)]  # prefill's part is over
    assert request.handed_off(1, D1, 0.0) == ()
    assert (request.state, request.tokens) == (State.DECODING, [100, 101])


def test_outputs_between_two_reads_are_one() -> None:
    request = in_state(State.DECODING)
    for index in range(1, 4):
        request.frame(D1, frame(request, index, [100 + index]), 0.0)
    assert request.transcript.take().tokens == [100, 101, 102, 103]
    assert not request.transcript.unread


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
    assert Reroute in kinds(request.handoff_failed(P1, 1, "no_responders", 0.7))
    (tell,) = request.redirect(D2, 0.8)
    assert isinstance(tell, Tell)
    assert (tell.worker, tell.message) == (P1, Redirect(request=request.id, attempt=1, decode=D2))


def test_worker_losses_are_retried_for_as_long_as_the_deadline_allows() -> None:
    request = make(deadline_s=60.0)
    for turn in range(50):
        request.place(None, D1, float(turn))
        assert Requeue in kinds(request.worker_lost(D1, turn + 0.5))
    assert isinstance(request.tick(60.0)[-1], Ended)
    assert isinstance(request.transcript.take().error, errors.DeadlineExceeded)


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


# -- handoff


def test_a_refused_handoff_is_redirected_and_the_refuser_may_be_asked_again_later() -> None:
    request = in_state(State.HANDING_OFF)
    assert request.handoff_failed(P1, 1, "out_of_credits", 0.1) == [Reroute()]
    assert D1.id not in request.tried
    request.redirect(D2, 0.2)
    request.handed_off(1, D2, 0.3)
    request.frame(D2, frame(request, 1, [101]), 0.4)
    assert request.tokens == [100, 101]


def test_a_decode_worker_whose_answer_was_lost_is_freed_and_its_frames_are_dropped() -> None:
    request = in_state(State.HANDING_OFF)
    actions = request.handoff_failed(P1, 1, "request_timeout", 0.1)
    assert freed(actions) == {D1}
    assert D1.id in request.tried
    request.redirect(D2, 0.2)
    assert request.frame(D1, frame(request, 1, [101]), 0.3) == [Free(D1, 1)]
    assert request.tokens == [100]


def test_a_handoff_that_nobody_takes_ends_in_another_attempt() -> None:
    request = in_state(State.HANDING_OFF)
    request.handoff_failed(P1, 1, "out_of_credits", 0.0)
    actions = request.tick(10.1)
    assert freed(actions) == {P1}
    assert Requeue in kinds(actions)


def test_a_handoff_of_an_older_attempt_is_undone() -> None:
    request = in_state(State.HANDING_OFF)
    request.worker_lost(P1, 0.1)
    request.place(P2, D2, 0.2)
    assert request.handed_off(1, D1, 0.3) == [Free(D1, 1)]


def test_a_lost_handed_off_is_made_up_for_by_the_first_frame_of_decode() -> None:
    request = in_state(State.HANDING_OFF)
    request.frame(D1, frame(request, 1, [101]), 0.1)
    assert (request.state, request.tokens) == (State.DECODING, [100, 101])
    assert request.handed_off(1, D1, 0.2) == ()  # late


# -- frames


def test_duplicate_and_overlapping_frames_are_cut() -> None:
    request = in_state(State.DECODING)
    request.frame(D1, frame(request, 1, [101, 102]), 0.1)
    request.frame(D1, frame(request, 1, [101, 102]), 0.1)
    request.frame(D1, frame(request, 0, [100, 101, 102, 103]), 0.2)
    assert request.tokens == [100, 101, 102, 103]


def test_logprobs_are_cut_with_their_tokens() -> None:
    request = make(logprobs=0)
    request.place(None, D1, 0.0)
    request.frame(D1, frame(request, 0, [100], logprobs=[TokenLogprobs(-0.5)]), 0.1)
    request.frame(D1, frame(request, 0, [100, 101], logprobs=[TokenLogprobs(-0.5), TokenLogprobs(-1.5)]), 0.1)
    request.frame(D1, frame(request, 2, [102]), 0.1)
    output = request.transcript.take()
    assert output.logprobs is not None
    assert [entry.logprob for entry in output.logprobs] == [-0.5, -1.5, -9999.0]


def test_a_gap_is_fetched_at_once_and_only_as_often_as_needed() -> None:
    request = in_state(State.DECODING)
    assert fetches(request.frame(D1, frame(request, 3, [103]), 1.0)) == {D1: 1}
    assert request.frame(D1, frame(request, 4, [104]), 1.01) == ()
    assert request.tokens == [100]
    request.frame(D1, frame(request, 1, [101, 102, 103, 104]), 1.02)
    assert request.tokens == [100, 101, 102, 103, 104]


def test_a_gap_that_never_closes_moves_the_request() -> None:
    request = in_state(State.DECODING)
    now, actions = 1.0, ()
    while not actions or Requeue not in kinds(actions):
        request.frame(D1, frame(request, 3, [103]), now)
        actions = request.tick(now)
        now += 0.1
        assert now < 10.0
    assert freed(actions) >= {D1}


def test_silence_is_asked_about_then_the_request_moves() -> None:
    request = in_state(State.DECODING)
    asked, now, actions = 0, 0.0, ()
    while Requeue not in kinds(actions):
        now += 0.25
        actions = request.tick(now)
        asked += len(fetches(actions))
        assert now < 10.0
    assert asked == 3
    assert D1 in freed(actions)


def test_an_answer_without_news_shows_that_the_worker_is_there() -> None:
    request = in_state(State.DECODING)
    request.transcript.take()
    for tick in range(400):
        if fetches(request.tick(tick * 0.1)):
            request.frame(D1, frame(request, 1, []), tick * 0.1 + 0.05)
    assert request.state is State.DECODING


def test_slow_steps_are_no_stall() -> None:
    request = in_state(State.DECODING)
    assert request.tick(3.0, patience_s=5.0) == ()
    assert fetches(request.tick(5.1, patience_s=5.0)) == {D1: 1}


def test_a_long_prompt_is_left_alone_until_its_timeout() -> None:
    request = make(prefill_timeout_s=30.0, deadline_s=600.0)
    request.place(P1, D1, 0.0)
    request.accepted(P1, 1, 0.0)
    for second in range(1, 30):
        assert Requeue not in kinds(request.tick(float(second)))
    assert freed(request.tick(30.5)) == {P1, D1}


def test_a_late_end_of_the_request_is_taken_even_if_its_tokens_are_known() -> None:
    request = in_state(State.DECODING)
    request.frame(D1, frame(request, 1, [101]), 0.1)
    assert Ended in kinds(request.frame(D1, frame(request, 1, [101], finish="stop"), 0.2))
    assert request.transcript.take().finish == "stop"


def test_a_worker_never_gets_more_than_max_tokens_through() -> None:
    request = make(max_tokens=2)
    request.place(None, D1, 0.0)
    assert Ended in kinds(request.frame(D1, frame(request, 0, [1, 2, 3, 4]), 0.1))
    output = request.transcript.take()
    assert (output.tokens, output.finish) == ([1, 2], "length")


def test_frames_of_another_epoch_are_dropped() -> None:
    request = in_state(State.DECODING)
    reborn = WorkerRef("decode", D1.id, 2)
    assert request.frame(reborn, frame(request, 1, [666]), 0.1) == [Free(reborn, 1)]
    assert request.tokens == [100]


# -- unknown


def test_one_unknown_may_be_a_crossing_two_are_the_truth() -> None:
    request = in_state(State.DECODING)
    assert Requeue not in kinds(request.unknown(D1, 1, 1.0))
    assert request.unknown(D1, 1, 1.01) == ()  # the same round
    actions = request.unknown(D1, 1, 2.0)
    assert Requeue in kinds(actions)


def test_a_frame_between_two_unknowns_starts_the_count_again() -> None:
    request = in_state(State.DECODING)
    request.unknown(D1, 1, 1.0)
    request.frame(D1, frame(request, 1, [101]), 1.5)
    assert Requeue not in kinds(request.unknown(D1, 1, 2.0))


def test_unknowns_of_others_and_of_older_attempts_mean_nothing() -> None:
    request = in_state(State.DECODING)
    for now in (1.0, 2.0, 3.0):
        assert request.unknown(P1, 1, now) == ()
        assert request.unknown(D2, 1, now) == ()
        assert request.unknown(D1, 0, now) == ()
    assert request.state is State.DECODING


def test_a_prefill_worker_that_forgot_us_makes_us_ask_decode() -> None:
    request = in_state(State.HANDING_OFF)  # HandedOff was lost
    assert fetches(request.unknown(P1, 1, 1.0)) == {D1: 1}
    request.frame(D1, frame(request, 1, [101]), 1.1)
    assert request.state is State.DECODING


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
    actions = request.tick(request.deadline)
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
    assert request.handed_off(1, D1, 0.2) == [Free(D1, 1)]
    assert request.accepted(P1, 1, 0.2) == [Free(P1, 1)]
    assert request.unknown(D1, 1, 0.2) == ()
    assert request.handoff_failed(P1, 1, "no_responders", 0.2) == ()
    assert request.worker_lost(D1, 0.2) == ()


def test_a_reader_that_reads_nothing_is_cut_off() -> None:
    request = in_state(State.DECODING)
    for second in range(1, 32):
        request.frame(D1, frame(request, 1, []), float(second))
        assert request.tick(float(second)) == ()
    assert freed(request.tick(31.5)) >= {D1}
    assert isinstance(request.transcript.take().error, errors.Cancelled)


def test_a_reader_that_waits_for_the_next_token_is_not_slow() -> None:
    request = in_state(State.DECODING)
    request.transcript.take()
    for second in range(1, 50):
        request.frame(D1, frame(request, 1, []), float(second))
        assert request.tick(float(second)) == ()


# -- the bus goes away


def test_after_an_outage_missed_frames_are_asked_for_at_once_and_time_away_does_not_count() -> None:
    request = in_state(State.DECODING)
    request.frame(D1, frame(request, 1, [101]), 1.0)
    assert fetches(request.reconnected(50.0)) == {D1: 2}
    assert Requeue not in kinds(request.tick(50.5))


def test_after_an_outage_during_the_handoff_both_sides_are_asked() -> None:
    assert fetches(in_state(State.HANDING_OFF).reconnected(50.0)) == {P1: 1, D1: 1}
