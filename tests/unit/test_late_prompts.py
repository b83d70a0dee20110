"""Prompts that miss the objective for first tokens let those pass that keep it, and have their turn all the same."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from common.protocol.capacity import Capacity
from common.protocol.errors import Cancelled
from common.protocol.handles import WorkerRef
from common.protocol.messages import PrefillTask, Presence, SamplingParams, TokenFrame, TokenFrames
from services.gateway.actions import Limits
from services.gateway.dispatch import Dispatcher
from services.gateway.generation import GenerationRequest
from services.gateway.health import Health
from services.gateway.placement import LATE_PATIENCE_S, Placement
from services.gateway.requests import Request
from services.gateway.router import Choice, Router
from tests.fixtures.slow import some_slow
from tests.unit.presences import presence

GATEWAY = WorkerRef("gateway", "gateway-0", 1)
OBJECTIVE_S = 0.5
TOKENS_PER_S = {"prefill": 10_000, "decode": 6_000}
HEARTBEAT_S = 0.25


class Arrival(NamedTuple):
    at: float
    num_tokens: int = 2000
    more: dict[str, Any] = {}


class Site:
    """Gateways' dispatchers, asked by turns, and workers that compute one prompt after the other, the shortest first, in
    simulated time. tells: workers say at once that a prompt has come, as they do where several gateways send."""

    def __init__(
        self,
        *,
        objective_s: float = OBJECTIVE_S,
        prefill: int = 1,
        decode: int = 1,
        gateways: int = 1,
        make: type[Router] = Router,
        tells: bool = False,
    ) -> None:
        self.tells = tells
        self.dispatchers = [
            Dispatcher(
                placement=Placement(make(direct_max_tokens=64, ttft_s=objective_s), Health(trusting=True)),
                max_queue=10_000,
                max_requests=10_000,
                no_workers_grace_s=9.0,
                now=0.0,
            )
            for _ in range(gateways)
        ]
        self.dispatcher = self.dispatchers[0]
        roles = [("prefill", number) for number in range(prefill)] + [("decode", number) for number in range(decode)]
        self.workers = [WorkerRef(role, f"{role}-{number}", 1) for role, number in roles]  # type: ignore[arg-type]
        self.queues: dict[WorkerRef, list[tuple[int, int, WorkerRef, Request]]] = {worker: [] for worker in self.workers}
        self.running: dict[WorkerRef, tuple[int, WorkerRef, Request]] = {}
        self.first_tokens: dict[str, float] = {}
        self.events: list[tuple[float, int, str, Any]] = []
        self.count = itertools.count()
        self.refresh(0.0)

    @property
    def placement(self) -> Placement:
        return self.dispatcher.placement

    def presence(self, worker: WorkerRef) -> Presence:
        waiting = [size for size, *_ in self.queues[worker]]
        if worker in self.running:
            waiting.append(self.running[worker][0])
        capacity = Capacity(TOKENS_PER_S[worker.role] // 10, sum(waiting), 0.0, 64)
        return presence(
            worker.role,
            int(worker.id[-1]),
            credits=64 - len(waiting),
            running=len(waiting),
            capacity=capacity,
            host="h",
            fingerprint="f",
        )

    def refresh(self, now: float) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.refresh([self.presence(worker) for worker in self.workers], now)

    def request(self, name: str, arrival: Arrival) -> Request:
        prompt = [int(name) + 1, *[index % 1000 for index in range(arrival.num_tokens - 1)]]
        asked = GenerationRequest(
            id=name, prompt=prompt, sampling=SamplingParams(max_tokens=8), deadline_s=600.0, **arrival.more
        )
        return Request(asked, wire_id=name, gateway=GATEWAY, limits=Limits(placing_timeout_s=1e6), now=arrival.at, wall_ms=0)

    def at(self, when: float, kind: str, what: Any = None) -> None:
        heapq.heappush(self.events, (when, next(self.count), kind, what))

    def run(self, arrivals: Sequence[Arrival], until: float) -> None:
        for number, arrival in enumerate(arrivals):
            self.at(arrival.at, "arrives", self.request(str(number), arrival))
        for beat in range(int(until / HEARTBEAT_S)):
            self.at(beat * HEARTBEAT_S, "beat")
        while self.events and self.events[0][0] <= until:
            now, _, kind, what = heapq.heappop(self.events)
            match kind:
                case "arrives":
                    self.gateway_of(what).submit(what, now)
                case "beat":
                    self.refresh(now)
                    for dispatcher in self.dispatchers:
                        dispatcher.tick(now)
                case _:
                    self.computed(what, now)
            self.send(now)

    def gateway_of(self, request: Request) -> Dispatcher:
        return self.dispatchers[int(request.id) % len(self.dispatchers)]

    def send(self, now: float) -> None:
        for request, ask in itertools.chain.from_iterable(dispatcher.take_asks() for dispatcher in self.dispatchers):
            self.gateway_of(request).accepted(request.id, ask.worker, ask.attempt, now)
            decode = ask.message.decode if isinstance(ask.message, PrefillTask) else ask.worker
            heapq.heappush(self.queues[ask.worker], (request.num_tokens, next(self.count), decode, request))
            if self.tells:
                for dispatcher in self.dispatchers:
                    dispatcher.router.heard(self.presence(ask.worker))
        for worker in self.workers:
            if worker not in self.running and self.queues[worker]:
                size, _, decode, request = heapq.heappop(self.queues[worker])
                self.running[worker] = (size, decode, request)
                self.at(now + size / TOKENS_PER_S[worker.role], "computed", worker)

    def computed(self, worker: WorkerRef, now: float) -> None:
        _, decode, request = self.running.pop(worker)
        self.first_tokens[request.id] = now
        frame = TokenFrame(request.id, request.attempt, 0, [5], finish="stop")
        self.gateway_of(request).frames(TokenFrames(worker=decode, frames=[frame]), now)

    def took(self, arrivals: Sequence[Arrival]) -> list[float]:
        return [self.first_tokens[str(number)] - arrival.at for number, arrival in enumerate(arrivals)]


def poisson(rate: float, seconds: float, *, seed: int) -> list[Arrival]:
    rng, at, found = random.Random(seed), 0.0, list[Arrival]()
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(Arrival(at))
    return found


def good(took: Iterable[float]) -> float:
    took = list(took)
    return sum(one <= OBJECTIVE_S for one in took) / len(took)


class OldestFirst(Router):
    def would_be_late(self, choice: Choice, waited_s: float, now: float) -> bool:
        return False


@pytest.mark.parametrize(
    ("prefill", "decode", "gateways"),
    some_slow([(1, 1, 1), (0, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 3)], quick=[(0, 2, 1), (2, 1, 1)]),
)
def test_more_prompts_keep_the_objective_where_those_that_miss_it_let_them_pass(
    prefill: int, decode: int, gateways: int
) -> None:
    rate = 0.75 * (10 * prefill + 6 * decode) / 2
    kept: dict[type[Router], list[float]] = {Router: [], OldestFirst: []}
    for seed, make in itertools.product(range(4), kept):
        arrivals = poisson(rate, 60.0, seed=seed)
        site = Site(prefill=prefill, decode=decode, gateways=gateways, make=make, tells=gateways > 1)
        site.run(arrivals, 120.0)
        kept[make].append(good(site.took(arrivals)))  # all have had their first token
        for dispatcher in site.dispatchers:
            assert dispatcher.num_waiting == 0
            assert not any(member.tokens or member.prompts for member in dispatcher.router._workers.values())
    missed = {make: sum(1 - share for share in shares) for make, shares in kept.items()}
    assert missed[Router] < 0.75 * missed[OldestFirst], kept
    assert all(ours > others for ours, others in zip(kept[Router], kept[OldestFirst], strict=True)), kept


@pytest.mark.parametrize(("prefill", "decode", "gateways"), some_slow([(1, 1, 2), (2, 2, 2), (2, 2, 3)], quick=[(1, 1, 2)]))
def test_several_gateways_keep_the_objective_more_often_where_workers_tell_of_prompts_at_once(
    prefill: int, decode: int, gateways: int
) -> None:
    rate = 0.75 * (10 * prefill + 6 * decode) / 2
    missed = {False: 0.0, True: 0.0}
    for seed, tells in itertools.product(range(4), missed):
        arrivals = poisson(rate, 60.0, seed=seed)
        site = Site(prefill=prefill, decode=decode, gateways=gateways, tells=tells)
        site.run(arrivals, 120.0)
        missed[tells] += 1 - good(site.took(arrivals))
    assert missed[True] < 0.8 * missed[False], missed


def test_a_burst_is_computed_in_time_as_far_as_workers_go_and_the_rest_behind_what_comes_later() -> None:
    burst = [Arrival(1.0) for _ in range(10)]
    later = [Arrival(1.6), Arrival(1.9), Arrival(2.2)]
    site = Site()
    site.run([*burst, *later], 20.0)
    took = site.took([*burst, *later])
    assert sum(one <= OBJECTIVE_S for one in took[:10]) == 3, took  # two of prefill's 0.2 s, one of decode's 0.33 s
    assert all(one <= OBJECTIVE_S for one in took[10:]), took
    reasons = site.placement.routes
    assert reasons["late_in_a_gap"] == 7, reasons


def test_without_an_objective_the_oldest_is_first() -> None:
    arrivals = [Arrival(1.0 + number / 100) for number in range(30)]
    site = Site(objective_s=0.0)
    site.run(arrivals, 20.0)
    firsts = sorted(range(30), key=lambda number: site.first_tokens[str(number)])
    assert firsts == sorted(firsts) and not site.placement.routes["late_in_a_gap"]


def test_who_is_late_has_a_turn_however_much_comes_later() -> None:
    first = [Arrival(0.5) for _ in range(20)]
    flood = [Arrival(0.6 + number / 16) for number in range(int(16 * 2 * LATE_PATIENCE_S))]  # twice what workers compute
    site = Site()
    site.run([*first, *flood], 3 * LATE_PATIENCE_S)
    took = site.took(first)
    assert max(took) < LATE_PATIENCE_S + 25.0, took
    assert site.placement.routes["late_for_long"] > 5
    answered = [number for number in range(len(flood)) if str(number + 20) in site.first_tokens]
    assert good(site.first_tokens[str(number + 20)] - flood[number].at for number in answered) > 0.6


@pytest.mark.parametrize(
    "more", [{"background": True}, {"num_tokens": 60}, {"attempt": 1}], ids=["background", "short", "lost a worker"]
)
def test_what_has_no_objective_of_its_own_or_hardly_any_tokens_is_not_held_back(more: dict[str, Any]) -> None:
    site = Site()
    busy = [Arrival(1.0) for _ in range(3)]
    site.run(busy, 1.0)
    assert site.placement.num_waiting == 0
    more = dict(more)
    attempt = more.pop("attempt", 0)
    arrival = Arrival(1.01, more.pop("num_tokens", 2000), more)
    request = site.request("7", arrival)
    request.attempt = attempt
    site.dispatcher.submit(request, 1.01)
    assert site.placement.num_waiting == 0
    site.dispatcher.submit(site.request("8", Arrival(1.01)), 1.01)
    assert site.placement.num_waiting == 1


def test_a_short_prompt_is_not_taken_for_late_behind_long_ones_that_it_overtakes() -> None:
    site = Site()
    for number in range(3):
        site.dispatcher.submit(site.request(str(number), Arrival(1.0, 8000)), 1.0)
    site.send(1.0)
    held = site.placement.num_waiting
    site.dispatcher.submit(site.request("7", Arrival(1.0, 500)), 1.0)
    assert site.placement.num_waiting == held
    member = site.dispatcher.router.prefill.members["prefill-0"]
    assert member.ahead_of(500) <= 500 + 8000 // 2 + 500 < member.backlog


def test_who_leaves_while_it_lets_others_pass_leaves_nothing() -> None:
    site = Site()
    site.run([Arrival(1.0) for _ in range(9)], 1.0)
    assert site.placement.num_waiting == 6
    for number in range(9):
        site.dispatcher.cancel(str(number), Cancelled("the client has gone"), 1.1)
    assert site.placement.num_waiting == 0 and not site.placement.seats
    assert Counter(member.tokens for member in site.dispatcher.router._workers.values()) == {0: 2}
    assert not any(member.prompts for member in site.dispatcher.router._workers.values())
