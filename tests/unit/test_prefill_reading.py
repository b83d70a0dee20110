"""Promises of the prefill scheduler to prompts that are read: scored, or embedded."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from common.engine.plan import FIXED_POINT, StepPlan
from common.engine.sequence import Sequence
from common.engine.simulated.runner import expected_scores, expected_total
from common.protocol import tokens as token_bytes
from common.protocol.errors import ContextLengthExceeded, ProtocolError
from common.protocol.messages import Generation, SamplingParams
from services.prefill.scheduler import PrefillScheduler
from tests.unit.scheduling import GATEWAY, MAX_CONTEXT, VOCAB, Bench, Pipeline, sequence

PROMPT = list(range(3, 40))


def reading(request: str, prompt: list[int], *, known: int = 1, pooling: Any = "", salt: bytes = b"") -> Sequence:
    tokens, given = (prompt, []) if pooling else (prompt[:known], prompt[known:])
    generation = Generation(
        request=request,
        attempt=1,
        gateway=GATEWAY,
        tokens=token_bytes.pack(tokens),
        prompt_tokens=len(prompt) if pooling else 1,
        sampling=SamplingParams(temperature=0.0, max_tokens=len(prompt), logprobs=2),
        deadline_ms=1 << 60,
        salt=salt,
        given=token_bytes.pack(given),
        pooling=pooling,
    )
    return Sequence.of(generation, vocab_size=VOCAB, max_context=MAX_CONTEXT)


def scheduler_on(bench: Bench, *, token_budget: int = 8) -> PrefillScheduler:
    return PrefillScheduler(bench.cache, token_budget=token_budget, max_running=8, max_context=MAX_CONTEXT)


def run(bench: Bench, scheduler: PrefillScheduler) -> list[StepPlan]:
    """Every step, to the end; those that have ended give their blocks back."""
    plans: list[StepPlan] = []
    while (plan := scheduler.plan(0.0)) is not None:
        plans.append(plan)
        for done in scheduler.commit(plan, bench.runner.execute(plan), 0.0):
            if done.finish is not None or not done.is_read:
                bench.cache.close(done)
        bench.pool.check()
    return plans


@pytest.mark.parametrize("budget", [1, 5, 8, 64])
def test_every_token_but_the_first_is_scored_once_whatever_the_chunks(budget: int) -> None:
    bench = Bench()
    scheduler, s = scheduler_on(bench, token_budget=budget), reading("a", PROMPT)
    scheduler.admit(s, 0.0)
    plans = run(bench, scheduler)
    assert sum(plan.num_tokens for plan in plans) == len(PROMPT) - 1
    assert s.tokens == PROMPT
    assert [one.logprob for one in s.logprobs] == expected_scores(PROMPT)
    assert s.finish == "stop"
    frame = s.frame(0)
    assert frame.tokens == PROMPT[1:] and frame.logprobs == s.logprobs and frame.finish == "stop"
    assert bench.all_given_back()


def test_a_cached_prefix_does_not_swallow_scores() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    scheduler.admit(sequence("before", PROMPT), 0.0)
    run(bench, scheduler)
    s = reading("a", PROMPT)
    scheduler.admit(s, 0.0)
    assert s.num_computed == 0
    run(bench, scheduler)
    assert [one.logprob for one in s.logprobs] == expected_scores(PROMPT)


def test_the_next_attempt_goes_on_behind_what_was_scored_with_a_cached_prefix() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    scheduler.admit(reading("before", PROMPT), 0.0)
    run(bench, scheduler)
    s = reading("a", PROMPT, known=22)
    scheduler.admit(s, 0.0)
    assert s.num_computed == 20
    run(bench, scheduler)
    assert s.num_outputs == len(PROMPT) - 1
    assert [one.logprob for one in s.logprobs] == expected_scores(PROMPT)[21:]
    assert s.frame(21).tokens == PROMPT[22:]
    assert bench.all_given_back()


def test_what_is_scored_serves_others_as_a_prefix() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=64)
    scheduler.admit(reading("a", PROMPT), 0.0)
    run(bench, scheduler)
    after = sequence("b", PROMPT)
    scheduler.admit(after, 0.0)
    assert after.num_cached == 36


@pytest.mark.parametrize("budget", [1, 5, 64])
def test_a_mean_is_over_every_token_though_a_prefix_is_cached(budget: int) -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=budget)
    scheduler.admit(sequence("before", PROMPT), 0.0)
    run(bench, scheduler)
    s = reading("a", PROMPT, pooling="mean")
    scheduler.admit(s, 0.0)
    assert sum(plan.num_tokens for plan in run(bench, scheduler)) == len(PROMPT)
    check_embedding(s, expected_total(PROMPT) / len(PROMPT))
    assert bench.all_given_back()


def test_the_last_token_needs_only_what_is_not_cached() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    scheduler.admit(sequence("before", PROMPT), 0.0)
    run(bench, scheduler)
    s = reading("a", PROMPT, pooling="last")
    scheduler.admit(s, 0.0)
    assert sum(plan.num_tokens for plan in run(bench, scheduler)) == 1
    check_embedding(s, expected_total(PROMPT) - expected_total(PROMPT[:-1]))
    assert s.num_cached == 36


def check_embedding(s: Sequence, expected: Any) -> None:
    frame = s.frame(0)
    assert (frame.tokens, frame.finish) == ([], "stop")
    vector = np.frombuffer(frame.embedding, "<f4")
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
    whole = expected * FIXED_POINT
    assert vector == pytest.approx(whole / np.linalg.norm(whole), abs=1e-6)


def test_readings_and_prompts_share_steps_with_a_runner_that_runs_ahead() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    pipeline = Pipeline(bench, scheduler)
    scored, pooled, prompt = reading("a", PROMPT), reading("b", PROMPT, pooling="mean"), sequence("c", list(range(50, 80)))
    for one in (scored, pooled, prompt):
        scheduler.admit(one, 0.0)
    for done in pipeline.run():
        if done.finish is not None or done is prompt:
            bench.cache.close(done)
    assert [one.logprob for one in scored.logprobs] == expected_scores(PROMPT)
    check_embedding(pooled, expected_total(PROMPT) / len(PROMPT))
    assert prompt.tokens[30:] == bench.expected(prompt)
    assert bench.all_given_back()


def test_a_failed_step_counts_nothing_twice() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    scored, pooled = reading("a", PROMPT), reading("b", PROMPT, pooling="mean")
    scheduler.admit(scored, 0.0)
    scheduler.admit(pooled, 0.0)
    for number in range(30):
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        if number % 2:
            scheduler.rewind()
            continue
        scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    assert [one.logprob for one in scored.logprobs] == expected_scores(PROMPT)
    check_embedding(pooled, expected_total(PROMPT) / len(PROMPT))


def test_one_that_is_cancelled_gives_its_blocks_back() -> None:
    bench = Bench()
    scheduler, s = scheduler_on(bench), reading("a", PROMPT)
    scheduler.admit(s, 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.cancel(s)
    assert not bench.all_given_back()
    scheduler.commit(plan, bench.runner.execute(plan), 0.0)
    assert bench.all_given_back()


def test_what_can_not_be_read_is_refused_before_anything_is_taken() -> None:
    with pytest.raises(ContextLengthExceeded, match="257 tokens"):
        reading("a", [5] * (MAX_CONTEXT + 1))
    with pytest.raises(ProtocolError, match="token ids"):
        reading("a", [5, 6, VOCAB])
    assert reading("a", [5] * MAX_CONTEXT).length == MAX_CONTEXT - 1


def test_a_prompt_that_is_read_is_charged_to_its_tenant_as_it_ends() -> None:
    bench = Bench()
    scheduler = scheduler_on(bench)
    for index in range(3):
        s = reading(f"r{index}", PROMPT, pooling="mean", salt=bytes([index]))
        s.generation = msgspec.structs.replace(s.generation, tenant="acme")
        scheduler.admit(s, 0.0)
        run(bench, scheduler)
        assert scheduler._parts.turns.shares.time("acme") == (1 + index) * len(PROMPT)
