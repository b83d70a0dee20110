"""Promises of the prefill scheduler."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.plan import NO_TOKEN
from common.engine.sequence import Sequence
from common.engine.shares import MAX_PRIORITY
from common.protocol.errors import ContextLengthExceeded, OutOfBlocks, OutOfCredits
from services.prefill.scheduler import PrefillScheduler
from tests.unit.scheduling import MAX_CONTEXT, VOCAB, Bench, Pipeline, generation, sequence


def scheduler_on(bench: Bench, *, token_budget: int = 8, max_running: int = 8) -> PrefillScheduler:
    return PrefillScheduler(bench.cache, token_budget=token_budget, max_running=max_running, max_context=MAX_CONTEXT)


def step(bench: Bench, scheduler: PrefillScheduler, now: float = 0.0) -> list[Sequence]:
    plan = scheduler.plan(now)
    assert plan is not None
    assert plan.num_tokens <= scheduler.token_budget
    return scheduler.commit(plan, bench.runner.execute(plan), now)


def test_a_prompt_longer_than_the_budget_runs_in_chunks_and_yields_the_right_first_token() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    s = sequence("a", list(range(3, 30)))
    scheduler.admit(s, 0.0)
    finished = [done for _ in range(4) for done in step(bench, scheduler)]
    assert finished == [s]
    assert s.tokens[27:] == bench.expected(s)
    assert scheduler.plan(0.0) is None


def test_a_prompt_without_a_token_leaves_alone_and_its_blocks_are_offered_to_nobody() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    broken, well = sequence("a", list(range(3, 20))), sequence("b", list(range(30, 50)))
    for s in (broken, well):
        scheduler.admit(s, 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    result = bench.runner.execute(plan)
    mine = next(index for index, row in enumerate(plan.rows) if row.tokens[0] == 3)
    result.rows[mine].tokens = [NO_TOKEN]
    assert set(scheduler.commit(plan, result, 0.0)) == {broken, well}
    assert broken.is_broken and not broken.blocks and len(broken.tokens) == 17
    assert well.tokens[20:] == bench.expected(well)
    bench.pool.check()
    again = sequence("c", list(range(3, 20)))
    scheduler.admit(again, 0.0)
    assert again.num_computed == 0  # not from a cache


def test_a_second_equal_prompt_reuses_every_full_block_but_computes_its_last_token() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    prompt = list(range(3, 19))
    first, second = sequence("a", prompt), sequence("b", prompt)
    scheduler.admit(first, 0.0)
    step(bench, scheduler)
    scheduler.admit(second, 0.0)
    assert second.num_computed == 12
    assert second.num_cached == 12
    step(bench, scheduler)
    assert second.tokens == first.tokens


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    prompt = list(range(3, 24))
    together = [sequence(f"r{index}", prompt, seed=index) for index in range(4)]
    for s in together:
        scheduler.admit(s, 0.0)
    computed, done = 0, []
    while plan := scheduler.plan(0.0):
        computed += plan.num_tokens
        done += scheduler.commit(plan, bench.runner.execute(plan), 0.0)
        bench.pool.check()
    assert computed == 21 + 3 * 1
    assert [s.num_cached for s in together] == [0, 20, 20, 20]
    for s in done:
        assert s.tokens[21:] == bench.expected(s)
        bench.cache.close(s)
    assert bench.all_given_back()


def test_a_short_prompt_overtakes_a_long_one_and_the_long_one_ages_to_the_front() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    long, short = sequence("long", list(range(3, 103))), sequence("short", [5, 6, 7])
    scheduler.admit(long, 0.0)
    scheduler.admit(short, 0.1)
    assert step(bench, scheduler, 0.1) == [short]
    late = sequence("late", [8, 9])
    scheduler.admit(late, 10.0)
    plan = scheduler.plan(10.0)
    assert plan is not None
    assert len(plan.rows[0].tokens) == scheduler.token_budget


def test_what_has_the_least_priority_does_not_wait_for_a_long_prompt_of_any_age() -> None:
    """A canary, for instance, on a machine that computes fewer tokens a second than age makes up for."""
    bench = Bench()
    scheduler = scheduler_on(bench)
    scheduler.admit(sequence("long", list(range(3, 103))), 0.0)
    canary = Sequence.of(
        msgspec.structs.replace(generation("canary", [1, 2, 3, 4]), priority=-MAX_PRIORITY),
        vocab_size=VOCAB,
        max_context=MAX_CONTEXT,
    )
    scheduler.admit(canary, 300.0)
    assert step(bench, scheduler, 300.0) == [canary]


def test_refusals_take_nothing() -> None:
    bench = Bench(num_blocks=8)
    scheduler = scheduler_on(bench, max_running=2)
    scheduler.admit(sequence("a", list(range(3, 23))), 0.0)
    with pytest.raises(OutOfBlocks):
        scheduler.admit(sequence("b", list(range(30, 50))), 0.0)
    with pytest.raises(ContextLengthExceeded):
        scheduler.admit(sequence("c", list(range(3, 40))), 0.0)
    scheduler.admit(sequence("d", [3]), 0.0)
    with pytest.raises(OutOfCredits):
        scheduler.admit(sequence("e", [3]), 0.0)
    assert bench.pool.usage().owned == 6


def test_a_cancel_while_a_step_or_a_copy_touches_the_blocks_frees_them_when_it_has_ended() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    stepping, copying = sequence("a", [3] * 6), sequence("b", [4] * 20)
    scheduler.admit(stepping, 0.0)
    scheduler.admit(copying, 0.0)
    scheduler.begin_copy(copying)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.cancel(stepping)
    scheduler.cancel(copying)
    assert bench.pool.usage().owned == 7
    assert scheduler.commit(plan, bench.runner.execute(plan), 0.0) == []
    scheduler.end_copy(copying, 16)
    assert bench.all_given_back()


def test_a_failed_step_is_as_if_it_had_never_been() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=8)
    s, leaving = sequence("a", [3] * 6), sequence("b", [4] * 6)
    scheduler.admit(s, 0.0)
    scheduler.admit(leaving, 0.0)
    assert scheduler.plan(0.0) is not None and scheduler.plan(0.0) is not None
    scheduler.cancel(leaving)
    assert scheduler.rewind() == [s] and scheduler.holds(s) and not scheduler.holds(leaving)
    assert scheduler.plan(0.0, []) is None
    plan = scheduler.plan(0.0, [s])
    assert plan is not None and [row.start for row in plan.rows] == [0]
    assert scheduler.commit(plan, bench.runner.execute(plan), 0.0) == [s] and s.tokens[6:] == bench.expected(s)
    bench.cache.close(s)
    assert bench.all_given_back()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 3), st.sampled_from(["run", "cancel", "copy"])), min_size=1, max_size=20
    ),
    st.integers(1, 40),
)
def test_any_history_gives_the_right_tokens_and_everything_back(arrivals: list[tuple[int, int, str]], budget: int) -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=budget)
    open_copies: list[Sequence] = []
    done: list[Sequence] = []

    def one_step(cancel: Sequence | None = None) -> bool:
        plan = scheduler.plan(0.0)
        if cancel is not None:
            scheduler.cancel(cancel)
        if plan is None:
            return False
        for s in scheduler.commit(plan, bench.runner.execute(plan), 0.0):
            assert s.tokens[s.generation.prompt_tokens :] == bench.expected(s)
            bench.cache.close(s)
            done.append(s)
        bench.pool.check()
        return True

    for index, (length, start, fate) in enumerate(arrivals):
        s = sequence(f"r{index}", list(range(3 + start, 3 + start + length)))
        try:
            scheduler.admit(s, 0.0)
        except (OutOfBlocks, OutOfCredits):
            bench.pool.check()
            continue
        if fate == "copy":
            scheduler.begin_copy(s)
            open_copies.append(s)
        one_step(cancel=s if fate == "cancel" else None)
        if open_copies and index % 2:
            scheduler.end_copy(open_copies.pop(), 0)
    for s in open_copies:
        scheduler.end_copy(s, 0)
    while one_step():
        pass
    assert scheduler.num_held == 0
    assert bench.all_given_back()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.booleans()), min_size=1, max_size=16), st.integers(1, 40))
def test_running_ahead_changes_no_token_and_gives_everything_back(arrivals: list[tuple[int, int, bool]], budget: int) -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=budget)
    pipeline = Pipeline(bench, scheduler)
    done: list[Sequence] = []
    kept: list[Sequence] = []
    for index, (length, start, cancelled) in enumerate(arrivals):
        s = sequence(f"r{index}", list(range(3 + start, 3 + start + length)))
        try:
            scheduler.admit(s, 0.0)
        except (OutOfBlocks, OutOfCredits):
            bench.pool.check()
            continue
        pipeline.fill()
        if cancelled:
            scheduler.cancel(s)
        else:
            kept.append(s)
        for finished in pipeline.step() or []:
            done.append(finished)
            bench.cache.close(finished)
    for finished in pipeline.run():
        done.append(finished)
        bench.cache.close(finished)
    assert {s.request for s in kept} <= {s.request for s in done}
    for s in done:
        assert s.tokens[s.generation.prompt_tokens :] == bench.expected(s)
    assert bench.all_given_back()


def test_a_step_takes_up_no_more_prompts_than_keep_the_engine_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.prompt_parts.PACKED_TOKENS", 20)
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    for number in range(6):
        scheduler.admit(sequence(f"short {number}", [3 + number] * 8), 0.0)
    scheduler.admit(sequence("long", list(range(3, 80))), 0.0)
    sizes = []
    while plan := scheduler.plan(0.0):
        sizes.append(plan.num_tokens)
        scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    assert sizes == [24, 24, 64, 13]
