"""When a step counts as hung: a bound learned from the engine, with time for compiling, and none for being stopped."""

from __future__ import annotations

import pytest

from common.worker.watchdog import FACTOR, StepWatch

PERIOD_S = 0.25


def watch() -> StepWatch:
    return StepWatch(floor_s=5.0, compile_s=300.0)


def overdue_after(steps: StepWatch, began: float) -> float:
    """Seconds from `began` until the engine is given up, looked at once a period."""
    now = began
    while not steps.overdue(now, period_s=PERIOD_S):
        now += PERIOD_S
        assert now < began + 1000
    return now - began


def test_an_engine_that_has_not_run_a_step_gets_the_least_time() -> None:
    steps = watch()
    assert not steps.overdue(100.0, period_s=PERIOD_S) and steps.age_s(100.0) == 0.0
    steps.began(100.0)
    assert overdue_after(steps, 100.0) == pytest.approx(5.0, abs=2 * PERIOD_S)


def test_the_bound_follows_the_slowest_step_of_late() -> None:
    steps = watch()
    for number in range(10):
        steps.began(2.0 * number)
        steps.ended(2.0 * number + (1.0 if number == 3 else 0.01))
    steps.began(20.0)
    assert steps.limit_s == pytest.approx(FACTOR * 1.0, rel=0.05)
    steps.ended(20.01)
    for number in range(3000):
        steps.began(21.0 + number)
        steps.ended(21.0 + number + 0.01)
    assert steps.limit_s == 5.0 and steps.num_steps == 3011


def test_a_step_that_may_compile_gets_its_own_time_and_teaches_nothing() -> None:
    steps = watch()
    steps.began(0.0, compiling=True)
    assert steps.may_compile and overdue_after(steps, 0.0) == pytest.approx(300.0, abs=2 * PERIOD_S)
    steps.ended(301.0)
    steps.began(301.0)
    assert not steps.may_compile and steps.limit_s == 5.0


def test_a_step_submitted_ahead_begins_when_the_one_before_it_has_ended() -> None:
    steps = watch()
    steps.began(0.0)
    steps.began(0.1)
    steps.ended(4.0)
    assert steps.age_s(6.0) == 2.0 and steps.limit_s == FACTOR * 4.0
    steps.ended(6.0)
    assert steps.age_s(9.0) == 0.0


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    steps = watch()
    assert not steps.overdue(0.0, period_s=PERIOD_S)
    steps.began(0.1)
    assert not steps.overdue(3600.0, period_s=PERIOD_S)
    assert overdue_after(steps, 3600.0) == pytest.approx(5.0, abs=4 * PERIOD_S)
