"""KV pools of different sizes: what clients are promised, and who gets what only some workers hold."""

from __future__ import annotations

import pytest

from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence, SamplingParams
from services.gateway.actions import Ended, Limits, Requeue, State
from services.gateway.dispatch import Dispatcher
from services.gateway.generation import GenerationRequest
from services.gateway.handoff import handed_off
from services.gateway.health import Health
from services.gateway.placement import OVERTAKEN, Placement
from services.gateway.requests import Request
from services.gateway.router import Router
from tests.unit.gateway_request import D1, D2, GATEWAY, P1, PROMPT, frame, kinds, make
from tests.unit.test_router import job, prompt, router, worker

SMALL = worker("decode", 1, max_context=1000)
LARGE = worker("decode", 2, max_context=4000)
LONG = job(prompt(2000))


@pytest.mark.parametrize(
    ("presences", "longest", "longest_read"),
    [
        ([], 0, 0),
        ([SMALL], 1000, 1000),
        ([SMALL, LARGE], 4000, 4000),
        ([SMALL, worker("decode", 2, max_context=4000, state="draining")], 1000, 1000),
        ([SMALL, worker("decode", 2, state="starting")], 1000, 1000),
        ([SMALL, worker("decode", 2)], 0, 0),  # one of an older version, which says nothing
        ([SMALL, worker("prefill", 1, max_context=3000)], 1000, 3000),
        ([LARGE, worker("prefill", 1, max_context=3000)], 4000, 4000),
        ([worker("prefill", 1, max_context=3000)], 3000, 3000),
    ],
)
def test_as_much_is_promised_as_a_worker_that_is_alive_holds(
    presences: list[Presence], longest: int, longest_read: int
) -> None:
    pool = router(*presences)
    assert (pool.longest, pool.longest_read) == (longest, longest_read)


def test_what_is_promised_stays_while_the_largest_may_return_and_follows_who_comes() -> None:
    pool = router(SMALL, LARGE)
    pool.refresh([], 100.0)
    assert pool.longest == 4000
    pool.refresh([LARGE], 101.0)
    pool.refresh([SMALL], 101.0 + pool.grace_s)
    assert pool.longest == 4000 and pool.choose(LONG) is None, "it waits for the large one"
    pool.refresh([SMALL], 101.1 + pool.grace_s)
    assert pool.longest == 1000
    pool.refresh([SMALL, LARGE], 111.2)
    assert pool.longest == 4000


def test_a_long_prompt_goes_to_a_worker_that_holds_it_or_waits_for_it() -> None:
    pool = router(SMALL, LARGE)
    choices = [pool.choose(LONG) for _ in range(4)]
    assert [choice.decode.id for choice in choices if choice] == ["decode-2"] * 4
    pool.refresh([SMALL, worker("decode", 2, max_context=4000, credits=0)])
    assert pool.choose(LONG) is None and pool.is_too_long(2000)
    short = pool.choose(job(prompt(8)))
    assert short is not None and short.decode.id == "decode-1"


def test_one_that_nobody_holds_any_more_is_refused_by_a_worker_and_does_not_wait() -> None:
    pool = router(SMALL, LARGE)
    pool.refresh([SMALL], pool.grace_s + 1.0)
    choice = pool.choose(LONG)
    assert choice is not None and choice.decode.id == "decode-1"


def test_a_prompt_longer_than_prefill_workers_hold_is_computed_and_read_by_decode_workers() -> None:
    pool = router(worker("prefill", 1, max_context=1000), LARGE)
    choice = pool.choose(LONG)
    assert choice is not None
    assert (choice.prefill, choice.reason) == (None, "too_long_for_prefill")
    assert pool.is_direct(LONG, {})
    read = pool.choose_to_read(job(prompt(2000), path="read"))
    assert read is not None and read.prefill.id == "decode-2"
    read = pool.choose_to_read(job(prompt(500), path="read"))
    assert read is not None and read.prefill.id == "prefill-1"


def test_a_hand_off_is_for_a_decode_worker_that_holds_it() -> None:
    pool = router(worker("prefill", 1, max_context=4000), SMALL, LARGE)
    choice = pool.choose(LONG)
    assert choice is not None and choice.prefill is not None and choice.decode.id == "decode-2"
    prefill = WorkerRef("prefill", "prefill-1", 1)
    assert pool.choose_decode(prefill, LONG, tried={"decode-2"}) is None
    assert not pool.may_redirect(prefill, 2000, tried={"decode-2"})
    assert pool.may_redirect(prefill, 500, tried={"decode-2"})


@pytest.mark.parametrize(("longest", "moves"), [(0, False), (len(PROMPT) + 3, False), (len(PROMPT) + 4, True)])
def test_an_answer_that_fills_a_pool_goes_on_where_more_is_held(longest: int, moves: bool) -> None:
    request = make(max_tokens=8)
    request.longest = longest
    request.place(P1, D1, 0.0)
    handed_off(request, request.attempt, D1, 0.0)
    actions = request.frame(D1, frame(request, 0, [1, 2, 3], finish="length"), 1.0)
    if not moves:
        assert Ended in kinds(actions) and request.transcript.finish == "length"
        return
    assert Requeue in kinds(actions) and request.state is State.QUEUED and not request.failures
    request.place(None, D2, 1.0)
    actions = request.frame(D2, frame(request, 3, [4, 5, 6, 7, 8], finish="length"), 2.0)
    assert Ended in kinds(actions) and request.transcript.finish == "length"
    assert request.tokens == [1, 2, 3, 4, 5, 6, 7, 8]


def test_any_number_that_waits_for_the_large_worker_holds_up_nobody_else() -> None:
    placement = Placement(Router(direct_max_tokens=64), Health(trusting=True))
    dispatcher = Dispatcher(placement=placement, max_queue=100, max_requests=1000, no_workers_grace_s=9.0, now=0.0)
    dispatcher.refresh([SMALL, worker("decode", 2, max_context=4000, credits=1)], 0.0)

    def submit(name: str, num_tokens: int) -> None:
        asked = GenerationRequest(id=name, prompt=[5] * num_tokens, sampling=SamplingParams(max_tokens=8), deadline_s=60.0)
        dispatcher.submit(Request(asked, wire_id=name, gateway=GATEWAY, limits=Limits(), now=0.0, wall_ms=0), 0.0)

    for number in range(2 * OVERTAKEN):
        submit(f"long-{number}", 2000)
    submit("short", 10)
    placed = [(request.id, ask.worker.id) for request, ask in dispatcher.take_asks()]
    assert placed == [("long-0", "decode-2"), ("short", "decode-1")]
