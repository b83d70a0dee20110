"""All requests of a gateway: the table, the queue, and what each event makes the actor do. Pure.

    submit ─► queue, oldest first ─► router ─► Ask ─► frames … ─► ended, and out of the table
                ▲                                       │
                └────────── next attempt ───────────────┘

The actor reports events; then it does what `take_asks`, `take_tells` and `take_frees` say. To workers a request has an id
that no other request ever has: a client's may come again, on another gateway too. A request that has been
here longest is placed first, also when it comes back for another attempt; nobody overtakes it, so nobody starves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from common.protocol import errors, messages
from common.protocol import tokens as token_bytes
from common.protocol.errors import PenstockError
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence, TokenFrames
from services.gateway.actions import Actions, Ask, Ended, Free, Requeue, Reroute, State, Tell
from services.gateway.prefix_memory import FINE_TOKENS, prefix_keys
from services.gateway.requests import Request
from services.gateway.router import Job, Router
from services.gateway.waiting import WaitingLine

PREFILL_PATIENCE_S = 5.0
"""A long prompt waits so long for room at prefill, then decode may compute it."""
PATIENCE_STEPS = 4
"""Silence of so many steps of a worker is no stall."""
REFETCH_AFTER_S = (0.3, 1.0)
"""After the bus came back: workers return a little later than we do, so what was asked for at once is asked for again."""


class Seat(msgspec.Struct):
    """What the dispatcher notes of a request: its place in the queue, and where it counts as load."""

    order: int
    keys: list[int]
    prefill: WorkerRef | None = None
    decode: WorkerRef | None = None
    uncached_tokens: int = 0


class Stats(msgspec.Struct):
    """Counters since the start."""

    retries: int = 0
    resumes: int = 0
    dropped_frames: int = 0
    fetches: int = 0


class Dispatcher:
    """:param on_placed: called with the seconds that a request waited, each time it is sent to a worker."""

    def __init__(
        self,
        *,
        router: Router,
        max_queue: int,
        max_requests: int,
        no_workers_grace_s: float,
        now: float,
        on_placed: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.router = router
        self.max_queue = max_queue
        self.max_requests = max_requests
        self.no_workers_grace_s = no_workers_grace_s
        self.on_placed = on_placed
        self.requests: dict[str, Request] = {}
        self.stats = Stats()
        self.connected = True
        self._seats: dict[str, Seat] = {}
        self._wire_ids: dict[str, str] = {}
        self._waiting = WaitingLine()
        self._homeless: dict[str, Request] = {}
        self._orders = 0
        self._hoped_at = now
        self._refetch_at: list[float] = []
        self._reconnected_at = now
        self._asks: list[tuple[Request, Ask]] = []
        self._tells: list[Tell] = []
        self._frees: dict[WorkerRef, dict[str, int]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self.requests) - len(self._waiting)

    # -- what the actor has to do

    def take_asks(self) -> list[tuple[Request, Ask]]:
        asks, self._asks = self._asks, []
        return asks

    def take_tells(self) -> list[Tell]:
        tells, self._tells = self._tells, []
        return tells

    @property
    def has_frees(self) -> bool:
        return bool(self._frees)

    def take_frees(self) -> dict[WorkerRef, dict[str, int]]:
        """Per worker the requests that it should let go of, each up to an attempt."""
        frees, self._frees = self._frees, {}
        return frees

    def renewals(self) -> dict[WorkerRef, list[tuple[str, int]]]:
        """Per worker the (request, attempt)s that it holds for us."""
        renewals: dict[WorkerRef, list[tuple[str, int]]] = {}
        for request in self.requests.values():
            holder = request.holder
            if holder is not None and request.state is not State.PLACING:
                renewals.setdefault(holder, []).append((request.id, request.attempt))
        return renewals

    # -- clients

    def submit(self, request: Request, now: float) -> None:
        """:raises DuplicateRequest, Overloaded: nothing has been taken then."""
        if request.client_id in self._wire_ids:
            raise errors.DuplicateRequest(f"a request {request.client_id} is running already; choose another id")
        if len(self.requests) >= self.max_requests:
            raise errors.Overloaded(f"{len(self.requests)} requests are running; try again in a moment")
        self.requests[request.id] = request
        self._wire_ids[request.client_id] = request.id
        self._orders += 1
        order = self._orders
        self._seats[request.id] = Seat(order, prefix_keys(request.packed_prompt, request.salt))
        self._waiting.join(order, request)
        self._place_waiting(now)
        if order in self._waiting and len(self._waiting) > self.max_queue:
            self._forget(request)
            raise errors.Overloaded(f"{self.max_queue} requests wait for a worker; try again in a moment")

    def cancel(self, client_id: str, error: PenstockError, now: float) -> None:
        """Harmless for one that has ended."""
        request = self.requests.get(self._wire_ids.get(client_id, ""))
        if request is not None:
            self._apply(request, request.fail(error), now)
            self._place_waiting(now)

    def fail_all(self, error: PenstockError, now: float) -> None:
        for request in list(self.requests.values()):
            self._apply(request, request.fail(error), now)

    # -- workers

    def frames(self, message: TokenFrames, now: float) -> None:
        """The hot path: one call per worker and step."""
        worker, requests, acted = message.worker, self.requests, False
        for frame in message.frames:
            request = requests.get(frame.request)
            if request is None:
                self.stats.dropped_frames += 1
                self._free(worker, frame.request, frame.attempt)
                continue
            actions = request.frame(worker, frame, now)
            if actions:
                self._apply(request, actions, now)
                acted = True
            elif request.state is State.DECODING and self._seats[request.id].prefill is not None:
                self._settle(request)
                acted = True
        if acted:
            self._place_waiting(now)

    def accepted(self, request_id: str, worker: WorkerRef, attempt: int, now: float) -> None:
        request = self.requests.get(request_id)
        if request is None:
            self._free(worker, request_id, attempt)
            return
        self._apply(request, request.accepted(worker, attempt, now), now)
        seat = self._seats.get(request_id)
        if seat is not None:
            for holder in (seat.prefill, seat.decode):
                if holder is not None:
                    self.router.remember(seat.keys, holder)

    def refused(
        self, request_id: str, worker: WorkerRef, attempt: int, error: PenstockError, now: float, *, bus_was_away: bool
    ) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self._apply(request, request.refused(worker, attempt, error, now, bus_was_away=bus_was_away), now)
        elif isinstance(error, errors.RequestTimeout):
            self._free(worker, request_id, attempt)
        if isinstance(error, errors.NoResponders):
            self.router.remove(worker)
        else:  # after our own request has left it, or that would look like room
            self.router.refused(worker)
        self._place_waiting(now)

    def handed_off(self, message: messages.HandedOff, now: float) -> None:
        request = self.requests.get(message.request)
        if request is None:
            self._free(message.decode, message.request, message.attempt)
            return
        self._apply(request, request.handed_off(message.attempt, message.decode, now), now)
        if request.holder == message.decode and not self.router.knows(message.decode) and self.connected:
            self._apply(request, request.worker_lost(message.decode, now), now)
        self._place_waiting(now)

    def handoff_failed(self, message: messages.HandoffFailed, now: float) -> None:
        request = self.requests.get(message.request)
        if request is None:
            self._free(message.worker, message.request, message.attempt)
            return
        refused = request.decode if message.attempt == request.attempt else None
        self._apply(request, request.handoff_failed(message.worker, message.attempt, message.code, now), now)
        if refused is not None:  # after our own request has left it, or that would look like room
            self.router.refused(refused)
        self._place_waiting(now)

    def unknown(self, message: messages.Unknown, now: float) -> None:
        for request_id, attempt in message.requests:
            request = self.requests.get(request_id)
            if request is not None:
                self._apply(request, request.unknown(message.worker, attempt, now), now)
        self._place_waiting(now)

    def worker_lost(self, worker: WorkerRef, now: float) -> None:
        self.router.remove(worker)
        self._frees.pop(worker, None)
        for request in list(self.requests.values()):
            self._apply(request, request.worker_lost(worker, now), now)
        self._place_waiting(now)

    def refresh(self, presences: Iterable[Presence], now: float) -> None:
        """What everyone alive says, once a heartbeat."""
        self.router.refresh(presences)
        if self.router.hopeful or not self.connected:
            self._hoped_at = now
        self._place_waiting(now)

    def connection_changed(self, connected: bool, now: float) -> None:
        self.connected = connected
        if connected:
            self._hoped_at = self._reconnected_at = now
            self._refetch_at = [now + delay_s for delay_s in REFETCH_AFTER_S]
            for request in self.requests.values():
                self._apply(request, request.reconnected(now), now)

    # -- time

    def tick(self, now: float) -> None:
        self._waiting.wake(now)
        hopeless = self.connected and now - self._hoped_at > self.no_workers_grace_s
        refetch = self.connected and bool(self._refetch_at) and now >= self._refetch_at[0]
        if refetch:
            del self._refetch_at[0]
        for request in list(self.requests.values()):
            if not self.connected:
                if now >= request.deadline:
                    self._apply(request, request.tick(now), now)
                continue
            if hopeless and (request.state is State.QUEUED or request.id in self._homeless):
                self._apply(request, request.fail(errors.NoWorkers("no decode worker is running; start one, or wait")), now)
                continue
            patience_s = PATIENCE_STEPS * self.router.step_s(request.decode) if request.decode is not None else 0.0
            actions = request.tick(now, patience_s=patience_s)
            if not actions and refetch and request.is_held and request.heard_at <= self._reconnected_at:
                actions = request.fetch(now)
            if actions:
                self._apply(request, actions, now)
        self._place_waiting(now)

    # -- inside

    def _apply(self, request: Request, actions: Actions, now: float) -> None:
        for action in actions:
            match action:
                case Ask():
                    self._asks.append((request, action))
                case Tell():
                    self._tells.append(action)
                case Free():
                    self._free(action.worker, request.id, action.attempt)
                case Requeue():
                    self._retry(request, action.not_before, now)
                case Reroute():
                    self._homeless[request.id] = request
                case Ended():
                    self._ended(request)
        self._settle(request)

    def _free(self, worker: WorkerRef, request_id: str, attempt: int) -> None:
        requests = self._frees.setdefault(worker, {})
        requests[request_id] = max(attempt, requests.get(request_id, attempt))

    def _retry(self, request: Request, not_before: float, now: float) -> None:
        self.stats.retries += 1
        self.stats.resumes += bool(request.tokens)
        order = self._seats[request.id].order
        if not_before > now:
            self._waiting.join_later(order, request, not_before)
        else:
            self._waiting.join(order, request)

    def _settle(self, request: Request) -> None:
        """Make the router's counts agree with where the request is now."""
        seat = self._seats.get(request.id)
        if seat is None:
            return
        prefill, decode = request.occupies
        if prefill != seat.prefill:
            if seat.prefill is not None:
                self.router.release(seat.prefill, seat.uncached_tokens)
            if prefill is not None:
                self.router.assign(prefill, seat.uncached_tokens)
            seat.prefill = prefill
        if decode != seat.decode:
            if seat.decode is not None:
                self.router.release(seat.decode)
            if decode is not None:
                self.router.assign(decode)
            seat.decode = decode

    def _ended(self, request: Request) -> None:
        seat = self._seats[request.id]
        if request.transcript.error is None and seat.decode is not None and len(request.tokens) >= FINE_TOKENS:
            whole = request.packed_prompt + token_bytes.pack(request.tokens)
            self.router.remember(prefix_keys(whole, request.salt), seat.decode)
        self._settle(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.stats.dropped_frames += request.dropped_frames
        self.stats.fetches += request.sent_fetches
        self._waiting.leave(self._seats[request.id].order)
        del self.requests[request.id], self._seats[request.id], self._wire_ids[request.client_id]
        self._homeless.pop(request.id, None)

    def _job(self, request: Request, now: float) -> Job:
        return Job(
            keys=self._seats[request.id].keys,
            num_tokens=request.prompt_tokens + len(request.tokens),
            max_tokens=request.sampling.max_tokens - len(request.tokens),
            path=request.path,
            avoid=frozenset(request.avoid),
            patient=now - request.since < PREFILL_PATIENCE_S,
        )

    def _place_waiting(self, now: float) -> None:
        """Send on whoever can be sent on, the oldest first."""
        if not self.connected:
            return
        for request in list(self._homeless.values()):
            self._rehome(request, now)
        unplaced: list[Request] = []
        turns = self._waiting.turns() if self.router.has_room else ()
        for request in turns:
            choice = self.router.choose(self._job(request, now)) if self.router.has_room else None
            if choice is not None:
                self.on_placed(now - request.since)
                self._seats[request.id].uncached_tokens = choice.uncached_tokens
                self._apply(request, request.place(choice.prefill, choice.decode, now), now)
                continue
            unplaced.append(request)
            if request.path == "auto":  # a canary wants one certain path, and must not hold the others up
                break
        for request in unplaced:
            self._waiting.join(self._seats[request.id].order, request)

    def _rehome(self, request: Request, now: float) -> None:
        """Find another decode worker for KV that a prefill worker holds."""
        prefill = request.prefill
        if request.state is not State.HANDING_OFF or request.decode is not None or prefill is None:
            self._homeless.pop(request.id, None)
            return
        decode = self.router.choose_decode(prefill, self._job(request, now), tried=request.tried)
        if decode is not None:
            del self._homeless[request.id]
            self._apply(request, request.redirect(decode, now), now)
        elif not self.router.may_redirect(prefill, tried=request.tried):
            del self._homeless[request.id]
            self._apply(request, request.stranded(now), now)
