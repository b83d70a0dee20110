"""Verification is worth its time, or is not done: against simulated engines whose steps cost what engines' steps cost."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from services.decode.speculation_policy import Pace, SpeculationPolicy
from services.decode.step_costs import SIZES, StepCosts
from tests.fixtures.slow import pairs_quick
from tests.unit.speculating import costs_of, flat_costs

CURVES: dict[str, Callable[[int], float]] = {
    "a GPU: hardly more for more tokens": lambda size: 0.004 + 0.00001 * size,
    "a CPU: a third of a step for a token": lambda size: 0.006 + 0.003 * size,
    "every token costs the same": lambda size: 0.003 * size,
    "a cliff behind 64 tokens": lambda size: 0.004 + (0.02 if size > 64 else 0.0),
}


def policy_with(costs: StepCosts, max_tokens: int = 4) -> SpeculationPolicy:
    return SpeculationPolicy(max_tokens=max_tokens, max_step_tokens=256, costs=costs)


def run(
    rows: int,
    curve: Callable[[int], float],
    accuracy: float,
    *,
    depth: int | None = None,
    steps: int = 3000,
    noise: float = 0.1,
    drifts: float = 0.0,
) -> tuple[float, SpeculationPolicy]:
    """Tokens per second, and the policy. depth: so many tokens are verified on each step, whatever the policy says."""
    dice = random.Random(f"{rows} {accuracy} {depth}")
    policy = policy_with(StepCosts())
    paces = [policy.pace() for _ in range(rows)]
    seconds, tokens = 0.0, 0
    for step in range(steps):
        policy.begin_step(rows, [pace.rate for pace in paces if not pace.asleep])
        lengths: list[int] = []
        for pace in paces:
            lengths.append(policy.length(pace) if depth is None else depth)
            policy.spend(lengths[-1])
        size = rows + sum(lengths)
        bucket = next(size_ for size_ in (*SIZES, size) if size_ >= size)
        took = curve(bucket) * (1 + drifts * step / steps) * dice.lognormvariate(0, noise)
        seconds += took
        for pace, length in zip(paces, lengths, strict=True):
            was_asleep = pace.asleep > 0
            hits = 0
            while hits < max(length, 1) and dice.random() < accuracy:
                hits += 1
            policy.passed(pace, 1 + min(hits, length))
            tokens += 1 + min(hits, length)
            if length:
                policy.record(pace, hits, int(hits < length))
            elif not was_asleep:
                policy.record(pace, hits, 1 - hits)
        policy.costs.observe(size, took)
    return tokens / seconds, policy


@pytest.mark.parametrize(("name", "rows", "accuracy"), pairs_quick(list(CURVES), [1, 8, 40], [0.0, 0.3, 0.8]))
def test_speculation_is_never_slower_and_nearly_as_fast_as_the_best_depth(name: str, rows: int, accuracy: float) -> None:
    curve = CURVES[name]
    found, _ = run(rows, curve, accuracy)
    steps = max(600, 3000 // rows)  # a fixed depth learns nothing: many rows need fewer steps
    fixed = [run(rows, curve, accuracy, depth=depth, steps=steps)[0] for depth in range(5)]
    assert found >= 0.97 * fixed[0]
    assert found >= 0.93 * max(fixed), [round(pace) for pace in (found, *fixed)]


def test_a_curve_that_rises_with_contexts_changes_nothing() -> None:
    curve = CURVES["a CPU: a third of a step for a token"]
    found, _ = run(4, curve, 0.0, drifts=3.0)
    assert found >= 0.97 * run(4, curve, 0.0, depth=0, drifts=3.0)[0]


def test_measuring_is_bounded_and_counted() -> None:
    _, policy = run(1, CURVES["a GPU: hardly more for more tokens"], 0.9, steps=5000)
    assert 3 <= policy.num_probes <= 40


def test_nothing_is_verified_before_the_time_without_is_known() -> None:
    costs = StepCosts()
    policy = policy_with(costs)
    pace = policy.pace()
    for _ in range(3):
        policy.begin_step(2, [pace.rate])
        assert policy.length(pace) == 0
        costs.observe(2, 0.01)
    policy.begin_step(2, [pace.rate])
    assert policy.length(pace) > 0
    assert policy.num_probes == 3


def test_the_likeliest_tokens_are_verified_where_room_is_short() -> None:
    policy = policy_with(costs_of(lambda size: 0.01 if size <= 8 else 1.0))
    sure, unsure = Pace(rate=0.9, nap=16), Pace(rate=0.4, nap=16)
    policy.begin_step(4, [0.9, 0.4])
    assert (policy.length(sure), policy.length(unsure)) == (4, 0)


def test_no_more_is_verified_than_a_step_may_have() -> None:
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=10, costs=flat_costs())
    pace = policy.pace()
    policy.begin_step(8, [pace.rate] * 8)
    assert policy.length(pace) == 1
    policy.spend(2)
    assert policy.length(pace) == 0
    policy.begin_step(10, [pace.rate])
    assert policy.length(pace) == 0


def test_proposals_that_never_hold_pause_longer_and_longer_and_come_back() -> None:
    policy = SpeculationPolicy(max_tokens=8, max_step_tokens=1000, nap_tokens=4, costs=costs_of(lambda size: 0.01 * (4 + size)))
    pace = policy.pace()
    awake = 0
    for _ in range(400):
        policy.begin_step(1, [] if pace.asleep else [pace.rate])
        length = policy.length(pace)
        policy.passed(pace, 1)
        if not pace.asleep:
            awake += 1
            policy.record(pace, 0, 1)
        assert length == 0 or awake < 20
    assert awake < 60
    pace.asleep = 0
    for _ in range(40):
        policy.begin_step(1, [pace.rate])
        policy.record(pace, max(1, policy.length(pace)), 0)
    assert policy.length(pace) == 8


def test_an_outlier_does_not_change_much_and_stale_sizes_are_unknown() -> None:
    costs = StepCosts(stale_after=10)
    for _ in range(3):
        costs.observe(4, 0.01)
    costs.observe(4, 5.0)

    assert costs.seconds(np.array([4]))[0] < 0.013
    assert costs.is_known(4) and not costs.is_known(5) and not costs.is_known(100_000)
    for _ in range(11):
        costs.observe(100_000, 1.0)
    assert not costs.is_known(4)


def test_always_asks_for_no_time() -> None:
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=6, always=True)
    pace = Pace(rate=0.01, nap=16)
    policy.begin_step(2, [pace.rate])
    for _ in range(20):
        policy.record(pace, 0, 1)
    assert policy.length(pace) == 4
    policy.spend(4)
    assert policy.length(pace) == 0
    assert policy.num_probes == 0
