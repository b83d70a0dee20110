"""The delay before a crashed process is started again grows with its crashes of the last minutes, and is forgotten later."""

from __future__ import annotations

from common.cli.backoff import MAX_S, WINDOW_S, Backoff


def delays(lifetime_s: float, num_crashes: int) -> list[float]:
    """Of a process that crashes `lifetime_s` after each start."""
    backoff, now, found = Backoff(), 0.0, list[float]()
    for _ in range(num_crashes):
        now += lifetime_s
        found.append(backoff.crashed(now))
        now += found[-1]
    return found


def test_a_process_that_never_works_ends_at_the_longest_delay_and_stays_there() -> None:
    found = delays(0.1, 40)
    assert found[:9] == [0, 0.5, 1, 2, 4, 8, 16, 32, MAX_S]
    assert set(found[9:]) == {MAX_S}


def test_running_for_half_a_minute_between_crashes_is_not_forgotten() -> None:
    found = delays(35, 40)
    assert min(found[12:]) >= 16


def test_a_rare_crash_is_answered_at_once() -> None:
    assert set(delays(WINDOW_S + 1, 10)) == {0}
