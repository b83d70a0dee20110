"""Promises of the decode scheduler to prompts that it reads, where there is no prefill worker for them."""

from __future__ import annotations

import msgspec
import pytest

from common.engine.sequence import Sequence
from common.engine.simulated.runner import expected_scores, expected_total
from common.protocol.errors import ContextLengthExceeded, OutOfBlocks
from services.decode.scheduler import DecodeScheduler
from tests.unit.scheduling import MAX_CONTEXT, Bench, Pipeline, sequence
from tests.unit.test_prefill_reading import check_embedding, reading

PROMPT = list(range(3, 53))


def scheduler_on(bench: Bench, *, token_budget: int) -> DecodeScheduler:
    return DecodeScheduler(bench.cache, token_budget=token_budget, max_running=8, max_context=MAX_CONTEXT)


def check_scores(s: Sequence) -> None:
    assert s.tokens == PROMPT
    assert [one.logprob for one in s.logprobs] == expected_scores(PROMPT)
    assert s.finish == "stop"


@pytest.mark.parametrize("budget", [1, 3, 16, 100])
def test_what_is_read_runs_beside_what_is_decoded_and_ends(budget: int) -> None:
    bench = Bench()
    scheduler = scheduler_on(bench, token_budget=budget)
    scored, pooled, decoded = reading("a", PROMPT), reading("b", PROMPT, pooling="mean"), sequence("c", PROMPT[:9])
    for one in (scored, pooled, decoded):
        scheduler.admit(one)
    Pipeline(bench, scheduler).run()
    check_scores(scored)
    check_embedding(pooled, expected_total(PROMPT) / len(PROMPT))
    assert decoded.output == bench.expected(decoded)
    assert bench.all_given_back()


def test_two_tokens_are_a_reading_too() -> None:
    bench = Bench()
    scheduler, s = scheduler_on(bench, token_budget=8), reading("a", [5, 6])
    scheduler.admit(s)
    Pipeline(bench, scheduler).run()
    assert [one.logprob for one in s.logprobs] == expected_scores([5, 6])
    assert bench.all_given_back()


@pytest.mark.parametrize("pooling", ["", "mean"])
def test_one_that_is_preempted_is_read_again_and_says_nothing_twice(pooling: str) -> None:
    bench = Bench(num_blocks=20)
    scheduler = scheduler_on(bench, token_budget=2)
    decoded, s = sequence("a", PROMPT[20:28], max_tokens=60), reading("b", PROMPT, pooling=pooling)
    scheduler.admit(decoded)
    scheduler.admit(s)
    Pipeline(bench, scheduler, depth=1).run()
    assert scheduler.num_preemptions == 1
    if pooling:
        check_embedding(s, expected_total(PROMPT) / len(PROMPT))
    else:
        check_scores(s)
    assert decoded.output == bench.expected(decoded)
    assert bench.all_given_back()


def test_one_that_does_not_fit_takes_nothing() -> None:
    bench = Bench(num_blocks=8)
    scheduler = scheduler_on(bench, token_budget=8)
    with pytest.raises(ContextLengthExceeded):
        scheduler.admit(reading("a", PROMPT))
    scheduler.admit(sequence("b", PROMPT[:20]))
    with pytest.raises(OutOfBlocks):
        scheduler.admit(reading("c", PROMPT[:20]))
    assert scheduler.num_held == 1


def test_a_prompt_that_is_read_is_charged_to_its_tenant_as_it_ends() -> None:
    bench = Bench()
    scheduler, s = scheduler_on(bench, token_budget=8), reading("a", PROMPT)
    s.generation = msgspec.structs.replace(s.generation, tenant="acme")
    scheduler.admit(s)
    Pipeline(bench, scheduler).run()
    assert scheduler._parts.turns.shares.time("acme") == len(PROMPT) - 1


def test_a_prompt_as_long_as_the_context_is_read_and_not_continued() -> None:
    bench = Bench(num_blocks=MAX_CONTEXT)
    scheduler, whole = scheduler_on(bench, token_budget=64), [3 + index % 50 for index in range(MAX_CONTEXT)]
    s = reading("a", whole, pooling="mean")
    scheduler.admit(s)
    Pipeline(bench, scheduler).run()
    check_embedding(s, expected_total(whole) / len(whole))
    with pytest.raises(ContextLengthExceeded):
        scheduler.admit(sequence("b", whole))
