"""The gateway: takes requests from its edges, sends them to workers, and keeps every stream going.

The life of a request here:

    generate ─► queue ─► router ─► task ─► frames ─► Stream.next … ─► finished: workers told to let go
       typed refusal at once, or a typed error at the end of the stream: nothing else, and nothing hangs

All decisions are the dispatcher's; this file carries messages to it and does what it says. Each model that is served has a
dispatcher and pools of its own (`model_core.py`); the inbox, flow control, the epoch and the edges are the gateway's.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import anyio
from starlette.types import ASGIApp

from common.protocol.errors import (
    Cancelled,
    GatewayBusy,
    NoResponders,
    Overloaded,
    PenstockError,
    ProtocolError,
    ShuttingDown,
    from_wire,
)
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
from common.runtime.http_cors import with_cors
from services.gateway.actions import Ask, Path
from services.gateway.batches.service import Batches
from services.gateway.census import WatchedModel
from services.gateway.config import GatewayConfig
from services.gateway.dashboard import Dashboard
from services.gateway.door import Door
from services.gateway.explainer import Explainer
from services.gateway.http import create_app
from services.gateway.inflow import Inflow
from services.gateway.intake import Intake
from services.gateway.kv_feed import KvFeed
from services.gateway.lag import Lag
from services.gateway.model_core import ModelCore, Served, catalog_of, names_of_workers, room_behind
from services.gateway.nats_front import NatsFront
from services.gateway.request_spans import spans_of
from services.gateway.requests import GenerationRequest, Request
from services.gateway.stream import Stream
from services.gateway.telemetry import Telemetry
from services.gateway.usage import UsageReports
from services.gateway.windows import Windows

log = logs.get("gateway")

RENEW_EVERY_S = 1.0
RENEWALS_PER_MESSAGE = 4096
FREE_AFTER_S = 0.01
"""Requests that end within this time are let go of with one message per worker."""
SETTLED_AFTER_S = 0.5
"""After the bus came back: workers return a little later than we do, and would miss what is sent before."""
DRAIN_RESERVE_S = 2.0
"""Kept of the drain's time for telling clients that their stream ends here."""


class GatewayActor(Actor):
    """`models`: what to serve; by default the one that `config` names, without edges: only `generate`."""

    role = "gateway"
    hears = ("prefill", "decode", "draft", "kvstore")
    config: GatewayConfig

    def __init__(
        self,
        *,
        bus: Bus,
        config: GatewayConfig,
        models: Sequence[Served] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus=bus, config=config, clock=clock)
        self.windows, self.telemetry = Windows(), Telemetry(self.metrics)
        names = names_of_workers(models := models or [Served(config)])
        self.cores = [ModelCore(self, served, own, clock) for served, own in zip(models, names, strict=True)]
        self._core_of_name = {name: core for core, own in zip(self.cores, names, strict=True) for name in own}
        self.registry.on_heard = lambda presence: [core.router.heard(presence) for core in self.cores]
        self.intake = Intake(config)
        self.catalog = catalog_of(self.cores, config, self.intake)
        self.usage = UsageReports(self.metrics)
        self.door = Door(config, on_usage=self.usage.add)
        self.dashboard = Dashboard(self, lambda: [WatchedModel(core.name, core.dispatcher) for core in self.cores], clock)
        running = lambda: ((core.name, core.dispatcher.requests) for core in self.cores)  # noqa: E731
        self.explainer = Explainer(self, running, reply_prefixes=config.reply_prefixes, tenants=self.door.has_tenants)
        for core in self.cores:
            core.dispatcher.on_ended = functools.partial(self._has_ended, core)
        self._numbers = itertools.count(1)
        self._outages, self._settled_at = 0, clock()
        self._inflow = Inflow(self._take_frames, self._frames_taken, clock)
        self._lag = Lag(heartbeat_s=config.heartbeat_s, now=clock())
        self._freeing, self._idle = anyio.Event(), anyio.Event()
        self._front: NatsFront | None = None
        self.batches: Batches | None = None
        if self.catalog is not None and not config.zero_retention:
            self.batches = Batches(self, self.catalog, bus, config, room=room_behind, door=self.door)
        parts = lambda: (self._front, self.explainer, self.batches)  # noqa: E731
        self.endpoints = lambda: [each for part in parts() if part is not None for each in part.endpoints]

    def _has_ended(self, core: ModelCore, request: Request, now: float) -> None:
        self.dashboard.ended.add(request, core.name, now)
        self.explainer.ended(request, core.name, now)
        if request.trace:
            self.tracing.record(spans_of(request, now), now)

    # -- for the edges

    @property
    def serving(self) -> bool:
        """It has started, and the bus is there."""
        return self.state == "ready" and self.bus.connected

    @property
    def ready(self) -> bool:
        """Requests for one model at least would be answered."""
        return any(core.ready for core in self.cores)

    def workers(self) -> list[Presence]:
        return self.registry.alive(None, self.clock())

    def generate(self, request: GenerationRequest) -> Stream:
        """Take a request for the first model; raises what `begin` does."""
        return self.cores[0].generate(request)

    def http_app(self) -> ASGIApp | None:
        catalog, config, parts = self.catalog, self.config, (self.dashboard, self.batches, self.door, self.explainer)
        return None if catalog is None else with_cors(create_app(self, catalog, config, *parts), config.allow_origin)

    @property
    def fence_after_s(self) -> float:
        """Nobody moves a gateway's work elsewhere: workers keep it for a lease, and the streams can go on until then."""
        return self.config.lease_s

    # -- life

    async def work(self) -> None:
        for task in (self._inflow.run, self._free_for_ever, self._renew_for_ever, KvFeed(self).run):
            self.task_group.start_soon(task)
        for core in self.cores:
            self.task_group.start_soon(core.canary.run)
        if self.catalog is not None:
            self.task_group.start_soon(self.dashboard.run)
            self.task_group.start_soon(self.explainer.run, self.bus)
            if self.batches is not None:
                self.task_group.start_soon(self.batches.run)
            self.task_group.start_soon(self.door.watch)
            self.task_group.start_soon(self.usage.run, self.bus)
            self._front = NatsFront(self, self.catalog, self.bus, self.config, self.door)
            await self._front.run()
        await anyio.sleep_forever()

    async def drain(self) -> None:
        """Streams go on for as long as there is time, then they end with `ShuttingDown`."""
        with anyio.move_on_after(max(self.drain_s / 2, self.drain_s - DRAIN_RESERVE_S)):
            await self._all_answered()
        for core in self.cores:
            core.dispatcher.fail_all(ShuttingDown("this gateway stops; send the request again"), self.clock())
        self._send_frees()
        with anyio.move_on_after(DRAIN_RESERVE_S / 2):
            await self._all_answered()

    async def _all_answered(self) -> None:
        if self.batches is not None:
            await self.batches.drain()
        if self._front is not None:
            await self._front.drain()
        self._idle = anyio.Event()
        self._carry_out_all()
        await self._idle.wait()

    def presence(self, state: WorkerState) -> Presence:
        models = [core.said() for core in self.cores]
        return Presence(
            worker=self.ref,
            state=state,
            model=models[0].name,
            running=sum(model.running for model in models),
            waiting=sum(model.waiting for model in models),
            http_port=self.http_port,
            models=models,
        )

    def tick(self, now: float) -> None:
        self._look_around(now)
        self._lag.measure(self._inflow.lag_s, now)
        for worker in self.windows.tick(now):
            self._acknowledge(worker)
        alive = [peer.worker.id for peer in self.registry.alive(None, now)]
        for core in self.cores:
            core.dispatcher.tick(now, behind=self._lag.is_behind(now))
            core.health.forget(alive, now)
            core.canary.tick(now, connected=self.bus.connected)
        self._carry_out_all()

    def peer_lost(self, peer: Presence) -> None:
        self._inflow.flush()
        for core in self.cores:
            core.dispatcher.worker_lost(peer.worker, self.clock())
        self._carry_out_all()

    def connection_changed(self, connected: bool) -> None:
        if connected:
            self._settled_at = self.clock() + SETTLED_AFTER_S
        else:
            self._outages += 1
        for core in self.cores:
            core.dispatcher.connection_changed(connected, self.clock())
        self._carry_out_all()

    def fenced(self) -> None:
        """Workers have freed everything by now. Prompts and tokens are here, so every stream goes on under the new epoch."""
        self._inflow.clear()
        for core in self.cores:
            core.dispatcher.new_life(self.ref, self.clock())
        self._carry_out_all()

    # -- what workers say

    def handle(self, message: Message, reply: str) -> None:
        if isinstance(message, TokenFrames):
            self._inflow.put(message)
            return
        self._inflow.flush()
        now = self.clock()
        match message:
            case HandedOff():
                (core := self._core_of(message.request)).dispatcher.handed_off(message, now)
            case HandoffFailed():
                (core := self._core_of(message.request)).dispatcher.handoff_failed(message, now)
            case Unknown():
                core = self._core_of(*(request for request, _ in message.requests))
                core.dispatcher.unknown(message, now)
            case _:
                log.warning("unexpected_message", message=type(message).__name__)
                return
        self._carry_out(core)

    def _core_of(self, *requests: str) -> ModelCore:
        """Whose `requests` a worker speaks of. A worker serves one model, so any of them that is still here tells."""
        if len(self.cores) > 1:
            for request in requests:
                for core in self.cores:
                    if request in core.dispatcher.requests:
                        return core
        return self.cores[0]

    def _take_frames(self, message: TokenFrames) -> None:
        core = self._core_of(*(frame.request for frame in message.frames)) if len(self.cores) > 1 else self.cores[0]
        core.dispatcher.frames(message, self.clock())
        self._carry_out(core)

    def _frames_taken(self, worker: WorkerRef, number: int, units: int, waited_s: float) -> None:
        self.windows.waited(waited_s, units, self.clock())
        if number and self.windows.took(worker, number, units, self.clock()):
            self._acknowledge(worker)

    def _acknowledge(self, worker: WorkerRef) -> None:
        number = self.windows.acknowledge(worker)
        self.send(worker, FramesTaken(gateway=self.ref, number=number, window=self.windows.size))

    # -- inside

    def begin(self, core: ModelCore, request: GenerationRequest, path: Path, only: WorkerRef | None) -> Stream:
        """Take a request for `core`'s model.

        :raises GatewayBusy, Overloaded, ShuttingDown, DuplicateRequest: nothing has been taken then.
        """
        if self.state != "ready":
            raise ShuttingDown("this gateway is starting or stopping; send the request to another one, or again in a moment")
        now = self.clock()
        if self._lag.sheds(now) and path in ("auto", "read"):
            raise GatewayBusy("this gateway can't keep up; try again in a moment")
        num_requests = sum(len(each.dispatcher.requests) for each in self.cores)
        if num_requests >= self.config.max_requests:
            raise Overloaded(f"{num_requests} requests are running; try again in a moment")
        taken = Request(
            request,
            wire_id=f"{request.id}/{self.ref.epoch:x}/{next(self._numbers)}",
            gateway=self.ref,
            limits=core.limits,
            now=now,
            wall_ms=int(time.time() * 1000),
            path=path,
            only=only,
        )
        stream = Stream(taken, functools.partial(self._cancel, core))
        if not len(core.router.decode):
            self._look_around(now)
        core.dispatcher.submit(taken, now)
        self._carry_out(core)
        return stream

    def _cancel(self, core: ModelCore, client_id: str) -> None:
        core.dispatcher.cancel(client_id, Cancelled("the request was cancelled"), self.clock())
        self._carry_out(core)

    def _look_around(self, now: float) -> None:
        """Tell each model's core who is alive: those that announce it, and those that announce nothing served here."""
        own: dict[str, list[Presence]] = {core.name: [] for core in self.cores}
        others: list[Presence] = []
        for worker in (*self.registry.alive("prefill", now), *self.registry.alive("decode", now)):
            core = self._core_of_name.get(worker.model)
            (others if core is None else own[core.name]).append(worker)
        for core in self.cores:
            others = core.look_around(own[core.name], others, now)

    def _carry_out_all(self) -> None:
        for core in self.cores:
            self._carry_out(core)

    def _carry_out(self, core: ModelCore) -> None:
        """Do what the dispatcher of a model decided."""
        dispatcher = core.dispatcher
        for request, ask in dispatcher.take_asks():
            self.task_group.start_soon(self._ask, core, request.id, ask)
        for tell in dispatcher.take_tells():
            self.send(tell.worker, tell.message)
        if dispatcher.has_frees and self.bus.connected:
            self._freeing.set()
        if not dispatcher.requests and not any(each.dispatcher.requests for each in self.cores):
            self._idle.set()

    async def _ask(self, core: ModelCore, request_id: str, ask: Ask) -> None:
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
            core.dispatcher.refused(request_id, ask.worker, ask.attempt, error, self.clock(), bus_was_away=away)
        else:
            core.dispatcher.accepted(request_id, ask.worker, ask.attempt, self.clock())
        self._carry_out(core)

    def _gone(self, worker: WorkerRef) -> None:
        if (known := self.registry.get(worker.id)) is not None and known.worker == worker:
            self.registry.mark_lost(worker.id)

    async def _renew_for_ever(self) -> None:
        while True:
            await anyio.sleep(min(RENEW_EVERY_S, self.config.lease_s / 4))
            if not self.bus.connected:
                continue
            for worker, requests in itertools.chain(*(core.dispatcher.renewals().items() for core in self.cores)):
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
        for core in self.cores:
            for worker, requests in core.dispatcher.take_frees().items():
                self.send(worker, Cancel(requests=list(requests.items())))
