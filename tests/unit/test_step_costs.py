"""What steps take is learnt from measurements of which some are of something else."""

from __future__ import annotations

import numpy as np
import pytest

from services.decode.speculation_policy import SpeculationPolicy
from services.decode.step_costs import StepCosts

STEP_S = 0.0055
COMPILED_S = (1.3, 0.12)


def seconds_of(costs: StepCosts, size: int) -> float:
    return float(costs.seconds(np.array([size]))[0])


def test_what_compiled_at_first_is_forgotten() -> None:
    """The first steps with proposals capture and compile: a second on a card, where a step takes 5.5 ms."""
    costs = StepCosts()
    for seconds in (*COMPILED_S, STEP_S):
        costs.observe(2, seconds)
        costs.observe(1, STEP_S)
    for _ in range(5):
        costs.observe(2, STEP_S)
    assert seconds_of(costs, 1) == pytest.approx(STEP_S, rel=0.01)
    assert seconds_of(costs, 2) == pytest.approx(STEP_S, rel=0.01)


def test_a_size_whose_first_steps_all_compiled_does_not_keep_proposals_away() -> None:
    costs = StepCosts()
    policy = SpeculationPolicy(max_tokens=7, max_step_tokens=64, costs=costs)
    for seconds in (1.0, 0.1, 0.03):
        costs.observe(2, seconds)
    for _ in range(20):
        costs.observe(1, STEP_S)
    pace = policy.pace()
    policy.begin_step(1, [pace.rate])
    assert policy.length(pace) > 0


@pytest.mark.parametrize("other_s", [0.0001, 0.5])
def test_one_measurement_of_something_else_changes_little(other_s: float) -> None:
    costs = StepCosts()
    for _ in range(30):
        costs.observe(4, STEP_S)
    costs.observe(4, other_s)
    assert seconds_of(costs, 4) == pytest.approx(STEP_S, rel=0.15)
    costs.observe(4, STEP_S)
    costs.observe(4, STEP_S)
    assert seconds_of(costs, 4) == pytest.approx(STEP_S, rel=0.1)


def test_steps_that_take_longer_from_now_on_are_soon_known_to() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.observe(4, STEP_S)
    for _ in range(4):
        costs.observe(4, 2 * STEP_S)
    assert seconds_of(costs, 4) == pytest.approx(2 * STEP_S, rel=0.05)


def test_steps_that_differ_much_are_known_after_some() -> None:
    costs = StepCosts()
    for index in range(8):
        assert not costs.is_known(1)
        costs.observe(1, STEP_S * (1 + 2 * (index % 2)))
    assert costs.is_known(1)


@pytest.mark.parametrize("later_s", [STEP_S, 2 * STEP_S], ids=["as before", "otherwise"])
def test_a_size_that_did_not_occur_for_long_is_measured_again(later_s: float) -> None:
    """Where it takes as long as before, one measurement is enough, and it stays known for longer."""
    costs = StepCosts(stale_after=10)

    def steps_until_unknown() -> int:
        for step in range(100):
            if not costs.is_known(4):
                return step
            costs.observe(1, STEP_S)
        return 100

    for _ in range(20):
        costs.observe(4, STEP_S)
    assert steps_until_unknown() == 11
    costs.observe(4, later_s)
    assert costs.is_known(4) == (later_s == STEP_S)
    costs.observe(4, later_s)
    costs.observe(4, later_s)
    assert steps_until_unknown() == (21 if later_s == STEP_S else 11)
    assert seconds_of(costs, 1) == pytest.approx(STEP_S, rel=0.05)


def test_steps_in_which_nothing_was_measured_count() -> None:
    costs = StepCosts(stale_after=10)
    for _ in range(5):
        costs.observe(1, STEP_S)
    for _ in range(11):
        assert costs.is_known(1)
        costs.skip()
    assert not costs.is_known(1)
