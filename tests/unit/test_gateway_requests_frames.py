"""Frames of one request: duplicates are cut, gaps fetched, silence asked about, and who forgot it is left."""

from __future__ import annotations

from common.protocol.handles import WorkerRef
from common.protocol.messages import TokenLogprobs
from services.gateway.actions import Ended, Free, Requeue, State
from services.gateway.patience import tick
from tests.unit.gateway_request import D1, D2, P1, fetches, frame, freed, in_state, kinds, make

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
        actions = tick(request, now)
        now += 0.1
        assert now < 10.0
    assert freed(actions) >= {D1}


def test_silence_is_asked_about_then_the_request_moves() -> None:
    request = in_state(State.DECODING)
    asked, now, actions = 0, 0.0, ()
    while Requeue not in kinds(actions):
        now += 0.25
        actions = tick(request, now)
        asked += len(fetches(actions))
        assert now < 10.0
    assert asked == 3
    assert D1 in freed(actions)


def test_an_answer_without_news_shows_that_the_worker_is_there() -> None:
    request = in_state(State.DECODING)
    request.transcript.take()
    for turn in range(400):
        if fetches(tick(request, turn * 0.1)):
            request.frame(D1, frame(request, 1, []), turn * 0.1 + 0.05)
    assert request.state is State.DECODING


def test_slow_steps_are_no_stall() -> None:
    request = in_state(State.DECODING)
    assert tick(request, 3.0, patience_s=5.0) == ()
    assert fetches(tick(request, 5.1, patience_s=5.0)) == {D1: 1}


def test_a_long_prompt_is_left_alone_until_its_timeout() -> None:
    request = make(prefill_timeout_s=30.0, deadline_s=600.0)
    request.place(P1, D1, 0.0)
    request.accepted(P1, 1, 0.0)
    for second in range(1, 30):
        assert Requeue not in kinds(tick(request, float(second)))
    assert freed(tick(request, 30.5)) == {P1, D1}


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
