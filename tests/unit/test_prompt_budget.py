"""Prompts in parts that keep the ITL of what decodes beside them."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.plan import StepPlan, StepRow
from common.engine.speeds import Speeds, TokenRate
from common.protocol.capacity import Capacity
from common.protocol.messages import SamplingParams
from services.decode.prompt_budget import GRAIN_TOKENS, IDLE_TOKENS, LEAST_TOKENS, PromptBudget, needed_rate
from tests.unit.scheduling import sequence


class Engine:
    """A step takes `base_s`, and `token_s` for each token of a prompt but the first `free`; `any_s` more with any."""

    def __init__(self, base_s: float, token_s: float, objective_s: float = 0.02, any_s: float = 0.0, free: int = 0) -> None:
        self.base_s, self.token_s, self.any_s, self.free = base_s, token_s, any_s, free
        self.budget = PromptBudget(objective_s)

    def step(self, rows: int, prompt_tokens: int) -> float:
        seconds = self.base_s * (rows > 0) + self.token_s * max(0, prompt_tokens - self.free) + self.any_s * (prompt_tokens > 0)
        self.budget.observe(rows=rows, prompt_tokens=prompt_tokens, seconds=seconds)
        return seconds

    def settle(self, rows: int = 8) -> None:
        for _ in range(20):
            self.step(rows, 0)
        for _ in range(80):
            self.step(rows, self.budget.limit(rows, 1 << 20))


@given(st.floats(0.001, 0.017), st.floats(1e-6, 1e-4))
def test_steps_stay_within_the_objective_where_that_is_possible(base_s: float, token_s: float) -> None:
    engine = Engine(base_s, token_s)
    engine.settle()
    limit = engine.budget.limit(8, 8192)
    seconds = engine.step(8, limit)
    assert limit == LEAST_TOKENS or seconds <= max(0.022, 2.001 * base_s)
    if limit >= 2 * GRAIN_TOKENS:
        assert limit == 8192 or (limit + 8) % GRAIN_TOKENS == 0


def test_a_part_fills_most_of_what_the_objective_leaves() -> None:
    engine = Engine(0.006, 25e-6)
    engine.settle()
    assert engine.budget.limit(8, 8192) == 504  # 12.6 ms of 25 µs each; with the rows a whole number of 128s
    assert engine.budget.limit(8, 200) == 200


def test_an_objective_that_rows_alone_miss_lets_prompts_double_the_step() -> None:
    engine = Engine(0.051, 100e-6)
    engine.settle()
    assert engine.budget.limit(8, 8192) == 504  # 50.4 ms of 100 µs each


def test_rows_that_leave_the_objective_within_reach_are_slowed_down_by_no_more_than_it_or_a_quarter() -> None:
    for rows_ms, step_ms in ((6, 18), (12, 18), (15, 18.75), (16, 20), (18, 29.25), (20, 40), (30, 60)):
        engine = Engine(rows_ms / 1000, 1e-6)
        engine.settle()
        seconds = engine.step(8, engine.budget.limit(8, 1 << 20))
        assert seconds == pytest.approx(step_ms / 1000, rel=0.02), rows_ms


def test_without_an_objective_or_rows_nothing_is_limited_but_what_would_hold_up_a_row_for_long() -> None:
    free = Engine(0.006, 25e-6, objective_s=0.0)
    free.settle()
    assert free.budget.limit(8, 8192) == free.budget.limit(0, 8192) == 8192
    bound = Engine(0.006, 25e-6)
    assert bound.budget.limit(0, 8192) == IDLE_TOKENS
    assert bound.budget.limit(8, 8192) == GRAIN_TOKENS, "nothing is known yet"


def step_ms(engine: Engine, needed_per_s: float, *, between: int = 16) -> float:
    """Of a step with a part, after many that had so many steps of rows alone between them."""
    ms = 0.0
    for _ in range(60):
        for _ in range(between):
            engine.step(8, 0)
        ms = 1000 * engine.step(8, engine.budget.limit(8, 8192, needed_per_s))
    return ms


def test_a_prompt_that_has_time_leaves_rows_nearer_to_their_own_pace() -> None:
    engine = Engine(0.006, 25e-6)  # with a part of 504 tokens 18.6 ms, and 27,000 tokens a second
    engine.settle()
    assert step_ms(engine, 1000.0) == pytest.approx(10.0, abs=0.5), "half the objective at least"
    assert 11.0 < step_ms(engine, 16_000.0) < 16.0
    assert step_ms(engine, 40_000.0) == step_ms(engine, math.inf) == pytest.approx(18.6, abs=0.1)
    engine.base_s = 0.012
    engine.settle()
    assert step_ms(engine, 1000.0) == pytest.approx(15.0, abs=0.5), "a quarter longer than rows alone at least"


def test_a_worker_that_does_little_else_computes_prompts_faster_than_they_are_needed() -> None:
    engine = Engine(0.006, 25e-6)
    engine.settle()
    seldom = step_ms(engine, 12_000.0)
    often = [step_ms(engine, 12_000.0, between=0) for _ in range(10)][-1]
    assert seldom < 13.0 < often


@given(st.floats(0.002, 0.015), st.floats(5e-6, 5e-5), st.floats(0.0, 0.004), st.floats(1e3, 1e5))
def test_prompts_are_computed_as_fast_as_they_are_needed(
    base_s: float, token_s: float, any_s: float, needed_per_s: float
) -> None:
    engine = Engine(base_s, token_s, any_s=any_s)
    engine.settle()
    for _ in range(60):
        engine.step(8, engine.budget.limit(8, 1 << 20, needed_per_s))
    part, full = engine.budget.limit(8, 1 << 20, needed_per_s), engine.budget.limit(8, 1 << 20)
    assert part <= full
    assert part >= full - GRAIN_TOKENS or part / engine.step(8, part) >= needed_per_s


@pytest.mark.parametrize("free", [0, 100])
@pytest.mark.parametrize("any_s", [0.0, 0.004])
def test_a_first_prompt_is_in_time(any_s: float, free: int) -> None:
    """Although all that is known are prompts of 128 tokens, which seem to cost next to nothing besides reading the weights."""
    engine = Engine(0.005, 25e-6, any_s=any_s, free=free)
    for _ in range(10):
        engine.budget.observe(rows=0, prompt_tokens=128, seconds=0.0055)
        engine.step(1, 0)
    now, left, longest = 0.0, 5000, 0.0
    while left > 0:
        part = min(left, engine.budget.limit(3, 8192, left / max(0.5 - now, 1e-3)))
        seconds = engine.step(3, part)
        longest, now = max(longest, seconds), now + seconds
        left -= part
    assert now < 0.5
    assert longest < (0.013 if any_s == 0.0 else 0.021), "there is time for shorter steps, from the beginning to the end"


@pytest.mark.parametrize("any_s", [0.0, 0.004])
def test_after_short_parts_as_many_tokens_a_second_are_promised_as_after_long_ones(any_s: float) -> None:
    engine = Engine(0.005, 25e-6, any_s=any_s)
    engine.settle()
    promised = per_s(engine)
    step_ms(engine, 1000.0)
    assert per_s(engine) == pytest.approx(promised, rel=0.1)


def test_parts_that_cost_nothing_for_long_are_of_the_budget() -> None:
    engine = Engine(0.005, 25e-6)
    engine.settle()
    engine.token_s = 0.0
    for turn in range(4000):
        engine.step(8, 64 + turn % 2 * 448)
    assert 0 < engine.budget.limit(8, 8192) <= 8192
    assert per_s(engine) > 0


def test_how_fast_prompts_are_needed() -> None:
    prompts = [sequence(f"r{n}", list(range(1, 30 + n))) for n in range(3)]

    def needed(now: float = 5.0) -> float:
        return needed_rate(prompts[::-1], now, lambda prompt: prompt.num_unplanned)

    assert needed() == math.inf, "they are due at no time"
    for prompt in prompts:
        prompt.due_at = 6.0
    assert needed() == pytest.approx(29 + 30 + 31)
    prompts[1].due_at = 5.5
    assert needed() == pytest.approx((29 + 30) / 0.5)
    assert needed(5.5) == math.inf, "one is late"
    prompts[2].tokens.append(7)
    prompts[2].generation = msgspec.structs.replace(prompts[2].generation, prompt_tokens=31)
    assert needed() == math.inf, "one is computed again, and its stream waits"


@pytest.mark.parametrize("needed_per_s", [8e3, math.inf])
def test_rows_that_came_beside_parts_are_not_counted_twice(needed_per_s: float) -> None:
    """Steps with parts show that rows take longer, steps of these rows alone show it again."""
    engine = Engine(0.006, 25e-6)
    engine.settle()
    engine.base_s = 0.012
    for _ in range(40):
        engine.step(64, engine.budget.limit(64, 8192, needed_per_s))
    for _ in range(30):
        engine.step(64, 0)
    assert per_s(engine, 64) == pytest.approx(0.006 / 25e-6 / 0.018, rel=0.3), "6 ms of tokens a step of 18"


def test_rows_that_come_make_parts_smaller_although_no_step_without_a_prompt_has_shown_their_cost() -> None:
    engine = Engine(0.006, 25e-6)
    engine.settle()
    engine.base_s = 0.012
    for _ in range(60):
        engine.step(64, engine.budget.limit(64, 8192))
    assert engine.step(64, engine.budget.limit(64, 8192)) <= 0.0205


def test_what_is_said_of_the_next_100_ms() -> None:
    engine = Engine(0.006, 25e-6)
    assert engine.budget.capacity(8, budget=2048, backlog_tokens=70, places=5) == Capacity(0, 70, 0.0, 5)
    engine.settle()
    beside = engine.budget.capacity(8, budget=2048, backlog_tokens=5000, places=5)
    assert beside.prompt_tokens == pytest.approx(504 / (0.006 + 504 * 25e-6) * 0.1, rel=0.01)
    assert (beside.backlog_tokens, beside.itl_ms) == (5000, pytest.approx(6.0, rel=0.01))
    alone = engine.budget.capacity(0, budget=2048, backlog_tokens=0, places=5)
    for rows_ms, rows in ((19, 5), (21, 0)):
        engine.base_s = rows_ms / 1000
        engine.settle()
        assert engine.budget.capacity(8, budget=2048, backlog_tokens=0, places=5).rows == rows
    assert (alone.prompt_tokens, alone.itl_ms) == (pytest.approx(4000, rel=0.01), 0.0)


def test_a_rate_is_that_of_the_latest_tokens_and_short_prompts_count_for_little() -> None:
    rate = TokenRate()
    rate.measure(4, 0.01)
    assert rate.per_s == rate.token_s == 0.0, "a canary says nothing"
    for _ in range(8):
        rate.measure(2048, 0.05)
    rate.measure(64, 0.005)
    assert rate.per_s == pytest.approx(2048 / 0.05, rel=0.05)
    for _ in range(20):
        rate.measure(2048, 0.1)
    assert rate.per_s == pytest.approx(2048 / 0.1, rel=0.02)
    assert rate.token_s == pytest.approx(1 / rate.per_s)


def test_a_step_in_which_something_else_took_long_says_little_of_others() -> None:
    rate = TokenRate()
    rate.measure(2048, 30.0)
    assert rate.per_s == 0.0, "it may have been such a step"
    rate.measure(2048, 0.05)
    assert rate.per_s == pytest.approx(2048 / 0.05)
    for _ in range(4):
        rate.measure(2048, 0.05)
    rate.measure(2048, 30.0)
    assert rate.per_s > 0.3 * 2048 / 0.05
    for _ in range(12):
        rate.measure(2048, 0.5)
    assert rate.per_s == pytest.approx(2048 / 0.5, rel=0.2), "what lasts is believed"


def test_canaries_of_a_day_do_not_make_an_idle_worker_look_slow() -> None:
    """Four tokens every half minute, 6 ms each, are what an idle worker computes."""
    rate, engine = TokenRate(), Engine(0.006, 25e-6)
    engine.settle()
    engine.budget.observe(rows=0, prompt_tokens=2048, seconds=0.05)
    rate.measure(2048, 0.05)
    before = rate.per_s, per_s(engine, 0), per_s(engine, 8)
    for _ in range(2 * 60 * 24):
        engine.budget.observe(rows=0, prompt_tokens=4, seconds=0.006)
        rate.measure(4, 0.006)
    assert (rate.per_s, per_s(engine, 0), per_s(engine, 8)) == before


def test_speeds_know_prompts_from_answers() -> None:
    speeds = Speeds()
    row = StepRow([1] * 512, 0, [0], 1, SamplingParams(), 512)
    speeds.measure(StepPlan(1, [row]), 0.02)
    speeds.measure(StepPlan(1, [row]), 0.02)
    assert speeds.prefill_tokens_per_s == pytest.approx(25_600)
    speeds.measure(StepPlan(2, [StepRow([1], 512, [0], 1, SamplingParams(), 512)] * 4), 0.01)
    assert speeds.prefill_tokens_per_s == pytest.approx(25_600)
    assert speeds.tokens_per_s > 0 and speeds.step_ms > 0
    verifying = StepRow([1] * 8, 512, [0], 8, SamplingParams(), 512)
    for step in range(3, 90):
        speeds.measure(StepPlan(step, [verifying] * 8), 0.006)
    assert speeds.prefill_tokens_per_s == pytest.approx(25_600)


def test_what_a_token_adds_beside_rows_is_not_taken_for_what_it_takes_alone() -> None:
    engine = Engine(0.006, 15e-6)
    engine.settle()  # rows wait for memory, and a part is computed meanwhile
    for _ in range(4):
        engine.budget.observe(rows=0, prompt_tokens=2048, seconds=2048 * 25e-6)
    alone, beside = (engine.budget.capacity(rows, budget=8192, backlog_tokens=0, places=5) for rows in (0, 8))
    assert alone.prompt_tokens == pytest.approx(4000, rel=0.01)
    assert beside.prompt_tokens == pytest.approx(760 / (0.006 + 760 * 15e-6) * 0.1, rel=0.02)
    assert engine.budget.limit(8, 8192) == 760


def test_what_the_first_tokens_of_a_part_cost_does_not_keep_parts_short() -> None:
    """An 8B model on an H100, ten rows of 8,192 tokens: 7 ms a step, 5 more with any part, 16 µs a token (25 µs alone)."""
    for alone_first in (False, True):
        engine = Engine(0.007, 16e-6, any_s=0.005)
        if alone_first:
            engine.budget.observe(rows=0, prompt_tokens=2048, seconds=2048 * 25e-6)
        assert engine.budget.limit(8, 8192) <= GRAIN_TOKENS
        longest = 0.0
        for turn in range(200):
            longest = max(longest, engine.step(8, engine.budget.limit(8, 8192)))
            engine.step(8, 60 * (turn % 10 == 9))  # a prompt's end
        assert engine.budget.limit(8, 8192) == 376, "18 ms; with 504 it would be 20.1"
        assert longest <= 0.0205


def test_the_end_of_a_prompt_says_little_of_whole_parts() -> None:
    engine = Engine(0.007, 16e-6, any_s=0.005)
    engine.settle()
    whole = engine.budget.limit(8, 8192)
    for _ in range(50):
        engine.step(8, 20)
    assert engine.budget.limit(8, 8192) == whole
    engine.base_s = 0.03
    for _ in range(50):
        engine.step(8, 20)
    assert engine.budget.limit(8, 8192) < whole, "unless the objective is missed even so"


def per_s(engine: Engine, rows: int = 8) -> float:
    """Return the prompt tokens a second that the budget tells the router it computes beside `rows` decoding rows."""
    return engine.budget.capacity(rows, budget=8192, backlog_tokens=0, places=1).prompt_tokens_per_s


@pytest.mark.parametrize("pause_s", [0.1, 1.0, 10.0])
def test_one_step_in_which_something_else_took_long_hardly_makes_the_engine_slow(pause_s: float) -> None:
    engine = Engine(0.006, 20e-6, any_s=0.005)
    engine.settle()
    before, part = per_s(engine), engine.budget.limit(8, 8192)
    engine.budget.observe(rows=8, prompt_tokens=part, seconds=pause_s)
    assert per_s(engine) > 0.45 * before
    for _ in range(12):
        engine.step(8, engine.budget.limit(8, 8192))
    assert per_s(engine) == pytest.approx(before, rel=0.06)


@pytest.mark.parametrize("num_before", [0, 3])
def test_one_prompt_alone_during_which_something_else_took_long_does_not_make_the_engine_slow(num_before: int) -> None:
    """The router would send no other, which could show that it is not."""
    engine = Engine(0.006, 25e-6)
    for _ in range(10):
        engine.step(0, 128)
    for _ in range(num_before):
        engine.step(0, 2048)
    engine.settle()
    before = per_s(engine), per_s(engine, 0)
    engine.budget.observe(rows=0, prompt_tokens=2048, seconds=5.0)
    least = 0.95 if num_before else 0.2
    assert per_s(engine) > least * before[0]
    assert per_s(engine, 0) > least * before[1]


def test_steps_that_take_longer_from_now_on_make_the_engine_slow() -> None:
    engine = Engine(0.006, 20e-6, any_s=0.005)
    engine.settle()
    engine.any_s = 0.5
    for _ in range(40):
        engine.step(8, engine.budget.limit(8, 8192))
    assert engine.budget.limit(8, 8192) == LEAST_TOKENS
    assert per_s(engine) == pytest.approx(LEAST_TOKENS / 0.507, rel=0.15)


def test_how_fast_prompts_are_computed_goes_with_the_rows_though_none_is_computed_meanwhile() -> None:
    engine = Engine(0.014, 20e-6)
    engine.settle()
    slow = per_s(engine)
    engine.base_s = 0.006
    for _ in range(30):
        engine.step(8, 0)
    fast = per_s(engine)
    engine.settle()
    assert fast > 1.5 * slow
    assert fast == pytest.approx(per_s(engine), rel=0.35), "less, since parts grow by no more than a factor of two at once"


@pytest.mark.parametrize("rows", [0, 2])
def test_a_worker_that_has_computed_short_prompts_only_does_not_look_slow(rows: int) -> None:
    """An 8B model on an H200: 4 ms to read its weights, 8 ms for a prompt of 128 tokens, 52 ms for a part of 2,048."""
    engine = Engine(0.004, 25e-6, any_s=0.0008)
    for _ in range(10):
        engine.budget.observe(rows=0, prompt_tokens=128, seconds=0.0048 + 128 * 25e-6)
        for _ in range(7):
            engine.step(1, 0)
    said = per_s(engine, rows)
    for _ in range(4):
        engine.budget.observe(rows=0, prompt_tokens=2048, seconds=0.0008 + 2048 * 25e-6)
    for _ in range(50):
        engine.step(2, engine.budget.limit(2, 8192))
    assert said == pytest.approx(per_s(engine, rows), rel=0.3)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 8192), st.floats(1e-5, 2.0)).filter(lambda step: step[0] + step[1]),
        max_size=30,
    ),
    st.sampled_from([0.0, 0.005, 0.02]),
)
def test_whatever_steps_take_what_it_says_is_within_reason(steps: list[tuple[int, int, float]], objective_s: float) -> None:
    budget = PromptBudget(objective_s)
    for rows, prompt_tokens, seconds in steps:
        budget.observe(rows=rows, prompt_tokens=prompt_tokens, seconds=seconds)
        for beside in (0, 8):
            said = budget.capacity(beside, budget=8192, backlog_tokens=0, places=1)
            assert said.prompt_tokens >= 0
            assert not beside or not budget.token_s or said.prompt_tokens_per_s <= 1.5 / budget.token_s
            assert 0 < budget.limit(beside, 8192) <= 8192


def added_ms(tokens: int, draws: random.Random) -> float:
    """What a part adds to a step of an 8B model on an H200, as measured: little at first, and now and then 5 ms more."""
    measured = [(0, 1.2), (64, 2.0), (128, 2.6), (254, 5.0), (383, 7.0), (506, 11.4), (634, 17.5), (2048, 52.0)]
    (below, least), (above, most) = next(pair for pair in itertools.pairwise(measured) if tokens <= pair[1][0])
    typical = least + (most - least) * (tokens - below) / (above - below)
    return typical * draws.uniform(0.85, 1.2) + 5.0 * (draws.random() < 0.07)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alone_first", [False, True])
def test_nothing_that_parts_take_keeps_a_worker_from_computing_prompts(alone_first: bool, seed: int) -> None:
    """Their sizes and times scatter, and ends of prompts are of any size, down to one token."""
    draws, budget = random.Random(seed), PromptBudget(0.02)
    for _ in range(8):
        budget.observe(rows=1, prompt_tokens=0, seconds=0.0045)
        budget.observe(rows=0, prompt_tokens=2048 if alone_first else 128, seconds=0.0495 if alone_first else 0.0072)
    promised: list[float] = []
    for _ in range(300):
        left, needed_per_s, rows_ms = 8192 - draws.randrange(64), draws.choice([8e3, 15e3, 25e3, math.inf]), draws.uniform(4, 8)
        while left > 0:
            part = min(left, budget.limit(6, 8192, needed_per_s))
            budget.observe(rows=6, prompt_tokens=part, seconds=(rows_ms + added_ms(part, draws)) / 1000)
            left -= part
        budget.observe(rows=6, prompt_tokens=draws.randrange(1, 6), seconds=(rows_ms + 1.7) / 1000)
        for _ in range(10):
            budget.observe(rows=6, prompt_tokens=0, seconds=rows_ms / 1000)
        promised.append(budget.capacity(6, budget=8192, backlog_tokens=0, places=1).prompt_tokens_per_s)
    assert sorted(promised)[15] > 18_000, "by such parts it is 22,000 to 30,000"
    assert min(promised[1:]) > 12_000
