"""Where each request of a gateway is to run: who waits for what, who is next, and what each counts for at which worker. Pure.

    join ─► a line of the waiting room, by what it needs ─► place: router's choice ─► settle: load counted ─► forget
                ▲                                                                        │
                └──────────────────────── next attempt ◄────────────────────────────────┘

Tenants share workers by what their requests cost in tokens: prompts and answers, the answer guessed at first and corrected at
its end. Of one tenant, the request that has been here longest is placed first (see `Request.rank`), also when it comes back for
another attempt; nobody who needs the same overtakes it, so nobody starves. With an objective for first tokens, one that misses
it wherever it goes lets others pass until a worker has a gap, for a while. One that lost a worker is placed on an idle one,
alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import itemgetter

from common.protocol import errors
from common.protocol import tokens as token_bytes
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from services.gateway.actions import Actions, State
from services.gateway.clearing import Clearing
from services.gateway.handoff import redirect, stranded
from services.gateway.headroom import Headroom
from services.gateway.health import Health
from services.gateway.prefix_memory import FINE_TOKENS, prefix_keys
from services.gateway.requests import Request
from services.gateway.router import Choice, Job, ReadChoice, Router
from services.gateway.routes import Reason
from services.gateway.seat import Seat
from services.gateway.waiting import SHARED, ExpectedAnswers, Line, WaitingRoom
from services.gateway.windows import Windows

PREFILL_PATIENCE_S = 5.0
"""A long prompt waits so long for room at prefill, then decode may compute it."""
OVERTAKEN_S = 5.0
"""A sequence too long for the blocks that are free is overtaken by shorter ones for so long."""
OVERTAKEN = 16
"""Requests of a line, too long for the blocks that are free, which shorter ones may pass by at once."""
NEED_DECODE: frozenset[Line] = frozenset({"canary", "direct", "prefill", "large", "late"})
"""Lines whose requests need room at decode."""
LATE_PATIENCE_S = 30.0
"""A prompt that misses the objective for first tokens lets others pass for so long, then it has its turn."""
LATE_TURNS_APART_S = 1.0
"""Between two of these turns: prompts that keep the objective go on keeping it when there is too much for all."""
ALONE_PATIENCE_S = 1.0
"""A request that lost a worker waits so long for an idle one, then it may run beside others once more."""
ALONE_LIMIT_S = 30.0
"""One that lost several waits so long, then it is given up."""


class Placement:
    """`on_placed(seconds)` is called with how long a request waited, each time it is sent to a worker. `windows`: how much may
    be on its way to this gateway, which its models share."""

    def __init__(
        self,
        router: Router,
        health: Health,
        on_placed: Callable[[float], None] = lambda _: None,
        *,
        windows: Windows | None = None,
    ) -> None:
        self.router = router
        self.health = health
        self.on_placed = on_placed
        self.routes = Counter[Reason]()
        """Attempts that were sent to workers, by why they took their path."""
        self.seats: dict[str, Seat] = {}
        self.windows = windows or Windows()
        self._waiting = WaitingRoom()
        self._clearing = Clearing(router)
        self._headroom = Headroom()
        self._answers = ExpectedAnswers()
        self._homeless: dict[str, Request] = {}
        self._doubtful = frozenset[str]()
        self._orders = 0
        self._let_in_at = -math.inf
        """When one that is late had its turn because it has waited for long."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waits(self, request: Request) -> bool:
        """Whether it waits for a worker, or, computed already, for a decode worker."""
        return request.state is State.QUEUED or request.id in self._homeless

    def waited_s(self, request: Request, now: float) -> float:
        """How long no worker has taken it, although some may have been asked."""
        seat = self.seats.get(request.id)
        return now - seat.waits_since if seat is not None and seat.waits_since else 0.0

    def full(self, worker: WorkerRef, request: Request | None, error: errors.PenstockError, now: float) -> None:
        """A worker had no room for a request: others wait, too, unless blocks alone were lacking, and they need fewer. One that
        has waited for long is overtaken no more: a worker gets nothing else until it is empty enough."""
        seat = self.seats.get(request.id) if request is not None else None
        if request is not None and seat is not None and seat.offered == worker:
            seat.offered = None
            self.router.offer_refused(worker, request.num_tokens)
        if request is None or seat is None or not isinstance(error, errors.OutOfBlocks):
            self.router.refused(worker)
            return
        self.router.refused(worker, num_tokens=request.num_tokens)
        if self.waited_s(request, now) > OVERTAKEN_S and (seat.kept is None or not self.router.knows(seat.kept)):
            seat.kept = worker
            self.router.keep(worker, request.id)

    def _let_others_in(self, seat: Seat) -> None:
        if seat.kept is not None:
            self.router.keep(seat.kept, "")
            seat.kept = None

    def is_refused(self, request: Request, max_queue: int) -> bool:
        """Whether it is one too many: the queue is full, and its tenant has its share of it."""
        if self.seats[request.id].order not in self._waiting or self.num_waiting <= max_queue:
            return False
        return not self._waiting.is_within_share(request.tenant, max_queue)

    def refresh(self, presences: Iterable[Presence], now: float, *, silent: Collection[str] = ()) -> None:
        """What everyone alive says, once a heartbeat. `silent`: ids of those that have said nothing for a while.

        They may be dead: they get requests only when no other has room.
        """
        self.router.refresh(presences, now)
        self.router.prefixes.tick(now)
        members = [*self.router.decode.members.values(), *self.router.prefill.members.values()]
        self._doubtful = self.health.doubtful([worker.ref for worker in members], now).union(silent)

    # -- a request's stay

    def join(self, request: Request, now: float) -> None:
        """A new request waits from now on."""
        self._orders += 1
        if request.only is None and not request.background:
            self._headroom.came(request.tenant, request.weight, now)
        prompt = request.packed_prompt + token_bytes.pack(request.given)
        self.seats[request.id] = Seat(
            self._orders, prefix_keys(prompt, request.salt), self.router.prefixes.prompt(prompt, request.salt)
        )
        self.rejoin(request, now, not_before=now)

    def rejoin(self, request: Request, now: float, *, not_before: float) -> None:
        """It waits for the next attempt, with the age it has, and has no turn before `not_before`."""
        seat = self.seats[request.id]
        seat.waits_since = seat.waits_since or now
        order, line = seat.order, self._line(request, now)
        if not_before > now:
            self._waiting.join_later(line, order, request, not_before)
        else:
            self._waiting.join(line, order, request)

    def needs_decode(self, request: Request, now: float) -> None:
        """A prefill worker holds its KV, and no decode worker has taken it."""
        self._homeless[request.id] = request
        seat = self.seats[request.id]
        seat.waits_since = seat.waits_since or now

    def holds(self, request: Request) -> None:
        """A worker has accepted it: remember which prefix is there."""
        seat = self.seats.get(request.id)
        if seat is not None:
            seat.waits_since = 0.0
            self._let_others_in(seat)
            for holder in (seat.prefill, seat.decode):
                if holder is not None:
                    self.router.remember(seat.keys, holder)

    def settle(self, request: Request) -> None:
        """Make the router's counts agree with where the request is now."""
        seat = self.seats.get(request.id)
        if seat is None:
            return
        request.is_unsettled = False
        if request.state is State.DECODING and seat.waits_since:
            seat.waits_since = 0.0
            self._let_others_in(seat)
        prefill, decode = request.occupies
        if prefill != seat.prefill:
            self._count(seat.prefill, -1)
            self._count(prefill, 1)
            if prefill is None or seat.prefill is None:
                self._headroom.prefill.change(request.tenant, -1 if prefill is None else 1)
            seat.prefill = prefill
        if decode != seat.decode:
            self._count(seat.decode, -1, freed=request.num_tokens if seat.holds_blocks else 0)
            self._count(decode, 1)
            if decode is None or seat.decode is None:
                self._headroom.decode.change(request.tenant, -1 if decode is None else 1)
            seat.decode = decode
        seat.holds_blocks = request.state is State.DECODING
        computing = request.computing
        if computing != seat.computing:
            self._computes(seat.computing, request, -seat.uncached_tokens)
            self._computes(computing, request, seat.uncached_tokens)
            seat.computing = computing
        reserved = request.alone_on
        if reserved != seat.reserved:
            if seat.reserved is not None:
                self.router.reserve(seat.reserved, reserved=False)
            if reserved is not None:
                self.router.reserve(reserved)
            seat.reserved = reserved

    def ended(self, request: Request) -> None:
        """It is done: what it computed stays at its decode worker, which has shown that it works."""
        seat = self.seats[request.id]
        if request.is_read and request.transcript.error is None and seat.prefill is not None:
            self.health.succeeded(seat.prefill, request.silence.heard_at)
        if request.transcript.error is None and seat.decode is not None:
            self.health.succeeded(seat.decode, request.silence.heard_at)
            if len(request.tokens) >= FINE_TOKENS:
                whole = request.packed_prompt + token_bytes.pack(request.tokens)
                self.router.remember(prefix_keys(whole, request.salt), seat.decode)
        if seat.charged:
            used = seat.charged_prompt + len(request.tokens)
            self._waiting.correct(request.tenant, used - seat.charged, request.weight)
            self._answers.ended(request.tenant, len(request.tokens))
        self.settle(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        seat = self.seats.pop(request.id)
        self._let_others_in(seat)
        self._waiting.leave(seat.order)
        self._homeless.pop(request.id, None)

    # -- choosing

    def place(self, now: float) -> Iterator[tuple[Request, Actions]]:
        """Send on whoever can be sent on: what has to be done, request by request. Apply it before taking the next."""
        # the one that has waited longest first: a worker without blocks for it is asked all the same, now and then
        for request in sorted(self._homeless.values(), key=lambda one: self.seats[one.id].waits_since):
            yield from self._rehome(request, now)
        self._clearing.open()
        closed: set[Line] = set()
        unplaced: list[tuple[Line, int, Request]] = []
        num_long = Counter[Line]()
        while (turn := self._next(closed)) is not None:
            line, order, request = turn
            if self._headroom.several and line in (*SHARED, "late") and self._must_wait(line, request):
                unplaced.append(turn)
                self._waiting.hold(request.tenant)
                continue
            job = self._job(request, now)
            choice = self._choose(line, job)
            if isinstance(choice, Choice) and self._would_be_late(line, request, choice, now):
                self._waiting.put_back("late", order, request)
                continue
            if choice is None:
                unplaced.append(turn)
                num_long[line] += self.router.is_too_long(job.num_tokens)
                if line != "canary" and not 0 < num_long[line] <= OVERTAKEN:  # each of those waits for another worker
                    closed.add(line)
                continue
            seat = self.seats[request.id]
            if seat.is_overdue and isinstance(choice, Choice):
                choice = choice.because("late_for_long")
                seat.is_overdue = False  # a later attempt has reasons of its own
            self.on_placed(now - request.since)
            self.routes[choice.reason] += 1
            seat.uncached_tokens = choice.uncached_tokens
            seat.cached, seat.cached_at = {}, -math.inf
            if seat.prompt is not None:
                seat.prompt.forget()
            if not seat.charged and request.only is None:
                answer = self._answers.expected(request.tenant, request.sampling.max_tokens)
                seat.charged_prompt = choice.uncached_tokens
                seat.charged = seat.charged_prompt + answer
                self._waiting.charge(request.tenant, seat.charged, request.weight)
            request.history.routed(now, request.attempt + 1, choice)
            request.longest = self.router.longest
            alone, window = line == "alone", self.windows.size
            yield request, request.place(choice.prefill, choice.decode, now, alone=alone, window=window)
        for line, order, request in unplaced:
            self._waiting.put_back(line, order, request)
        self._waiting.let_go()

    def tick(self, now: float) -> Iterator[tuple[Request, Actions]]:
        """Wake who was sent away for a while; let go of those for whom no worker has been idle."""
        self._waiting.wake(now)
        self._headroom.tick(now)
        patient: Job | None = None
        for order, request in self._waiting.members("alone"):
            waited_s = now - request.since
            if request.must_be_alone and waited_s > ALONE_LIMIT_S:
                busy = errors.NoWorkers("workers ended while they ran this request, and none is free to run it alone")
                yield request, request.fail(busy)
            elif not request.must_be_alone and waited_s > ALONE_PATIENCE_S:
                self._waiting.leave(order)
                self.rejoin(request, now, not_before=now)
            elif request.must_be_alone and patient is None:
                patient = self._job(request, now)
        self._clearing.look(patient)
        if now - self._let_in_at >= LATE_TURNS_APART_S:
            self._let_in(now)

    # -- inside

    def _let_in(self, now: float) -> None:
        """Give the oldest of those that are late its turn, if it has let others pass for long."""
        order, request = min(self._waiting.members("late"), default=(0, None), key=itemgetter(0))
        if request is not None and now - request.since > LATE_PATIENCE_S:
            self._let_in_at = now
            self.seats[request.id].is_overdue = True
            self._waiting.leave(order)
            self.rejoin(request, now, not_before=now)

    def _next(self, closed: set[Line]) -> tuple[Line, int, Request] | None:
        """Whose turn it is. Nobody's, where there is no room."""
        if not self.router.has_room:
            if not self.router.has_room_to_read:
                return None
            closed |= NEED_DECODE
        return self._waiting.next(closed)

    def _choose(self, line: Line, job: Job) -> Choice | ReadChoice | None:
        if job.path == "read":
            return self.router.choose_alone_to_read(job) if line == "alone" else self.router.choose_to_read(job)
        if line == "alone":
            return self.router.choose_alone(job)
        choice = self.router.choose(job)
        if line != "late" or choice is None:
            return choice
        return choice.because("late_in_a_gap") if self.router.has_gap(choice, job.now) else None

    def _would_be_late(self, line: Line, request: Request, choice: Choice, now: float) -> bool:
        """Whether the request is to let others pass: a new one that misses the objective for first tokens wherever it goes."""
        if line not in SHARED or request.background or request.attempt or self.seats[request.id].is_overdue:
            return False
        return self.router.would_be_late(choice, now - request.arrived_at, now)

    def _line(self, request: Request, now: float) -> Line:
        """Which line a request that waits is to stand in."""
        if request.only is not None:
            return "canary"
        if request.losses.suspicion and (request.must_be_alone or now - request.since < ALONE_PATIENCE_S):
            return "alone"
        if request.is_read:
            return "read"
        job = self._job(request, now)
        if self.router.is_for_some(job.num_tokens):
            return "large"
        if job.path != "auto":
            return "direct" if job.path == "direct" else "prefill"
        seat = self.seats[request.id]
        seat.cached, seat.cached_at = self.router.cached(job), now  # for choosing workers, too, if that follows at once
        return "direct" if self.router.is_direct(job, seat.cached) else "prefill"

    def _must_wait(self, line: Line, request: Request) -> bool:
        needs_prefill = line in ("prefill", "read") or (line in ("large", "late") and self.router.can_prefill)
        return self._headroom.must_wait(
            request.tenant,
            request.weight,
            prefill=self.router.prefill if needs_prefill else None,
            decode=None if line == "read" else self.router.decode,
        )

    def _job(self, request: Request, now: float) -> Job:
        seat = self.seats[request.id]
        return Job(
            keys=seat.keys,
            prompt=seat.prompt,
            num_tokens=request.num_tokens,
            max_tokens=request.sampling.max_tokens - len(request.tokens),
            path=request.path,
            avoid=self._doubtful | request.avoid,
            patient=self.waited_s(request, now) < PREFILL_PATIENCE_S,
            only=request.only,
            request=request.id,
            now=now,
            cached=seat.cached if seat.cached_at == now else None,
        )

    def _rehome(self, request: Request, now: float) -> Iterator[tuple[Request, Actions]]:
        """Find another decode worker for KV that a prefill worker holds."""
        prefill = request.prefill
        if request.state is not State.HANDING_OFF or request.decode is not None or prefill is None:
            self._homeless.pop(request.id, None)
            return
        decode = self.router.choose_decode(prefill, self._job(request, now), tried=request.tried)
        if decode is not None:
            del self._homeless[request.id]
            self.seats[request.id].offered = decode if self.router.offer(decode, request.num_tokens, now) else None
            yield request, redirect(request, decode, now)
        elif not self.router.may_redirect(prefill, request.num_tokens, tried=request.tried):
            del self._homeless[request.id]
            yield request, stranded(request, now)

    def _count(self, worker: WorkerRef | None, requests: int, *, freed: int = 0) -> None:
        if worker is not None:
            self.router.count(worker, requests, freed=freed)

    def _computes(self, worker: WorkerRef | None, request: Request, tokens: int) -> None:
        if worker is not None:
            self.router.count(worker, 0, tokens, background=request.background, now=request.since)
