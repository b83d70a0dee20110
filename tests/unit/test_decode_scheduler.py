"""Promises of the decode scheduler."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.outcomes import Outcome
from common.engine.plan import NO_TOKEN, PART_TOKENS, part_of
from common.engine.sequence import Sequence
from common.protocol.errors import ContextLengthExceeded, OutOfBlocks, OutOfCredits
from services.decode.hooks import Propose
from services.decode.scheduler import DecodeScheduler, Progress
from tests.unit.scheduling import MAX_CONTEXT, VOCAB, Bench, Pipeline, sequence


def scheduler_on(
    bench: Bench, *, token_budget: int = 16, max_running: int = 8, propose: Propose | None = None
) -> DecodeScheduler:
    scheduler = DecodeScheduler(bench.cache, token_budget=token_budget, max_running=max_running, max_context=MAX_CONTEXT)
    if propose is not None:
        scheduler.propose = propose
    return scheduler


def step(bench: Bench, scheduler: DecodeScheduler) -> list[Progress] | None:
    plan = scheduler.plan(0.0)
    if plan is None:
        return None
    assert plan.num_tokens <= scheduler.token_budget + sum(row.num_samples > 0 for row in plan.rows)
    progress = scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    bench.pool.check()
    return progress


def run(bench: Bench, scheduler: DecodeScheduler) -> None:
    for _ in range(10_000):
        if step(bench, scheduler) is None:
            return
    raise AssertionError("the scheduler never came to rest")


def assert_right(bench: Bench, s: Sequence) -> None:
    assert s.tokens[s.generation.prompt_tokens :] == bench.expected(s)


def stop_after(bench: Bench, prompt: list[int], num_tokens: int) -> list[int]:
    """The stop ids that end this prompt's text after at most so many tokens."""
    return bench.runner.expected_tokens(prompt, sequence("", prompt).sampling, num_tokens)[-1:]


def test_the_room_it_announces_is_that_of_the_longest_sequence_it_would_take() -> None:
    bench = Bench()
    scheduler, taken = scheduler_on(bench, max_running=64), 0
    while scheduler.room:
        with pytest.raises((OutOfBlocks, ContextLengthExceeded)):
            scheduler.admit(sequence("long", list(range(scheduler.room + 1))))
        scheduler.admit(sequence(f"a{taken}", list(range(min(20, scheduler.room - 1)))))
        taken += 1
    assert taken > 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_without_a_token_leaves_alone_and_its_blocks_are_offered_to_nobody(ahead: bool) -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    well, broken = sequence("a", list(range(3, 20)), max_tokens=6), sequence("b", list(range(30, 52)), max_tokens=6)
    for s in (well, broken):
        scheduler.admit(s)
    while not (well.num_outputs and broken.num_outputs):
        step(bench, scheduler)
    published = broken.num_published
    plan = scheduler.plan(0.0)
    assert plan is not None
    later = scheduler.plan(0.0) if ahead else None
    assert (later is not None) == ahead
    result = bench.runner.execute(plan)
    result.rows[1].tokens = [NO_TOKEN]
    told = scheduler.commit(plan, result, 0.0)
    assert broken.is_broken and not well.is_broken and broken in [one.sequence for one in told]
    assert broken.num_published in (0, published) and NO_TOKEN not in broken.tokens
    assert not scheduler.holds(broken) and scheduler.holds(well)
    if later is not None:
        assert broken.blocks  # the step in flight writes to them
        scheduler.commit(later, bench.runner.execute(later), 0.0)
    assert not broken.blocks
    run(bench, scheduler)
    bench.pool.check()
    assert_right(bench, well)
    scheduler.cancel(broken)  # by whoever fails the request


def test_no_token_behind_a_rejected_proposal_breaks_nothing() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, propose=lambda s, limit: [1, 1, 1][:limit])
    s = sequence("a", list(range(3, 12)), max_tokens=6)
    scheduler.admit(s)
    step(bench, scheduler)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.rows[0].num_samples == 4
    result = bench.runner.execute(plan)
    assert result.rows[0].tokens[0] != 1
    result.rows[0].tokens[1:] = [NO_TOKEN] * 3
    scheduler.commit(plan, result, 0.0)
    assert not s.is_broken
    run(bench, scheduler)
    assert_right(bench, s)


def test_sequences_join_and_leave_at_every_step() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    first = sequence("a", [3, 4, 5], max_tokens=6)
    second = sequence("b", [6, 7, 8, 9], max_tokens=2)
    scheduler.admit(first)
    step(bench, scheduler)
    scheduler.admit(second)
    step(bench, scheduler)
    assert second.num_outputs == 1
    step(bench, scheduler)
    assert second.finish == "length"
    run(bench, scheduler)
    assert_right(bench, first)
    assert_right(bench, second)
    assert bench.all_given_back()


def test_decoding_goes_on_while_a_long_prompt_prefills() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=8)
    short, long = sequence("a", [3, 4, 5], max_tokens=30), sequence("b", list(range(3, 63)), max_tokens=4)
    scheduler.admit(short)
    step(bench, scheduler)
    scheduler.admit(long)
    before = short.num_outputs
    for _ in range(5):
        step(bench, scheduler)
    assert short.num_outputs == before + 5
    run(bench, scheduler)
    assert_right(bench, short)
    assert_right(bench, long)


def test_of_two_prompts_the_one_of_lower_priority_is_computed_first_and_the_other_still_runs() -> None:
    """Where no prefill worker computes prompts, it is here that one waits behind another."""
    bench = Bench()
    scheduler = scheduler_on(bench)
    early, late = sequence("early", list(range(3, 83)), max_tokens=2), sequence("late", list(range(103, 203)), max_tokens=2)
    late.generation = msgspec.structs.replace(late.generation, priority=-1)
    for s in (early, late):
        scheduler.admit(s)
    while not late.num_outputs:
        step(bench, scheduler)
    assert not early.num_outputs
    run(bench, scheduler)
    for s in (early, late):
        assert_right(bench, s)


def test_prompts_are_parted_at_the_same_places_however_many_rows_decode() -> None:
    """More rows than the budget has tokens do not make a prompt wait."""
    bench = Bench(num_blocks=200)
    scheduler = scheduler_on(bench, token_budget=8, max_running=13)
    for index in range(12):
        scheduler.admit(sequence(f"row {index}", [3 + index], max_tokens=60))
    for _ in range(3):
        step(bench, scheduler)
    scheduler.admit(sequence("long", list(range(100, 130)), max_tokens=2))
    parts: list[int] = []
    while sum(parts) < 30:
        plan = scheduler.plan(0.0)
        assert plan is not None
        assert sum(len(row.tokens) == 1 for row in plan.rows) == 12
        parts += [len(row.tokens) for row in plan.rows if len(row.tokens) > 1]
        scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    assert parts == [8, 8, 8, 6]
    run(bench, scheduler)
    assert bench.all_given_back()


def test_an_objective_parts_prompts_by_what_decodes_beside_them() -> None:
    bench = Bench(num_blocks=200)
    scheduler = scheduler_on(bench, token_budget=16)
    asked: list[tuple[int, int]] = []

    def limit(rows: int, budget: int, needed_per_s: float) -> int:
        asked.append((rows, budget))
        return 5 if rows else budget

    scheduler.prompt_limit = limit
    first, row = sequence("first", list(range(3, 43)), max_tokens=3), sequence("row", [3, 4], max_tokens=40)
    scheduler.admit(first)
    step(bench, scheduler)
    assert (first.num_computed, asked) == (16, [(0, 16)])
    scheduler.cancel(first)
    scheduler.admit(row)
    step(bench, scheduler)
    first = sequence("again", list(range(103, 143)), max_tokens=3)
    scheduler.admit(first)
    for computed in (5, 10, 15):
        step(bench, scheduler)
        assert (first.num_computed, asked[-1]) == (computed, (1, 16))
    run(bench, scheduler)
    assert_right(bench, first)
    assert_right(bench, row)
    assert bench.all_given_back()


def test_how_fast_prompts_are_needed_counts_those_that_are_computed_first() -> None:
    bench = Bench(num_blocks=200)
    scheduler = scheduler_on(bench, token_budget=16)
    needed: list[float] = []

    def limit(rows: int, budget: int, needed_per_s: float) -> int:
        needed.append(needed_per_s)
        return budget

    scheduler.prompt_limit = limit
    long, short = sequence("long", list(range(3, 43)), max_tokens=3), sequence("short", list(range(103, 123)), max_tokens=3)
    long.due_at, short.due_at = 10.0, 4.0
    scheduler.admit(long)
    scheduler.admit(short)
    plan = scheduler.plan(2.0)
    assert plan is not None
    assert needed == [10.0], "20 tokens in 2 s, or 60 in 8 s"
    scheduler.commit(plan, bench.runner.execute(plan), 2.0)
    short.due_at = 2.0
    scheduler.plan(2.5)
    assert needed[-1] == math.inf, "it is late"


def test_rows_with_a_token_in_flight_are_no_prompts_in_what_is_said_of_the_backlog() -> None:
    bench = Bench(num_blocks=200)
    scheduler = scheduler_on(bench, token_budget=16)
    row = sequence("row", [3, 4], max_tokens=40)
    scheduler.admit(row)
    assert (scheduler.num_decoding, scheduler.uncomputed_tokens) == (0, 2)
    step(bench, scheduler)
    assert (scheduler.num_decoding, scheduler.uncomputed_tokens) == (1, 0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None and second is not None and row.num_awaited == 2
    assert (scheduler.num_decoding, scheduler.uncomputed_tokens) == (1, 0)
    long = sequence("long", list(range(3, 43)), max_tokens=3)
    scheduler.admit(long)
    assert (scheduler.num_decoding, scheduler.uncomputed_tokens) == (1, 40)
    copied = sequence("copied", list(range(103, 143)), max_tokens=3)
    scheduler.admit(copied)
    scheduler.begin_copy(copied)
    assert (scheduler.num_decoding, scheduler.uncomputed_tokens) == (1, 40), "its KV arrives"
    scheduler.end_copy(copied, 30)
    assert scheduler.uncomputed_tokens == 40 + 10
    for plan in (first, second):
        scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    run(bench, scheduler)
    assert (scheduler.num_decoding, scheduler.uncomputed_tokens) == (0, 0)
    assert bench.all_given_back()


@given(st.integers(0, 100_000), st.integers(1, 100_000), st.integers(1, 40_000))
def test_a_part_is_most_of_the_room_and_ends_where_attention_has_few_pieces(start: int, left: int, budget: int) -> None:
    part = part_of(start, left, budget)
    assert min(left, (budget + 1) // 2) <= part <= min(left, budget)
    if part < left and budget >= 2 * PART_TOKENS:
        assert (start + part) % PART_TOKENS == 0
    if start % PART_TOKENS == 0 and budget % PART_TOKENS == 0:
        assert part == min(left, budget)


def test_out_of_blocks_preempts_the_newest_and_recomputes_the_same_tokens() -> None:
    bench = Bench(num_blocks=12)
    scheduler = scheduler_on(bench)
    old, new = sequence("old", [3] * 12, max_tokens=24), sequence("new", [4] * 12, max_tokens=24)
    scheduler.admit(old)
    scheduler.admit(new)
    run(bench, scheduler)
    assert scheduler.num_preemptions > 0
    assert old.num_outputs == new.num_outputs == 24
    assert_right(bench, old)
    assert_right(bench, new)
    assert bench.all_given_back()


def test_while_preempted_sequences_wait_nobody_new_is_taken() -> None:
    bench = Bench(num_blocks=12)
    scheduler = scheduler_on(bench)
    scheduler.admit(sequence("old", [3] * 12, max_tokens=24))
    scheduler.admit(sequence("new", [4] * 12, max_tokens=24))
    while not scheduler.num_preemptions:
        step(bench, scheduler)
    assert scheduler.credits == 0
    with pytest.raises(OutOfCredits):
        scheduler.admit(sequence("c", [3]))


def test_a_sequence_that_fills_the_whole_pool_ends_with_length() -> None:
    bench = Bench(num_blocks=4)
    scheduler = scheduler_on(bench)
    s = sequence("a", [3] * 6, max_tokens=100)
    scheduler.admit(s)
    run(bench, scheduler)
    assert (s.finish, len(s.tokens)) == ("length", 12)
    with pytest.raises(ContextLengthExceeded):
        scheduler.admit(sequence("b", [3] * 12))
    assert bench.all_given_back()


def test_refusals_take_nothing() -> None:
    bench = Bench(num_blocks=10)
    scheduler = scheduler_on(bench, max_running=2)
    scheduler.admit(sequence("a", [3] * 20))
    with pytest.raises(OutOfBlocks):
        scheduler.admit(sequence("b", [5] * 20))
    scheduler.admit(sequence("c", [3]))
    with pytest.raises(OutOfCredits):
        scheduler.admit(sequence("d", [3]))
    assert bench.pool.usage().owned == 6


def test_a_stop_token_ends_the_request_and_is_its_last_token() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    s = sequence("a", [3, 4, 5], max_tokens=50)
    stop = bench.runner.expected_tokens([3, 4, 5], s.sampling, 50)[9]
    s.sampling.stop_token_ids.append(stop)
    scheduler.admit(s)
    run(bench, scheduler)
    assert (s.finish, s.tokens[-1]) == ("stop", stop)


def test_right_wrong_and_half_right_proposals_give_the_same_tokens() -> None:
    prompt = [3, 4, 5, 6]
    lengths = {}
    for share in (0.0, 0.5, 1.0):
        bench = Bench()
        dice = random.Random(1)

        def propose(
            s: Sequence, limit: int, bench: Bench = bench, share: float = share, dice: random.Random = dice
        ) -> list[int]:
            truth = bench.runner.expected_tokens(prompt, s.sampling, s.num_outputs + limit)[s.num_outputs :]
            return [token if dice.random() < share else 5 for token in truth[:5]]

        scheduler = scheduler_on(bench, propose=propose)
        s = sequence("a", prompt, max_tokens=40)
        scheduler.admit(s)
        lengths[share] = 0
        while step(bench, scheduler) is not None:
            lengths[share] += 1
        assert_right(bench, s)
        assert s.num_outputs == 40
        assert bench.all_given_back()
    assert lengths[1.0] < lengths[0.5] < lengths[0.0]


def test_a_cancel_while_a_step_or_a_copy_touches_the_blocks_frees_them_when_it_has_ended() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    stepping, copying = sequence("a", [3] * 6), sequence("b", [4] * 20)
    scheduler.admit(stepping)
    scheduler.admit(copying)
    scheduler.begin_copy(copying)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.cancel(stepping)
    scheduler.cancel(copying)
    assert bench.pool.usage().owned == 7
    assert scheduler.commit(plan, bench.runner.execute(plan), 0.0) == []
    scheduler.end_copy(copying, 16)
    assert bench.all_given_back()


def copied(bench: Bench, scheduler: DecodeScheduler, name: str, prompt: list[int], num_computed: int) -> Sequence:
    """A sequence whose KV has come from elsewhere, and that no step has run with."""
    s = sequence(name, prompt)
    scheduler.admit(s)
    scheduler.begin_copy(s)
    scheduler.end_copy(s, num_computed)
    return s


@pytest.mark.parametrize(("prompt", "wanted", "start"), [(40, 16, 24), (40, 0, 39), (40, 1, 39), (12, 16, 0)])
def test_some_of_what_was_copied_is_computed_again(prompt: int, wanted: int, start: int) -> None:
    """Where a head wants hidden states of it."""
    bench = Bench()
    scheduler = scheduler_on(bench)
    scheduler.recompute = lambda sequence: wanted
    s = copied(bench, scheduler, "a", list(range(3, 3 + prompt)), prompt - 1)
    plan = scheduler.plan(0.0)
    assert plan is not None
    (row,) = plan.rows
    assert (row.start, len(row.tokens), row.num_samples) == (start, prompt - start, 1)
    scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    run(bench, scheduler)
    assert s.finish is not None and bench.all_given_back()


def test_what_is_recomputed_is_not_taken_over_from_another_sequence() -> None:
    """Two samples of one prompt: each needs the hidden states of its end, and neither waits for the other."""
    bench = Bench()
    scheduler = scheduler_on(bench)
    scheduler.recompute = lambda sequence: 8
    prompt = list(range(3, 43))
    both = [copied(bench, scheduler, name, prompt, 39) for name in "ab"]
    for one in both:
        one.num_cached = 0  # as the prefill worker said
    step(bench, scheduler)
    assert [(one.num_computed, one.num_outputs, one.num_cached) for one in both] == [(40, 1, 0)] * 2
    late = copied(bench, scheduler, "c", prompt, 39)
    assert late.num_computed >= 36, "it was in the cache when the sequence was admitted"
    run(bench, scheduler)
    assert bench.all_given_back()


def test_blocks_that_others_may_have_are_not_computed_again() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    prompt = list(range(3, 43))
    first = sequence("a", prompt, max_tokens=2)
    scheduler.admit(first)
    run(bench, scheduler)
    scheduler.recompute = lambda sequence: 30
    again = sequence("b", [*prompt, *range(50, 58)])
    scheduler.admit(again)
    shared = again.num_computed
    assert shared >= 32
    scheduler.begin_copy(again)
    scheduler.end_copy(again, 47)
    assert again.num_computed == shared
    run(bench, scheduler)
    assert bench.all_given_back()


@pytest.mark.parametrize(
    "how", ["stepped", "published", "published in a step", "cancelled", "cancelled in a step", "preempted"]
)
def test_copied_kv_is_found_once_a_step_has_run_or_the_sequence_has_left(how: str) -> None:
    bench = Bench(num_blocks=8)
    scheduler = scheduler_on(bench)
    s = copied(bench, scheduler, "a", list(range(20)), 19)
    hashes = bench.cache.hash(s, 19)
    assert len(hashes) == 4 and not bench.pool.groups[0].pool.match(hashes)
    if how == "stepped":
        step(bench, scheduler)
    elif how == "published":
        scheduler.publish(s)
    elif how == "preempted":
        scheduler._preempt(s)
    else:
        plan = scheduler.plan(0.0) if how.endswith("in a step") else None
        (scheduler.publish if how.startswith("published") else scheduler.cancel)(s)
        if plan is not None:
            scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    assert len(bench.pool.groups[0].pool.match(hashes)) == 4
    bench.pool.check()


def test_kv_whose_copy_failed_is_found_by_nobody() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    s = copied(bench, scheduler, "a", list(range(20)), 0)
    scheduler.cancel(s)
    assert not bench.pool.groups[0].pool.match(bench.cache.hash(s, 19)) and bench.all_given_back()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_history_gives_the_right_tokens_and_everything_back(data: st.DataObject) -> None:
    bench = Bench(num_blocks=data.draw(st.integers(8, 40)))
    dice = random.Random(data.draw(st.integers(0, 1000)))
    scheduler = scheduler_on(
        bench,
        token_budget=data.draw(st.integers(8, 40)),
        propose=lambda s, limit: [dice.randrange(3, 1000) for _ in range(min(limit, dice.randrange(4)))],
    )
    kept: list[Sequence] = []
    for index in range(data.draw(st.integers(1, 12))):
        length, start = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 2))
        s = sequence(f"r{index}", list(range(3 + start, 3 + start + length)), max_tokens=data.draw(st.integers(1, 20)))
        try:
            scheduler.admit(s)
        except (OutOfBlocks, OutOfCredits, ContextLengthExceeded):
            bench.pool.check()
            continue
        fate = data.draw(st.sampled_from(["run", "copy", "cancel", "cancel in flight"]))
        if fate == "copy":
            scheduler.begin_copy(s)
        step(bench, scheduler)
        if fate == "cancel":
            scheduler.cancel(s)
        elif fate == "cancel in flight":
            plan = scheduler.plan(0.0)
            scheduler.cancel(s)
            if plan is not None:
                scheduler.commit(plan, bench.runner.execute(plan), 0.0)
        else:
            kept.append(s)
        if fate == "copy":
            scheduler.end_copy(s, 0)
    run(bench, scheduler)
    for s in kept:
        assert_right(bench, s)
        assert s.finish == "length"
    assert scheduler.num_held == 0
    assert bench.all_given_back()


def test_a_step_is_planned_while_the_one_before_it_runs() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    s = sequence("a", [3, 4, 5], max_tokens=3)
    scheduler.admit(s)
    first, second, third = scheduler.plan(0.0), scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None and second is not None and third is not None
    assert scheduler.plan(0.0) is None, "three tokens are all it may have"
    assert [(row.tokens, row.start, row.feed) for row in second.rows] == [([-1], 3, 0)]
    for plan in (first, second, third):
        scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    assert_right(bench, s)
    assert s.finish == "length"
    assert bench.all_given_back()


def test_what_has_ended_keeps_its_blocks_until_the_step_ahead_has_run() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    s = sequence("a", [3] * 7, stop_token_ids=stop_after(bench, [3] * 7, 1))
    scheduler.admit(s)
    pipeline = Pipeline(bench, scheduler)
    progress = pipeline.step()
    assert progress and progress[0].sequence.finish == "stop"
    assert bench.pool.usage().owned == 2
    assert pipeline.step() == []
    assert s.num_outputs == 1
    assert bench.all_given_back()


class Guesser:
    """Proposes what the sequence will say, but for some tokens; and so behind some outcomes of a step in flight."""

    def __init__(self, bench: Bench, dice: random.Random, accuracy: float) -> None:
        self.bench = bench
        self.dice = dice
        self.accuracy = accuracy
        self.num_proposed = 0

    def propose(self, s: Sequence, limit: int) -> list[int]:
        return self.guesses(s, [], min(limit, self.dice.randrange(5)))

    def foresee(self, s: Sequence, limit: int) -> list[Outcome]:
        verifying, outcomes = s.verifying, list[Outcome]()
        for accepted in range(len(verifying) + 1):
            [token] = self.guesses(s, verifying[:accepted], 1)
            behind = self.guesses(s, [*verifying[:accepted], token], min(limit, self.dice.randrange(4)))
            outcomes.append(Outcome(accepted, token, behind))
        self.dice.shuffle(outcomes)
        return outcomes[: self.dice.randrange(len(outcomes) + 1)]

    def guesses(self, s: Sequence, more: list[int], count: int) -> list[int]:
        known = s.num_outputs + len(more)
        prompt = s.tokens[: s.generation.prompt_tokens]
        right = self.bench.runner.expected_tokens(prompt, s.sampling, known + count)[known:]
        self.num_proposed += count
        return [token if self.dice.random() < self.accuracy else self.dice.randrange(3, VOCAB) for token in right]


def guessing(bench: Bench, scheduler: DecodeScheduler, dice: random.Random, accuracy: float) -> Guesser:
    guesser = Guesser(bench, dice, accuracy)
    scheduler.propose, scheduler.foresee = guesser.propose, guesser.foresee
    return guesser


def test_a_row_behind_a_verification_in_flight_says_what_follows_each_outcome() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    s = sequence("a", [3, 4, 5], max_tokens=20)
    expected = bench.runner.expected_tokens([3, 4, 5], s.sampling, 20)
    scheduler.propose = lambda s, limit: expected[s.num_outputs : s.num_outputs + 2]
    behind = [Outcome(2, expected[3], expected[4:7]), Outcome(0, 9, [8])]
    scheduler.foresee = lambda s, limit: behind
    scheduler.admit(s)
    step(bench, scheduler)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert first is not None and second is not None
    assert scheduler.plan(0.0) is None, "where that one will be is not known"
    [row] = second.rows
    assert (row.tokens, row.start, row.num_samples, row.feed) == ([-1, 0, 0, 0], 4, 4, 0)
    assert (row.verified, row.outcomes) == (expected[1:3], behind)
    scheduler.commit(first, bench.runner.execute(first), 0.0)
    assert s.num_outputs == 4
    [progress] = scheduler.commit(second, bench.runner.execute(second), 0.0)
    assert (progress.proposed, progress.accepted, s.num_outputs) == (3, 3, 8)
    while s.finish is None:
        step(bench, scheduler)
    assert_right(bench, s)
    assert bench.all_given_back()


@pytest.mark.parametrize("needs", [{"presence_penalty": 1.0}, {"min_tokens": 20}])
def test_what_depends_on_the_tokens_themselves_waits_for_the_outcome(needs: dict[str, Any]) -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    guesser = guessing(bench, scheduler, random.Random(1), 1.0)
    scheduler.propose = lambda s, limit: guesser.guesses(s, [], min(limit, 3))
    scheduler.admit(sequence("a", [3, 4, 5], max_tokens=30, **needs))
    step(bench, scheduler)
    assert scheduler.plan(0.0) is not None
    assert scheduler.plan(0.0) is None


def test_right_guesses_behind_steps_in_flight_take_as_few_steps_as_guesses_that_are_waited_for() -> None:
    steps: list[int] = []
    for depth in (1, 2):
        bench = Bench(num_blocks=100)
        scheduler = scheduler_on(bench, token_budget=64)
        guesser = guessing(bench, scheduler, random.Random(1), 1.0)
        guesser.propose = scheduler.propose = lambda s, limit, guesser=guesser: guesser.guesses(s, [], min(limit, 3))
        scheduler.foresee = lambda s, limit, guesser=guesser: [
            Outcome(
                len(s.verifying),
                guesser.guesses(s, s.verifying, 1)[0],
                guesser.guesses(s, [*s.verifying, 0], min(limit, 3)),
            )
        ]
        s = sequence("a", [3, 4, 5], max_tokens=100)
        scheduler.admit(s)
        pipeline = Pipeline(bench, scheduler, depth=depth)
        count = 0
        while pipeline.step() is not None:
            count += 1
        steps.append(count)
        assert_right(bench, s)
        assert bench.all_given_back()
    assert steps[1] <= steps[0] + 1 and steps[0] < 30


def test_only_those_are_asked_for_proposals_that_may_have_any() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    running = [sequence(name, [3, 4, 5, 6 + at], max_tokens=12) for at, name in enumerate("abc")]
    asked: set[str] = set()

    def propose(s: Sequence, limit: int) -> list[int]:
        asked.add(s.request)
        return []

    def foresee(s: Sequence, limit: int) -> list[Outcome]:
        asked.add(s.request)
        return []

    scheduler.propose, scheduler.foresee = propose, foresee
    scheduler.begin_step = lambda decoding: [s for s in decoding if s.request == "b"]
    for s in running:
        scheduler.admit(s)
    Pipeline(bench, scheduler, depth=2).run()
    for s in running:
        assert_right(bench, s)
    assert asked == {"b"}


def test_a_failed_step_takes_those_planned_after_it_along() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    s, other, leaving = (sequence(name, [3, 4, number]) for number, name in enumerate("abc"))
    for each in (s, other, leaving):
        scheduler.admit(each)
    step(bench, scheduler)
    assert scheduler.plan(0.0) and scheduler.plan(0.0)
    scheduler.cancel(leaving)
    assert scheduler.rewind() == [s, other] and not scheduler.holds(leaving)
    plan = scheduler.plan(0.0, [other])
    assert plan is not None and len(plan.rows) == 1
    scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    assert (s.num_outputs, other.num_outputs) == (1, 2)
    while s.finish is None or other.finish is None:
        step(bench, scheduler)
    for each in (s, other):
        assert_right(bench, each)
    assert bench.all_given_back()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_running_ahead_changes_no_token_and_gives_everything_back(data: st.DataObject) -> None:
    bench = Bench(num_blocks=data.draw(st.integers(8, 40)))
    dice = random.Random(data.draw(st.integers(0, 1000)))
    scheduler = scheduler_on(
        bench,
        token_budget=data.draw(st.integers(8, 40)),
    )
    guessing(bench, scheduler, dice, data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])))
    pipeline = Pipeline(bench, scheduler, depth=data.draw(st.integers(2, 3)))
    kept: list[Sequence] = []
    for index in range(data.draw(st.integers(1, 12))):
        length, start = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 2))
        prompt = list(range(3 + start, 3 + start + length))
        s = sequence(
            f"r{index}",
            prompt,
            max_tokens=data.draw(st.integers(1, 20)),
            stop_token_ids=data.draw(st.sampled_from([[], stop_after(bench, prompt, 5)])),
            presence_penalty=data.draw(st.sampled_from([0.0, 0.0, 1.0])),
            min_tokens=data.draw(st.sampled_from([0, 0, 6])),
        )
        try:
            scheduler.admit(s)
        except (OutOfBlocks, OutOfCredits, ContextLengthExceeded):
            bench.pool.check()
            continue
        fate = data.draw(st.sampled_from(["run", "copy", "cancel", "cancel in flight"]))
        if fate == "copy":
            scheduler.begin_copy(s)
        pipeline.step()
        if fate == "cancel in flight":
            pipeline.fill()
        if fate.startswith("cancel"):
            scheduler.cancel(s)
        else:
            kept.append(s)
        if fate == "copy":
            scheduler.end_copy(s, 0)
    pipeline.run()
    for s in kept:
        assert_right(bench, s)
        assert s.finish in ("length", "stop")
    assert scheduler.num_held == 0
    assert bench.all_given_back()


def test_who_shares_a_prefix_waits_for_it_and_goes_before_prefixes_that_nobody_has_computed() -> None:
    bench = Bench(num_blocks=400)
    scheduler = scheduler_on(bench, token_budget=64, max_running=40)
    prefixes = [[3 + number] * 48 for number in range(4)]
    for number in range(20):
        scheduler.admit(sequence(f"{number % 4} {number}", [*prefixes[number % 4], 100 + number], max_tokens=1))
    ended: list[list[str]] = []
    computed = 0
    while plan := scheduler.plan(0.0):
        computed += plan.num_tokens
        done = [progress.sequence for progress in scheduler.commit(plan, bench.runner.execute(plan), 0.0)]
        ended.append([s.request for s in done if s.finish])
    assert computed == 4 * 48 + 20
    first, second = [{name[0] for name in names} for names in ended[:2]]
    # the step after the one that computes a prefix serves everyone who waits for it
    assert first == {"0"} and second >= {"0"} and len(ended[1]) >= 4
    assert bench.all_given_back()
