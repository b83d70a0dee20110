"""Fair shares: by tokens and weight, without credit for idleness, in bursts, and for priority within one tenant."""

from __future__ import annotations

import random
from collections import Counter

import msgspec

from common.engine.shares import BURST_TOKENS, MAX_PRIORITY, PRIORITY_STEP_S, Shares, TurnTaking
from common.protocol.handles import WorkerRef
from common.protocol.messages import SamplingParams
from services.gateway.actions import Limits, State
from services.gateway.headroom import RECENT_S, Headroom
from services.gateway.requests import GenerationRequest, Request
from services.gateway.waiting import WaitingRoom

GATEWAY = WorkerRef("gateway", "gateway-1", 1)


class Work(msgspec.Struct, frozen=True):
    tenant: str
    tokens: int


class Places(msgspec.Struct):
    """So many free ones, `of` all."""

    number: int
    of: int

    @property
    def places(self) -> int:
        return self.of

    def spare(self, limit: int) -> int:
        return self.number


def request(name: int, tenant: str, *, priority: int = 0, now: float = 0.0, weight: float = 1.0) -> Request:
    asked = GenerationRequest(
        id=str(name),
        prompt=[1],
        sampling=SamplingParams(),
        deadline_s=60.0,
        tenant=tenant,
        priority=priority,
        weight=weight,
    )
    return Request(asked, wire_id=str(name), gateway=GATEWAY, limits=Limits(), now=now, wall_ms=0)


def serve(room: WaitingRoom, tokens: int, costs: dict[str, float]) -> Counter[str]:
    """Place requests until so many tokens have been given; what each tenant got."""
    got: Counter[str] = Counter()
    while got.total() < tokens and (turn := room.next(())) is not None:
        tenant = turn[2].tenant
        got[tenant] += int(costs[tenant])
        room.charge(tenant, costs[tenant], turn[2].weight)
    return got


def test_tenants_get_equal_tokens_whatever_their_requests_are_like() -> None:
    room = WaitingRoom()
    costs = {"short": 100.0, "long": 4000.0, "many": 100.0}
    number = 0
    for tenant, count in (("short", 3000), ("long", 100), ("many", 9000)):
        for _ in range(count):
            number += 1
            room.join("direct", number, request(number, tenant))
    serve(room, 3 * BURST_TOKENS, costs)
    got = serve(room, 300_000, costs)
    assert max(got.values()) - min(got.values()) <= 2 * 4000


def test_a_tenant_of_twice_the_weight_gets_twice_the_tokens() -> None:
    room = WaitingRoom()
    for number in range(2000):
        tenant = "ab"[number % 2]
        room.join("direct", number, request(number, tenant, weight=2.0 if tenant == "a" else 1.0))
    serve(room, 3 * BURST_TOKENS, {"a": 200.0, "b": 200.0})
    got = serve(room, 90_000, {"a": 200.0, "b": 200.0})
    assert 1.9 < got["a"] / got["b"] < 2.1


def test_who_comes_back_has_its_turn_at_once_and_no_more_than_a_burst() -> None:
    room = WaitingRoom()
    for number in range(10_000):
        room.join("direct", number, request(number, "greedy"))
    serve(room, 100_000, {"greedy": 100.0})
    for number in range(10_000, 12_000):
        room.join("direct", number, request(number, "back"))
    got = serve(room, BURST_TOKENS, {"greedy": 100.0, "back": 100.0})
    assert got["greedy"] <= 200
    got = serve(room, 40_000, {"greedy": 100.0, "back": 100.0})
    assert abs(got["greedy"] - got["back"]) <= 400


def test_an_answer_shorter_than_guessed_is_given_back() -> None:
    room = WaitingRoom()
    for number in range(4000):
        room.join("direct", number, request(number, "ab"[number % 2]))
    placed: Counter[str] = Counter()
    for _ in range(2000):
        turn = room.next(())
        assert turn is not None
        tenant = turn[2].tenant
        placed[tenant] += 1
        room.charge(tenant, 1000.0, 1.0)
        if tenant == "a":
            room.correct("a", -750.0, 1.0)  # its answers end early
    assert 3.5 < placed["a"] / placed["b"] < 4.5


def test_within_a_tenant_lower_priority_is_earlier_and_nobody_waits_for_ever() -> None:
    room = WaitingRoom()
    for number, priority in enumerate((5, 0, -1, 0)):
        room.join("direct", number, request(number, "a", priority=priority))
    order: list[str] = []
    while (turn := room.next(())) is not None:
        order.append(turn[2].id)
    assert order == ["2", "1", "3", "0"]
    room.join("direct", 10, request(10, "a", priority=2**31 - 1, now=0.0))
    late = MAX_PRIORITY * PRIORITY_STEP_S + 1
    room.join("direct", 11, request(11, "a", now=late))
    turn = room.next(())
    assert turn is not None and turn[2].id == "10"


def test_priority_takes_nothing_from_another_tenant() -> None:
    room = WaitingRoom()
    for number in range(400):
        room.join("direct", number, request(number, "rude", priority=-60))
    for number in range(400, 800):
        room.join("direct", number, request(number, "polite", priority=60))
    serve(room, 2 * BURST_TOKENS, {"rude": 100.0, "polite": 100.0})
    got = serve(room, 10_000, {"rude": 100.0, "polite": 100.0})
    assert abs(got["rude"] - got["polite"]) <= 200


def test_tenants_that_come_and_go_leave_no_memory_behind() -> None:
    room, dice = WaitingRoom(), random.Random(3)
    for number in range(20_000):
        who = request(number, f"tenant-{number % 5000}")
        room.join("direct", number, who)
        if dice.random() < 0.5:
            room.leave(number)
        elif (turn := room.next(())) is not None:
            room.charge(turn[2].tenant, 10.0, 1.0)
        if number % 1000 == 0:
            room.wake(float(number))
    who = request(99_999, "last")
    room.join("direct", 99_999, who)
    who.state = State.DONE
    while room.next(()) is not None:
        pass
    room.wake(1e9)
    assert len(room) == 0 and room._lines["direct"].num_kept == 0 and not room._num_in_line


def test_a_full_queue_refuses_whoever_filled_it() -> None:
    room = WaitingRoom()
    for number in range(100):
        room.join("direct", number, request(number, "greedy"))
    assert not room.is_within_share("greedy", 99)
    room.join("direct", 100, request(100, "modest"))
    assert room.is_within_share("modest", 99) and not room.is_within_share("greedy", 99)


def test_the_last_places_of_a_pool_are_kept_for_who_has_less_than_its_share() -> None:
    headroom = Headroom()
    headroom.came("greedy", 1.0, 0.0)
    headroom.decode.change("greedy", 30)
    assert not headroom.must_wait("greedy", 1.0, prefill=None, decode=Places(2, of=32))  # nobody else is there
    headroom.came("modest", 1.0, 0.0)
    assert headroom.must_wait("greedy", 1.0, prefill=None, decode=Places(2, of=32))
    assert not headroom.must_wait("modest", 1.0, prefill=None, decode=Places(2, of=32))
    assert not headroom.must_wait("greedy", 1.0, prefill=None, decode=Places(10, of=40))
    headroom.came("greedy", 1.0, RECENT_S)
    headroom.tick(RECENT_S + 1)
    assert not headroom.must_wait("greedy", 1.0, prefill=None, decode=Places(2, of=32))


def test_places_promised_to_requests_on_their_way_count() -> None:
    headroom = Headroom()
    headroom.came("modest", 1.0, 0.0)
    headroom.came("greedy", 1.0, 0.0)
    headroom.decode.change("greedy", 27)
    assert not headroom.must_wait("greedy", 1.0, prefill=None, decode=Places(20, of=32))
    headroom.decode.change("greedy", 1)
    assert headroom.must_wait("greedy", 1.0, prefill=None, decode=Places(20, of=32)), "20 are free, but 28 are promised"


def test_a_single_place_is_never_kept_from_everyone() -> None:
    headroom = Headroom()
    for tenant in ("a", "b"):
        headroom.came(tenant, 1.0, 0.0)
    for spare in (1, 2):
        assert not headroom.must_wait("a", 1.0, prefill=Places(spare, of=spare), decode=Places(spare, of=spare))


def test_a_worker_computes_prompts_of_tenants_by_turns() -> None:
    turns = TurnTaking()
    waiting = [Work("greedy", 1000) for _ in range(50)] + [Work("modest", 1000)]
    assert list(turns.in_turn(waiting[:50])) == waiting[:50]
    turns.served("greedy", 500, 1.0, ends=False)  # a step of it is running
    first = next(iter(turns.in_turn(waiting)))
    assert first.tenant == "modest"
    given: Counter[str] = Counter()
    for _ in range(60):
        work = next(iter(turns.in_turn([Work("greedy", 1000), Work("modest", 1000)])))
        turns.served(work.tenant, 1000, 1.0, ends=True)
        given[work.tenant] += 1
    assert abs(given["greedy"] - given["modest"]) <= 2 + BURST_TOKENS // 1000


def test_a_long_prompt_gives_way_after_a_quantum() -> None:
    turns = TurnTaking()
    waiting = [Work("long", 100_000), Work("short", 64)]
    served: Counter[str] = Counter()
    for _ in range(400):
        work = next(iter(turns.in_turn(waiting)))
        served[work.tenant] += 1
        turns.served(work.tenant, 64, 1.0, ends=work.tenant == "short")
    assert abs(served["long"] - served["short"]) <= 2 * 4096 // 64 + BURST_TOKENS // 64


def test_what_a_tenant_used_while_it_was_alone_is_not_held_against_it() -> None:
    shares = Shares()
    shares.arrive("first", alone=True)
    for _ in range(1000):
        shares.charge("first", 1000, 1.0)
    shares.arrive("second", alone=False)
    assert shares.time("first") - shares.time("second") <= BURST_TOKENS + 1000
