"""What a worker remembers of its requests, how much, and what it costs a step."""

from __future__ import annotations

from common.engine.timeline import MAX_EVENTS, Event
from common.protocol.handles import WorkerRef
from common.runtime.tracing import OFF
from common.worker.traces import MAX_RECORDS, WorkerTraces
from services.decode.scheduler import DecodeScheduler
from tests.unit.scheduling import MAX_CONTEXT, Bench, sequence

ME = WorkerRef("decode", "decode-1", 1)


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def traces() -> tuple[WorkerTraces, Clock]:
    clock = Clock()
    return WorkerTraces(OFF, lambda: ME, clock), clock


def test_a_request_is_explained_while_it_is_held_and_afterwards() -> None:
    made, clock = traces()
    one = sequence("r/1/1", [1, 2, 3])
    made.admitted(one)
    clock.now = 11.0
    made.step_ended(0.5)
    one.num_computed = 3
    one.tokens.append(9)
    made.committed()
    assert made.explain("r/1/1", None).records == []
    (held,) = made.explain("r/1/1", one).records
    assert held.left_at == 0.0 and held.first_token_at == 11.0
    assert held.events == [Event("chunk", 10.5, 11.0, num_tokens=3)]
    clock.now = 12.0
    made.left(one)
    (left,) = made.explain("r/1/1", None).records
    assert (left.attempt, left.admitted_at, left.left_at, left.prompt_tokens, left.output_tokens) == (0, 10.0, 12.0, 3, 1)
    assert made.explain("r/1/2", None).records == []


def test_after_its_first_token_a_request_costs_a_step_nothing() -> None:
    made, _ = traces()
    one, waiting = sequence("a", [1, 2, 3]), sequence("b", [1, 2, 3])
    made.admitted(one)
    made.admitted(waiting)
    one.num_computed = 3
    one.tokens.append(9)
    made.step_ended(0.5)
    made.committed()
    assert list(made._running) == [waiting]
    made.left(waiting)
    assert not made._running


def test_a_prompt_that_is_read_for_its_scores_is_told_whole() -> None:
    made, clock = traces()
    one = sequence("r-prompt/1/1", [1])
    one.given = [1, 2, 3, 4, 5]
    made.admitted(one)
    for num_computed in (2, 4):
        clock.now += 1.0
        made.step_ended(0.5)
        one.num_computed = num_computed
        one.tokens = one.given[: num_computed + 1]
        made.committed()
    one.finish = "stop"
    made.left(one)
    (record,) = made.explain("r-prompt/1/1", None).records
    assert [(event.name, event.num_tokens) for event in record.events] == [("chunk", 2), ("chunk", 2)]
    assert (record.prompt_tokens, record.output_tokens, record.first_token_at) == (5, 0, 0.0)


def test_a_prompt_that_ends_with_its_first_token_is_told_although_its_blocks_are_gone() -> None:
    made, clock = traces()
    bench = Bench()
    scheduler = DecodeScheduler(bench.cache, token_budget=64, max_running=8, max_context=MAX_CONTEXT)
    one = sequence("r", list(range(40)), max_tokens=1)
    scheduler.admit(one)
    made.admitted(one)
    plan = scheduler.plan(clock.now)
    assert plan is not None
    clock.now = 11.0
    made.step_ended(0.5)
    scheduler.commit(plan, bench.runner.execute(plan), clock.now)
    assert one.finish == "length" and not one.blocks
    made.committed()
    (record,) = made.explain("r", one).records
    assert record.events == [Event("chunk", 10.5, 11.0, num_tokens=40)]


def test_a_copy_tells_tokens_and_bytes() -> None:
    made, _ = traces()
    one = sequence("a", [1, 2, 3])
    made.admitted(one)
    made.copied(one, "pull", 9.0, num_tokens=2, num_bytes=640, peer="prefill-1")
    (record,) = made.explain("a", one).records
    assert record.events == [Event("pull", 9.0, 10.0, num_tokens=2, peer="prefill-1", num_bytes=640)]


def test_what_is_remembered_is_bounded() -> None:
    made, _ = traces()
    for number in range(MAX_RECORDS + 1):
        one = sequence(f"r{number}", [1])
        made.admitted(one)
        for _ in range(MAX_EVENTS + 5 if number == MAX_RECORDS else 0):
            made.handed_off(one, 9.0, "decode-2")
        made.left(one)
    assert made.explain("r0", None).records == [] and made.explain("r1", None).records
    (last,) = made.explain(f"r{MAX_RECORDS}", None).records
    assert len(last.events) == MAX_EVENTS
