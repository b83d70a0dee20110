"""The gateway: takes requests from its edges, sends them to workers, and keeps every stream going.

The life of a request here:

    generate ─► queue ─► router ─► task ─► frames ─► Stream.next … ─► finished: workers told to let go
       typed refusal at once, or a typed error at the end of the stream: nothing else, and nothing hangs

All decisions are the dispatcher's; this file carries messages to it and does what it says.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import anyio
from starlette.types import ASGIApp

from common.models.naming import model_name
from common.protocol.errors import Cancelled, GatewayBusy, NoResponders, PenstockError, ProtocolError, ShuttingDown, from_wire
from common.protocol.handles import WorkerRef
from common.protocol.messages import (
    Accepted,
    Cancel,
    FramesTaken,
    HandedOff,
    HandoffFailed,
    Message,
    Presence,
    Rejected,
    Renew,
    TokenFrames,
    Unknown,
)
from common.runtime import logs
from common.runtime.actor import Actor, WorkerState
from common.runtime.bus import Bus
from common.text.bundle import TextBundle
from services.gateway.actions import Ask, Limits, Path
from services.gateway.canary import Canary
from services.gateway.census import ServedModel
from services.gateway.config import GatewayConfig
from services.gateway.dashboard import Dashboard
from services.gateway.dispatch import Dispatcher
from services.gateway.health import Health
from services.gateway.http import create_app
from services.gateway.inflow import Inflow
from services.gateway.intake import Intake
from services.gateway.membership import Membership
from services.gateway.nats_front import NatsFront
from services.gateway.placement import Placement
from services.gateway.requests import GenerationRequest, Request
from services.gateway.router import Router
from services.gateway.stream import Stream
from services.gateway.telemetry import Telemetry

log = logs.get("gateway")

RENEW_EVERY_S = 1.0
RENEWALS_PER_MESSAGE = 4096
FREE_AFTER_S = 0.01
"""Requests that end within this time are let go of with one message per worker."""
SETTLED_AFTER_S = 0.5
"""After the bus came back: workers return a little later than we do, and would miss what is sent before."""
BEHIND_S = 0.3
"""A frame that has waited so long, or a heartbeat so late, says that silence of workers may be our own."""
SHED_S = 2.0
SHED_AFTER_S = 3.0
"""When that is as much as `SHED_S`, and for so long that smaller windows did not help, new requests are refused."""
BEHIND_FOR_S = 1.0
DRAIN_RESERVE_S = 2.0
"""Kept of the drain's time for telling clients that their stream ends here."""


class GatewayActor(Actor):
    """`bundle`: tokenizer and template of the model; without it there are no edges, only `generate`. `identity`: what its
    weights are here, empty if they are not (see `membership`)."""

    role = "gateway"
    hears = ("prefill", "decode", "draft", "kvstore")
    config: GatewayConfig

    def __init__(
        self,
        *,
        bus: Bus,
        config: GatewayConfig,
        bundle: TextBundle | None = None,
        identity: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus=bus, config=config, clock=clock)
        self.bundle = bundle
        self.limits = Limits(
            stall_s=config.stall_s,
            max_fetches=config.max_fetches,
            max_attempts=config.max_attempts,
            max_losses=config.max_losses,
            placing_timeout_s=2 * config.task_timeout_s + 1,
            prefill_timeout_s=config.prefill_timeout_s,
            slow_reader_timeout_s=config.slow_reader_timeout_s,
        )
        self.membership = Membership((config.served_name, model_name(config.model)), identity)
        self.router = Router(
            direct_max_tokens=config.direct_max_tokens,
            affinity_blocks=config.affinity_blocks,
            models=self.membership.names,
        )
        self.health = Health(trusting=not config.canary)
        self.placement = Placement(self.router, self.health)
        self.windows = self.placement.windows
        self.dispatcher = Dispatcher(
            placement=self.placement,
            max_queue=config.max_queue,
            max_requests=config.max_requests,
            no_workers_grace_s=config.no_workers_grace_s,
            now=clock(),
        )
        model = bundle.name if bundle is not None else config.served_name
        self.telemetry = Telemetry(self.metrics, self.dispatcher, model=model)
        self.intake = Intake(config)
        self.placement.on_placed = self.telemetry.waited
        served = ServedModel(model, self.dispatcher)
        self.dashboard = Dashboard(self, lambda: (served,), clock)
        self.dispatcher.on_ended = lambda request, now: self.dashboard.ended.add(request, model, now)
        self.canary = Canary(
            router=self.router,
            health=self.health,
            generate=self._start,
            clock=clock,
            timeout_s=config.canary_timeout_s,
            interval_s=config.canary_interval_s,
            enabled=config.canary,
        )
        self._numbers = itertools.count(1)
        self._outages = 0
        self._settled_at = clock()
        self._inflow = Inflow(self._take_frames, self._frames_taken, clock)
        self._ticked_at = self._kept_up_at = self._busy_until = self._shed_until = clock()
        self._freeing = anyio.Event()
        self._idle = anyio.Event()
        self._front: NatsFront | None = None
        self.endpoints = lambda: self._front.endpoints if self._front is not None else ()

    # -- for the edges

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.bus.connected and self.canary.passed

    def workers(self) -> list[Presence]:
        return self.registry.alive(None, self.clock())

    def generate(self, request: GenerationRequest) -> Stream:
        """:raises GatewayBusy, Overloaded, ShuttingDown, DuplicateRequest: nothing has been taken then."""
        return self._start(request, "auto", None)

    def http_app(self) -> ASGIApp | None:
        if self.bundle is None:
            return None
        return create_app(self, self.bundle, self.config, intake=self.intake, dashboard=self.dashboard)

    @property
    def fence_after_s(self) -> float:
        """Nobody moves a gateway's work elsewhere: workers keep it for a lease, and the streams can go on until then."""
        return self.config.lease_s

    # -- life

    async def work(self) -> None:
        self.task_group.start_soon(self._inflow.run)
        self.task_group.start_soon(self._free_for_ever)
        self.task_group.start_soon(self._renew_for_ever)
        self.task_group.start_soon(self.canary.run)
        if self.bundle is not None:
            self.task_group.start_soon(self.dashboard.run)
            self._front = NatsFront(self, self.bundle, self.bus, self.config, intake=self.intake)
            await self._front.run()
        await anyio.sleep_forever()

    async def drain(self) -> None:
        """Streams go on for as long as there is time, then they end with `ShuttingDown`."""
        with anyio.move_on_after(max(self.drain_s / 2, self.drain_s - DRAIN_RESERVE_S)):
            await self._all_answered()
        self.dispatcher.fail_all(ShuttingDown("this gateway stops; send the request again"), self.clock())
        self._send_frees()
        with anyio.move_on_after(DRAIN_RESERVE_S / 2):
            await self._all_answered()

    async def _all_answered(self) -> None:
        if self._front is not None:
            await self._front.drain()
        self._idle = anyio.Event()
        self._carry_out()
        await self._idle.wait()

    def presence(self, state: WorkerState) -> Presence:
        return Presence(
            worker=self.ref,
            state=state,
            model=self.config.served_name,
            running=self.dispatcher.num_running,
            waiting=self.dispatcher.num_waiting,
            http_port=self.http_port,
        )

    def tick(self, now: float) -> None:
        self._look_around(now)
        self._measure_lag(now)
        for worker in self.windows.tick(now):
            self._acknowledge(worker)
        self.dispatcher.tick(now, behind=now < self._busy_until)
        self.health.forget([peer.worker.id for peer in self.registry.alive(None, now)], now)
        self.canary.tick(now, connected=self.bus.connected)
        self._carry_out()

    def _measure_lag(self, now: float) -> None:
        """Frames that have waited here for long, or heartbeats that come late, show that this process can't keep up."""
        lag_s, beat_late_s = self._inflow.lag_s, now - self._ticked_at - self.config.heartbeat_s
        late_s = max(lag_s, beat_late_s)
        self._ticked_at = now
        if late_s > BEHIND_S:
            self._busy_until = now + BEHIND_FOR_S
        if late_s <= SHED_S:
            self._kept_up_at = now
        elif now - self._kept_up_at > SHED_AFTER_S:
            if now >= self._shed_until:
                log.warning("can_not_keep_up", frames_waited_s=round(lag_s, 2), heartbeat_late_s=round(beat_late_s, 2))
            self._shed_until = now + BEHIND_FOR_S

    def peer_lost(self, peer: Presence) -> None:
        self._inflow.flush()
        self.dispatcher.worker_lost(peer.worker, self.clock())
        self._carry_out()

    def connection_changed(self, connected: bool) -> None:
        if connected:
            self._settled_at = self.clock() + SETTLED_AFTER_S
        else:
            self._outages += 1
        self.dispatcher.connection_changed(connected, self.clock())
        self._carry_out()

    def fenced(self) -> None:
        """Workers have freed everything by now. Prompts and tokens are here, so every stream goes on under the new epoch."""
        self._inflow.clear()
        self.dispatcher.new_life(self.ref, self.clock())
        self._carry_out()

    # -- what workers say

    def handle(self, message: Message, reply: str) -> None:
        if isinstance(message, TokenFrames):
            self._inflow.put(message)
            return
        self._inflow.flush()
        now = self.clock()
        match message:
            case HandedOff():
                self.dispatcher.handed_off(message, now)
            case HandoffFailed():
                self.dispatcher.handoff_failed(message, now)
            case Unknown():
                self.dispatcher.unknown(message, now)
            case _:
                log.warning("unexpected_message", message=type(message).__name__)
        self._carry_out()

    def _take_frames(self, message: TokenFrames) -> None:
        self.dispatcher.frames(message, self.clock())
        self._carry_out()

    def _frames_taken(self, worker: WorkerRef, number: int, units: int, waited_s: float) -> None:
        self.windows.waited(waited_s, units, self.clock())
        if number and self.windows.took(worker, number, units, self.clock()):
            self._acknowledge(worker)

    def _acknowledge(self, worker: WorkerRef) -> None:
        number = self.windows.acknowledge(worker)
        self.send(worker, FramesTaken(gateway=self.ref, number=number, window=self.windows.size))

    # -- inside

    def _start(self, request: GenerationRequest, path: Path, only: WorkerRef | None) -> Stream:
        if self.state != "ready":
            raise ShuttingDown("this gateway is starting or stopping; send the request to another one, or again in a moment")
        now = self.clock()
        if now < self._shed_until and path == "auto":
            raise GatewayBusy("this gateway can't keep up; try again in a moment")
        taken = Request(
            request,
            wire_id=f"{request.id}/{self.ref.epoch:x}/{next(self._numbers)}",
            gateway=self.ref,
            limits=self.limits,
            now=now,
            wall_ms=int(time.time() * 1000),
            path=path,
            only=only,
        )
        stream = Stream(taken, self._cancel)
        if not len(self.router.decode):
            self._look_around(now)
        self.dispatcher.submit(taken, now)
        self._carry_out()
        return stream

    def _cancel(self, client_id: str) -> None:
        self.dispatcher.cancel(client_id, Cancelled("the request was cancelled"), self.clock())
        self._carry_out()

    def _look_around(self, now: float) -> None:
        workers = [*self.registry.alive("prefill", now), *self.registry.alive("decode", now)]
        self.dispatcher.refresh(self.membership.members(workers), now)
        for stranger in self.membership.take_strangers():
            log.warning("worker_left_alone", worker=stranger.worker.id, reason=stranger.reason, advice=stranger.advice)

    def _carry_out(self) -> None:
        """Do what the dispatcher decided."""
        for request, ask in self.dispatcher.take_asks():
            self.task_group.start_soon(self._ask, request.id, ask)
        for tell in self.dispatcher.take_tells():
            self.send(tell.worker, tell.message)
        if self.dispatcher.has_frees and self.bus.connected:
            self._freeing.set()
        if not self.dispatcher.requests:
            self._idle.set()

    async def _ask(self, request_id: str, ask: Ask) -> None:
        """Give a worker a task, and tell the dispatcher what it answered."""
        outages = self._outages
        try:
            answer = await self.ask(ask.worker, ask.message, self.config.task_timeout_s, repeat=True)
            if isinstance(answer, Rejected):
                raise from_wire(answer.code, answer.message)
            if not isinstance(answer, Accepted):
                raise ProtocolError(f"{type(answer).__name__} is no answer to a task")
        except PenstockError as error:
            if isinstance(error, NoResponders):
                self._gone(ask.worker)
            away = self._outages != outages or not self.bus.connected
            log.debug("task_refused", request=request_id, to=ask.worker.id, code=error.code, reason=str(error))
            self.dispatcher.refused(request_id, ask.worker, ask.attempt, error, self.clock(), bus_was_away=away)
        else:
            self.dispatcher.accepted(request_id, ask.worker, ask.attempt, self.clock())
        self._carry_out()

    def _gone(self, worker: WorkerRef) -> None:
        known = self.registry.get(worker.id)
        if known is not None and known.worker == worker:
            self.registry.mark_lost(worker.id)

    async def _renew_for_ever(self) -> None:
        while True:
            await anyio.sleep(min(RENEW_EVERY_S, self.config.lease_s / 4))
            if not self.bus.connected:
                continue
            for worker, requests in self.dispatcher.renewals().items():
                for start in range(0, len(requests), RENEWALS_PER_MESSAGE):
                    self.send(worker, Renew(gateway=self.ref, requests=requests[start : start + RENEWALS_PER_MESSAGE]))

    async def _free_for_ever(self) -> None:
        while True:
            await self._freeing.wait()
            await anyio.sleep(FREE_AFTER_S)
            self._freeing = anyio.Event()
            if self.bus.connected and self.clock() >= self._settled_at:
                self._send_frees()

    def _send_frees(self) -> None:
        for worker, requests in self.dispatcher.take_frees().items():
            self.send(worker, Cancel(requests=list(requests.items())))
