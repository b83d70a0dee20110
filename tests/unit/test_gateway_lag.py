"""When a gateway says that it does not keep up, and refuses new requests for it."""

from __future__ import annotations

from services.gateway.lag import BEHIND_FOR_S, SHED_AFTER_S, SHED_S, Lag

HEARTBEAT_S = 0.25


def beats(lag: Lag, now: float, until: float, *, every_s: float = HEARTBEAT_S, frames_waited_s: float = 0.0) -> float:
    while now < until:
        now += every_s
        lag.measure(frames_waited_s, now)
    return now


def test_frames_that_wait_for_seconds_have_new_requests_refused_until_they_no_longer_do() -> None:
    lag = Lag(heartbeat_s=HEARTBEAT_S, now=0.0)
    now = beats(lag, 0.0, SHED_AFTER_S - HEARTBEAT_S, frames_waited_s=SHED_S + 0.1)
    assert lag.is_behind(now) and not lag.sheds(now)
    now = beats(lag, now, now + 1, frames_waited_s=SHED_S + 0.1)
    assert lag.sheds(now)
    now = beats(lag, now, now + BEHIND_FOR_S)
    assert not lag.sheds(now) and not lag.is_behind(now)


def test_turns_of_the_event_loop_that_take_seconds_have_them_refused_too() -> None:
    lag = Lag(heartbeat_s=HEARTBEAT_S, now=0.0)
    now = beats(lag, 0.0, 2 * SHED_AFTER_S, every_s=SHED_S + HEARTBEAT_S + 0.1)
    assert lag.sheds(now)


def test_a_process_that_was_stopped_takes_new_requests_as_soon_as_it_runs_again() -> None:
    """SIGSTOP, a machine that slept or moved: there is nothing that it could not keep up with."""
    lag = Lag(heartbeat_s=HEARTBEAT_S, now=0.0)
    now = beats(lag, 0.0, 5.0) + 60.0
    lag.measure(0.0, now)
    assert lag.is_behind(now), "what workers sent meanwhile has not been read"
    assert not lag.sheds(now)
    assert not lag.sheds(beats(lag, now, now + 2))
