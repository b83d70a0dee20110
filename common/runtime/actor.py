"""The life that all five services share: a mailbox, heartbeats, the registry of others, leases' clock, drain and fencing.

    run ─► subscribe to my inbox and to presence ─► started() ─► start() loads ─► work() until drained or stopped ─► close()
             every heartbeat: publish presence ─► tick() ─► report lost peers ─► probe silent ones

The mailbox is the bus's bounded queue in front of `handle`, which is synchronous and quick. Heavy work goes to threads, so
that heartbeats go on. Three ways in which a peer or this process can fail are dealt with here:

- A peer is silent: it is probed, and reported lost as soon as it is known to be gone (`peers.py`).
- The bus is away: nobody is lost meanwhile, and everyone gets `dead_after_s` to be heard again afterwards.
- This process was stopped (SIGSTOP, a suspended machine) for longer than `fence_after_s`: the others have given it up, so it
  drops what it holds, says nothing it wanted to say before, and goes on under a new epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, get_args

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus
from starlette.types import ASGIApp

from common.protocol import messages, subjects
from common.protocol.errors import NoResponders, PenstockError, ProtocolError, RequestTimeout, WorkerLost
from common.protocol.handles import Role, WorkerRef, new_epoch, new_worker_id
from common.protocol.messages import EpochTaken, Message, Presence, Rejected
from common.runtime import logs
from common.runtime.bus import Bus, BusMessage, Endpoint, Subscription
from common.runtime.http_access import reachable_host
from common.runtime.metrics import Metrics
from common.runtime.outbox import Outbox
from common.runtime.peers import PROBE, Peers
from common.runtime.settings import ServiceConfig
from common.runtime.tracing import OFF

WorkerState = Literal["starting", "ready", "draining"]

RETRY_NO_RESPONDERS_S = 0.1
END_RESERVE_S = 4.0
"""Kept of the drain's time for ending the process: goodbyes, responses that are being written, threads that hang."""
NO_TIME_S = 0.001
"""Too little is left of a timeout to ask once more."""

log = logs.get("actor")


class Actor:
    """Base of all services' actors. Everything runs in one event loop; no method may be called from another thread."""

    role: ClassVar[Role]
    hears: ClassVar[tuple[Role, ...]] = get_args(Role)
    """Whose heartbeats this role needs. Everyone hearing everyone would cost the square of their number."""

    def __init__(self, *, bus: Bus, config: ServiceConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.bus = bus
        self.config = config
        self.clock = clock
        self._http_host = reachable_host(config.http_host)
        self.ref = WorkerRef(self.role, config.worker_id or new_worker_id(self.role), new_epoch())
        self.peers = Peers(
            bus, heartbeat_s=config.heartbeat_s, dead_after_s=config.dead_after_s, clock=clock, on_lost=self._on_peer_lost
        )
        self.registry = self.peers.registry
        self._is_news = logs.Once()
        self.metrics = Metrics(role=self.role)
        self.state: WorkerState = "starting"
        self.http_port = 0
        self.num_handled = self.num_failed = 0
        self.tracing = OFF
        self.task_group: TaskGroup
        self._outbox = Outbox(bus, on_dropped=self.metrics.outbox_dropped.inc)
        self._decoded = {kind.__name__: self.metrics.messages_received.labels(kind.__name__) for kind in get_args(Message)}
        self._subscriptions: list[Subscription] = []
        self._nudge, self._finished = anyio.Event(), anyio.Event()
        self.on_ready: Callable[[], None] = lambda: None
        self.endpoints: Callable[[], Sequence[Endpoint]] = tuple  # public subjects that it listens to, beside its inbox
        self._running = False
        self._crashing = False
        self._last_beat = clock()

    # -- what subclasses implement

    async def start(self) -> None:
        """Load what is needed. Presence says "starting" meanwhile; heavy work goes to a thread."""

    def handle(self, message: Message, reply: str) -> None:
        """One decoded message of the inbox. Quick; answers with `answer(reply, …)` now or later.

        While starting, only messages that ask for no answer arrive here.
        """

    async def work(self) -> None:
        """The main loop; cancelled at the end."""
        await anyio.sleep_forever()

    def presence(self, state: WorkerState) -> Presence:
        """What this worker tells everyone, four times a second."""
        return Presence(worker=self.ref, state=state, model=self.config.served_name, http_port=self.http_port)

    def announcement(self) -> Presence:
        """`presence`, and where its HTTP port is to be reached."""
        said = self.presence(self.state)
        return msgspec.structs.replace(said, http_host=self._http_host) if said.http_port else said

    async def drain(self) -> None:
        """Refuse new work from now on; return when nothing is held."""

    def tick(self, now: float) -> None:
        """After each heartbeat: expire leases and the like."""

    def peer_lost(self, peer: Presence) -> None:
        """This life of a worker is over: its process is gone, silent for too long, or began anew."""

    def fenced(self) -> None:
        """Others have given this process up: drop everything held. A new epoch has begun."""

    def connection_changed(self, connected: bool) -> None:
        """The bus went away or came back: pause or resume lease tables. The registry is taken care of."""

    def close(self) -> None:
        """The end, after `work` was cancelled or `start` failed: give memory and threads back."""

    def http_app(self) -> ASGIApp | None:
        """An app to serve instead of the plain /metrics, /health and /ready."""
        return None

    # -- what they use

    @property
    def running(self) -> bool:
        return self._running

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def fence_after_s(self) -> float:
        """Seconds without a heartbeat after which peers have given up what they share with this worker."""
        return self.config.dead_after_s

    @property
    def drain_s(self) -> float:
        """Seconds for finishing what is held after SIGTERM: the rest of `drain_timeout_s` is for ending."""
        return max(self.config.drain_timeout_s / 2, self.config.drain_timeout_s - END_RESERVE_S)

    @property
    def healthy(self) -> bool:
        """The loop runs, heartbeats are on time, and the bus is there."""
        return self._running and self.bus.connected and self.clock() - self._last_beat <= self.config.dead_after_s

    def send(self, to: WorkerRef | str, message: Message) -> None:
        """To a worker's inbox or to a subject: ordered, never waits, never fails; at most once, like the bus."""
        self._outbox.put(to if isinstance(to, str) else subjects.inbox(to.role, to.id), messages.encode(message))

    def answer(self, reply: str, message: Message) -> None:
        """Nothing happens when no answer was asked for."""
        if reply:
            self._outbox.put(reply, messages.encode(message))

    async def ask(self, to: WorkerRef, message: Message, timeout_s: float, *, repeat: bool = False) -> Message:
        """Send after everything sent before, and wait for the answer. A `Rejected` is returned, not raised.

        `repeat`: asking twice is the same as asking once, so when the bus was away meanwhile the question is asked again
        instead of raising RequestTimeout at once.

        :raises NoResponders: the process is gone. Not raised soon after the bus came back, when it may not have returned
            yet: then the question is asked again until `timeout_s` is over.
        :raises RequestTimeout: no answer in time. :raises ProtocolError: an answer that can't be decoded.
        :raises PayloadTooLarge: nothing was sent. :raises BusClosed: this process is stopping.
        """
        data, subject = messages.encode(message), subjects.inbox(to.role, to.id)
        ends_at = anyio.current_time() + timeout_s
        with anyio.move_on_after(timeout_s):
            await self._outbox.passed()
        while (left_s := ends_at - anyio.current_time()) > NO_TIME_S:
            try:
                reply = await self.bus.request(subject, data, timeout_s=left_s)
                return messages.decode(reply.data)
            except NoResponders:
                if self.peers.is_settled(self.clock()):
                    raise
                await anyio.sleep(min(RETRY_NO_RESPONDERS_S, left_s))
            except RequestTimeout:
                if not repeat:
                    raise
        raise RequestTimeout(f"no answer from {to.id} within {timeout_s:g} s")

    def announce(self) -> None:
        """Publish presence now instead of at the next heartbeat: load or state changed in a way that others wait for."""
        self._nudge.set()

    def begin_drain(self) -> None:
        """Finish what is held, for at most `drain_timeout_s`, then let `run` return. Harmless twice."""
        if self.state == "draining" or not self._running:
            return
        log.info("draining", worker=self.ref.id, was=self.state)
        self.state = "draining"
        self.send(subjects.presence(self.role, self.ref.id), self.announcement())  # it is out before the process ends
        self.task_group.start_soon(self._drain_then_stop)

    async def stop(self) -> None:
        """End now. Returns when `run` has ended."""
        if self._running:
            self.task_group.cancel_scope.cancel()
            await self._finished.wait()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """The whole life. `started()` once the inbox is subscribed: from then on messages reach this actor.

        What `start`, `work`, `tick`, `peer_lost`, `fenced` or `connection_changed` raise ends it.
        """
        try:
            async with anyio.create_task_group() as self.task_group:
                self._running = True
                self._last_beat = self.clock()
                self.bus.on_connection_change(self._on_connection_change)
                await self._subscribe()
                self.task_group.start_soon(self._outbox.run, self._fence_if_stopped)
                self.task_group.start_soon(self._heartbeat)
                task_status.started()
                await self.start()
                self.on_ready()
                self._last_beat = self.clock()  # loading may have kept the loop for long; nobody has counted on us yet
                if self.state == "starting":
                    self.state = "ready"
                    log.info("ready", worker=self.ref.id, role=self.role)
                self.announce()
                await self.work()
        finally:
            self._running = False
            with anyio.CancelScope(shield=True):
                await self._leave()
            self.close()
            self._finished.set()

    # -- life

    async def _subscribe(self) -> None:
        self._subscriptions.append(await self.bus.subscribe(subjects.inbox(self.role, self.ref.id), self._on_message))
        mine = subjects.presence(self.role, self.ref.id)  # another process under our name
        for heard in (*map(subjects.presence_of, self.hears), *(() if self.role in self.hears else (mine,))):
            self._subscriptions.append(await self.bus.subscribe(heard, self._on_presence))

    async def _leave(self) -> None:
        """Stop listening first, so that who asks now is told that nobody is here; then send what is left."""
        with anyio.move_on_after(1.0):
            try:
                for subscription in self._subscriptions:
                    await subscription.unsubscribe()
                await self._outbox.send_queued()
            except PenstockError as error:
                log.debug("left_without_goodbye", worker=self.ref.id, reason=str(error))

    async def _drain_then_stop(self) -> None:
        with anyio.move_on_after(self.drain_s) as scope:
            await self.drain()
            await self._outbox.passed()
        if scope.cancelled_caught:
            log.warning("drain_timed_out", worker=self.ref.id, timeout_s=self.drain_s)
        else:
            log.info("drained", worker=self.ref.id)
        self.task_group.cancel_scope.cancel()

    async def _heartbeat(self) -> None:
        while True:
            self._fence_if_stopped()
            now = self.clock()
            self._last_beat = now
            self._nudge = anyio.Event()
            try:
                presence = messages.encode(self.announcement())
                await self.bus.publish(subjects.presence(self.role, self.ref.id), presence)
            except PenstockError as error:
                log.warning("heartbeat_not_sent", worker=self.ref.id, reason=str(error))
            self.tick(now)
            self.peers.look_around(now, self.task_group)
            with anyio.move_on_after(self.config.heartbeat_s):
                await self._nudge.wait()

    def _fence_if_stopped(self) -> None:
        """Called before anything is sent or handled, so that a process that wakes up says nothing under its old epoch."""
        now = self.clock()
        gap_s = now - self._last_beat
        if gap_s <= self.config.dead_after_s:
            return
        self._last_beat = now
        self.registry.resume(now)
        if not self.bus.connected:
            self.registry.pause(now)
        # while starting nothing is held yet, and loading a model may keep the interpreter busy
        if self.state == "starting" or gap_s <= self.fence_after_s:
            log.warning("heartbeat_late", worker=self.ref.id, gap_s=round(gap_s, 2))
            return
        log.error("fenced", worker=self.ref.id, gap_s=round(gap_s, 2), epoch=self.ref.epoch)
        self._outbox.clear()
        self._begin_anew(self.ref.epoch)

    def _begin_anew(self, after: int) -> None:
        """Drop what is held, and take an epoch later than `after`."""
        self.metrics.fences.inc()
        self.ref = WorkerRef(self.role, self.ref.id, new_epoch(after))
        self.fenced()
        self.announce()

    def _crash(self, error: Exception) -> None:
        """End `run` with `error`, from a callback that must not raise."""

        async def fail() -> None:
            raise error

        if self._running and not self._crashing:
            self._crashing = True
            self.task_group.start_soon(fail)

    # -- what the bus calls; nothing here may raise

    def _on_message(self, message: BusMessage) -> None:
        try:
            self._fence_if_stopped()
        except Exception as error:
            self._crash(error)
            return
        if not message.data:
            if message.reply:
                self._outbox.put(message.reply, PROBE)
            return
        try:
            decoded = messages.decode(message.data)
        except ProtocolError as error:
            self.metrics.messages_undecodable.inc()
            if self._is_news(str(error)):  # a newer version may send what we don't know in each step
                log.warning("undecodable_message", worker=self.ref.id, size_bytes=len(message.data), reason=str(error))
            self.answer(message.reply, Rejected(worker=self.ref, code=error.code, message="the message can't be decoded"))
            return
        if self.state == "starting" and message.reply:
            self.answer(message.reply, Rejected(worker=self.ref, code="out_of_credits", message="still starting"))
            return
        self._decoded[type(decoded).__name__].inc()
        self.num_handled += 1
        try:
            if isinstance(decoded, EpochTaken):
                self._on_epoch_taken(decoded)
                return
            self.handle(decoded, message.reply)
        except Exception:
            self._on_handler_error(decoded, message.reply)

    def _on_epoch_taken(self, message: EpochTaken) -> None:
        if message.epoch > self.ref.epoch:
            log.warning("epoch_taken", worker=self.ref.id, epoch=self.ref.epoch, taken=message.epoch)
            self._begin_anew(message.epoch)

    def _on_handler_error(self, message: Message, reply: str) -> None:
        """A mistake of ours: one message must not end the others, and whoever waits for an answer gets one."""
        error_id = os.urandom(4).hex()
        self.num_failed += 1
        self.metrics.handler_errors.inc()
        log.exception("handler_failed", worker=self.ref.id, message=type(message).__name__, error_id=error_id)
        self.answer(reply, Rejected(worker=self.ref, code="internal_error", message=f"internal error {error_id}"))

    def _on_presence(self, message: BusMessage) -> None:
        try:
            presence = messages.decode(message.data)
        except ProtocolError:
            presence = None
        if not isinstance(presence, Presence) or not subjects.is_presence_of(
            message.subject, presence.worker.role, presence.worker.id
        ):
            self.metrics.messages_undecodable.inc()  # a worker speaks for itself alone
            return
        if presence.worker.id != self.ref.id:
            self.registry.observe(presence, self.clock())
            if epoch := self.registry.superseded_by(presence):
                self.send(presence.worker, EpochTaken(epoch=epoch))
        elif presence.worker.epoch > self.ref.epoch:
            self._crash(WorkerLost(f"another process runs as {self.ref.id}; give each worker an id of its own"))

    def _on_connection_change(self, connected: bool) -> None:
        if not self._running:
            return
        self.peers.connection_changed(connected, self.clock())
        if connected:
            self.announce()
        try:
            self.connection_changed(connected)
        except Exception as error:
            self._crash(error)

    def _on_peer_lost(self, peer: Presence) -> None:
        event, tell = ("peer_left", log.info) if peer.state == "draining" else ("peer_lost", log.warning)
        tell(event, worker=self.ref.id, peer=peer.worker.id, epoch=peer.worker.epoch, model=peer.model)
        self.metrics.peers_lost.inc(event == "peer_lost")
        self.peer_lost(peer)
