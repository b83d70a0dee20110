"""A prefill worker's scheduler decodes what it keeps: beside prompts, to the end, in blocks that it has from the start."""

from __future__ import annotations

import random

import pytest

from common.cache.retention import Retention
from common.engine.plan import NO_TOKEN
from common.engine.sequence import Sequence
from common.protocol.errors import OutOfBlocks
from services.prefill.scheduler import PrefillScheduler
from tests.unit.scheduling import MAX_CONTEXT, Bench, Pipeline, sequence

WINDOW = ((Retention(window=16), 40),)


def scheduler_on(bench: Bench, *, token_budget: int = 8) -> PrefillScheduler:
    return PrefillScheduler(bench.cache, token_budget=token_budget, max_running=8, max_context=MAX_CONTEXT)


def assert_right(bench: Bench, s: Sequence) -> None:
    assert s.tokens[s.generation.prompt_tokens :] == bench.expected(s)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(), WINDOW])
def test_kept_sequences_decode_to_their_end_beside_prompts_that_leave(
    windows: tuple[tuple[Retention, int], ...], depth: int
) -> None:
    bench = Bench(num_blocks=120, windows=windows)
    scheduler = scheduler_on(bench)
    kept = [sequence(f"kept {n}", list(range(3 + n, 3 + n + length)), max_tokens=20 + n) for n, length in enumerate((1, 9, 30))]
    passing = [sequence(f"passing {n}", list(range(100 + n, 110 + 7 * n)), max_tokens=9) for n in range(3)]
    for s in kept:
        scheduler.admit(s, 0.0, keeps=True)
    for s in passing:
        scheduler.admit(s, 0.0)
    news = Pipeline(bench, scheduler, depth).run()
    for s in kept:
        assert s.finish == "length" and s.num_outputs == s.sampling.max_tokens
        assert news.count(s) == s.num_outputs, "each token is told"
        assert_right(bench, s)
    for s in passing:
        assert s.finish is None and s.num_outputs == 1 and news.count(s) == 1
        assert_right(bench, s)
        bench.cache.close(s)
    assert bench.all_given_back() and scheduler.num_held == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_ends_it_and_what_was_computed_too_much_is_dropped(depth: int) -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    plain = sequence("", [5, 6, 7])
    stop = bench.runner.expected_tokens([5, 6, 7], plain.sampling, 4)[-1]
    s = sequence("a", [5, 6, 7], max_tokens=50, stop_token_ids=[stop])
    scheduler.admit(s, 0.0, keeps=True)
    Pipeline(bench, scheduler, depth).run()
    assert (s.finish, s.num_outputs) == ("stop", 4)
    assert bench.all_given_back() and scheduler.num_held == 0


def test_the_blocks_of_the_longest_answer_are_taken_at_once_or_not_at_all() -> None:
    bench = Bench(num_blocks=16)  # 64 tokens
    scheduler = scheduler_on(bench)
    with pytest.raises(OutOfBlocks):
        scheduler.admit(sequence("too long", list(range(3, 33)), max_tokens=40), 0.0, keeps=True)
    with pytest.raises(OutOfBlocks):  # 62 tokens fit, and decode workers, which keep a block free, would cut the answer
        scheduler.admit(sequence("cut elsewhere", list(range(3, 33)), max_tokens=32), 0.0, keeps=True)
    assert bench.all_given_back() and scheduler.num_held == 0
    first = sequence("first", list(range(3, 33)), max_tokens=20)
    scheduler.admit(first, 0.0, keeps=True)
    with pytest.raises(OutOfBlocks):
        scheduler.admit(sequence("second", list(range(103, 113)), max_tokens=20), 0.0, keeps=True)
    Pipeline(bench, scheduler).run()
    assert_right(bench, first)
    assert bench.all_given_back()


def test_one_that_decodes_is_no_backlog() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    scheduler.admit(sequence("a", [3, 4, 5], max_tokens=9), 0.0, keeps=True)
    assert scheduler.uncomputed_tokens == 3
    Pipeline(bench, scheduler, 1).step()
    assert scheduler.uncomputed_tokens == 0 and scheduler.num_held == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_random_cancels_failures_and_broken_logits_leave_nothing(depth: int) -> None:
    for seed in range(30):
        dice = random.Random(seed)
        bench = Bench(num_blocks=80, windows=WINDOW if seed % 2 else ())
        scheduler = scheduler_on(bench)
        line = Pipeline(bench, scheduler, depth)
        alive: list[Sequence] = []
        left: list[Sequence] = []
        for number in range(60):
            if dice.random() < 0.3:
                s = sequence(f"{number}", [dice.randrange(3, 900) for _ in range(dice.choice([1, 5, 20]))], max_tokens=12)
                try:
                    scheduler.admit(s, 0.0, keeps=dice.random() < 0.7)
                    alive.append(s)
                except OutOfBlocks:
                    pass
                except Exception as error:
                    assert type(error).__name__ == "OutOfCredits"
            if alive and dice.random() < 0.1:
                scheduler.cancel(dice.choice(alive))
            if dice.random() < 0.05:
                line.flights.clear()
                scheduler.rewind()
            line.fill()
            if line.flights:
                plan = line.flights.popleft()
                result = bench.runner.execute(plan)
                if dice.random() < 0.05:
                    broken = [row for row in result.rows if row.tokens]
                    if broken:
                        broken[0].tokens = [NO_TOKEN] * len(broken[0].tokens)
                for s in scheduler.commit(plan, result, 0.0):
                    if not s.is_broken:
                        assert_right(bench, s)
                    if s.num_outputs == 1 and not scheduler.holds(s) and s.blocks and not s.num_steps:
                        left.append(s)
                bench.cache.check()
        for s in alive:
            scheduler.cancel(s)
        while line.flights:
            plan = line.flights.popleft()
            scheduler.commit(plan, bench.runner.execute(plan), 0.0)
        for s in left:
            bench.cache.close(s)
        assert bench.all_given_back() and scheduler.num_held == 0, seed
