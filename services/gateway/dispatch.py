"""All requests of a gateway: the table, the queue, and what each event makes the actor do. Pure.

    submit ─► queue, oldest first ─► router ─► Ask ─► frames … ─► ended, and out of the table
                ▲                                       │
                └────────── next attempt ───────────────┘

The actor reports events; then it does what `take_asks`, `take_tells` and `take_frees` say. To workers a request has an id
that no other request ever has: a client's may come again, on another gateway too. A request that has been
here longest is placed first, also when it comes back for another attempt; nobody overtakes it, so nobody starves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from common.protocol import errors, messages
from common.protocol.errors import PenstockError
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence, TokenFrames
from services.gateway.actions import Actions, Ask, Ended, Free, Requeue, Reroute, State, Tell
from services.gateway.handoff import handed_off, handoff_failed
from services.gateway.patience import tick
from services.gateway.placement import Placement
from services.gateway.requests import Request

PATIENCE_STEPS = 4
"""Silence of so many steps of a worker is no stall."""
REFETCH_AFTER_S = (0.3, 1.0)
"""After the bus came back: workers return a little later than we do, so what was asked for at once is asked for again."""


class Stats(msgspec.Struct):
    """Counters since the start."""

    retries: int = 0
    resumes: int = 0
    dropped_frames: int = 0
    fetches: int = 0


class Dispatcher:
    """All requests, by the id that workers know. `placement` says who is next and where. `on_ended(request, now)` is called
    after the end of each that was taken."""

    def __init__(
        self,
        *,
        placement: Placement,
        max_queue: int,
        max_requests: int,
        no_workers_grace_s: float,
        now: float,
    ) -> None:
        self.placement = placement
        self.router = placement.router
        self.health = placement.health
        self.max_queue = max_queue
        self.max_requests = max_requests
        self.no_workers_grace_s = no_workers_grace_s
        self.requests: dict[str, Request] = {}
        self.stats = Stats()
        self.on_ended: Callable[[Request, float], None] = lambda request, now: None
        self.connected = True
        self._wire_ids: dict[str, str] = {}
        self._hoped_at = self._hoped_to_read_at = now
        self._refetch_at: list[float] = []
        self._reconnected_at = now
        self._asks: list[tuple[Request, Ask]] = []
        self._tells: list[Tell] = []
        self._frees: dict[WorkerRef, dict[str, int]] = {}

    @property
    def num_waiting(self) -> int:
        return self.placement.num_waiting

    @property
    def num_running(self) -> int:
        return len(self.requests) - self.num_waiting

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
        self.placement.join(request, now)
        self._place_waiting(now)
        if self.placement.is_refused(request, self.max_queue):
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
            if frame.finish == "error":
                self.health.failed(worker, now)
            if actions:
                self._apply(request, actions, now)
                acted = True
            elif request.is_unsettled:
                self.placement.settle(request)
                acted = True
        if acted:
            self._place_waiting(now)

    def accepted(self, request_id: str, worker: WorkerRef, attempt: int, now: float) -> None:
        request = self.requests.get(request_id)
        if request is None:
            self._free(worker, request_id, attempt)
            return
        self._apply(request, request.accepted(worker, attempt, now), now)
        self.placement.holds(request)

    def refused(
        self, request_id: str, worker: WorkerRef, attempt: int, error: PenstockError, now: float, *, bus_was_away: bool
    ) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self._apply(request, request.refused(worker, attempt, error, now, bus_was_away=bus_was_away), now)
        elif isinstance(error, errors.RequestTimeout):
            self._free(worker, request_id, attempt)
        if isinstance(error, errors.RequestTimeout) and not bus_was_away:
            self.health.failed(worker, now)
        if isinstance(error, errors.NoResponders):
            self.router.remove(worker)
        else:  # after our own request has left it, or that would look like room
            self.placement.full(worker, request, error, now)
        self._place_waiting(now)

    def handed_off(self, message: messages.HandedOff, now: float) -> None:
        request = self.requests.get(message.request)
        if request is None:
            self._free(message.decode, message.request, message.attempt)
            return
        self.health.succeeded(message.worker, now)
        self._apply(request, handed_off(request, message.attempt, message.decode, now), now)
        if request.holder == message.decode and not self.router.knows(message.decode) and self.connected:
            self._apply(request, request.worker_lost(message.decode, now), now)
        self._place_waiting(now)

    def handoff_failed(self, message: messages.HandoffFailed, now: float) -> None:
        request = self.requests.get(message.request)
        if request is None:
            self._free(message.worker, message.request, message.attempt)
            return
        refused = request.decode if message.attempt == request.attempt else None
        self._apply(request, handoff_failed(request, message.worker, message.attempt, message.code, now), now)
        if refused is not None:  # after our own request has left it, or that would look like room
            self.placement.full(refused, request, errors.from_wire(message.code, ""), now)
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
        if any(request.holder == worker for request in self.requests.values()):
            self.health.failed(worker, now)
        for request in list(self.requests.values()):
            self._apply(request, request.worker_lost(worker, now), now)
        self._place_waiting(now)

    def refresh(self, presences: Iterable[Presence], now: float, *, silent: Collection[str] = ()) -> None:
        """What everyone alive says, once a heartbeat. `silent`: ids of those that have said nothing for a while."""
        self.placement.refresh(presences, now, silent=silent)
        if self.router.hopeful or not self.connected:
            self._hoped_at = now
        if self.router.hopeful_to_read or not self.connected:
            self._hoped_to_read_at = now
        self._place_waiting(now)

    def connection_changed(self, connected: bool, now: float) -> None:
        self.connected = connected
        if connected:
            self._hoped_at = self._hoped_to_read_at = self._reconnected_at = now
            self._refetch_at = [now + delay_s for delay_s in REFETCH_AFTER_S]
            for request in self.requests.values():
                self._apply(request, request.reconnected(now), now)

    def new_life(self, gateway: WorkerRef, now: float) -> None:
        """This gateway was away for longer than workers keep what it holds there, and has a new epoch: all streams go on."""
        self._hoped_at = self._hoped_to_read_at = now
        for request in list(self.requests.values()):
            self._apply(request, request.new_life(gateway, now), now)
        self._place_waiting(now)

    # -- time

    def tick(self, now: float, *, behind: bool = False) -> None:
        """Once a heartbeat. `behind`: this gateway can't keep up, so that silence says nothing of workers."""
        for request, actions in self.placement.tick(now):
            self._apply(request, actions, now)
        hopeless = self.connected and now - self._hoped_at > self.no_workers_grace_s
        hopeless_to_read = self.connected and now - self._hoped_to_read_at > self.no_workers_grace_s
        refetch = self.connected and bool(self._refetch_at) and now >= self._refetch_at[0]
        if refetch:
            del self._refetch_at[0]
        for request in list(self.requests.values()):
            if not self.connected or (behind and request.is_held):
                if now >= request.deadline:
                    self._apply(request, tick(request, now), now)
                continue
            if (hopeless_to_read if request.is_read else hopeless) and self.placement.waits(request):
                self._apply(request, request.fail(errors.NoWorkers("no decode worker is running; start one, or wait")), now)
                continue
            holder = request.holder
            patience_s = PATIENCE_STEPS * self.router.step_s(holder) if holder is not None else 0.0
            actions = tick(request, now, patience_s=patience_s, stuck=holder is not None and self.router.is_stuck(holder))
            if not actions and refetch and request.is_held and request.silence.heard_at <= self._reconnected_at:
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
                    self.placement.needs_decode(request, now)
                case Ended():
                    self.placement.ended(request)
                    self._forget_ended(request)
                    self.on_ended(request, now)
        self.placement.settle(request)

    def _free(self, worker: WorkerRef, request_id: str, attempt: int) -> None:
        requests = self._frees.setdefault(worker, {})
        requests[request_id] = max(attempt, requests.get(request_id, attempt))

    def _retry(self, request: Request, not_before: float, now: float) -> None:
        self.stats.retries += 1
        self.stats.resumes += bool(request.tokens)
        self.placement.rejoin(request, now, not_before=not_before)

    def _forget(self, request: Request) -> None:
        """It was never placed."""
        self.placement.forget(request)
        self._forget_ended(request)

    def _forget_ended(self, request: Request) -> None:
        self.stats.dropped_frames += request.dropped_frames
        self.stats.fetches += request.sent_fetches
        del self.requests[request.id], self._wire_ids[request.client_id]

    def _place_waiting(self, now: float) -> None:
        if self.connected:
            for request, actions in self.placement.place(now):
                self._apply(request, actions, now)
