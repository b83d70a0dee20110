"""What tests of speculation share."""

from __future__ import annotations

from collections.abc import Callable

from services.decode.step_costs import SIZES, StepCosts


def costs_of(seconds: Callable[[int], float]) -> StepCosts:
    """All sizes of steps as if they had been measured."""
    costs = StepCosts(stale_after=1 << 30)
    for size in SIZES:
        for _ in range(3):
            costs.observe(size, seconds(size))
    return costs


def flat_costs() -> StepCosts:
    """Where tokens to verify cost nothing."""
    return costs_of(lambda size: 0.01)
