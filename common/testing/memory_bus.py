"""The bus inside one process, with NATS's semantics and faults on demand: what actor tests and simulations run on.

    broker = MemoryBroker()
    gateway_bus, worker_bus = broker.connect("gateway"), broker.connect("worker")

Delivery is at most once, ordered, and never inside `publish`: it happens in a later turn of the event loop. Queue groups
take turns, so that a run can be repeated (a server would choose at random). Faults:

    broker.stop(), broker.start()   the server restarts: everyone is disconnected, messages on their way are lost
    broker.cut(bus), broker.heal(bus)  one connection breaks and returns
    undo = broker.drop(predicate)   messages for which `predicate(message)` is true are lost
    bus.kill()                      the process died: its subscriptions vanish at once, and it says nothing more
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import importlib.util
import itertools
from collections import deque
from collections.abc import Callable, Mapping

from common.protocol import subjects
from common.protocol.errors import BusClosed, RequestTimeout
from common.runtime import logs
from common.runtime.bus import BusMessage, Handler, ServiceInfo
from common.runtime.routing import (
    NO_RESPONDERS_STATUS,
    STATUS_HEADER,
    PendingReplies,
    check_size,
    check_subject,
    matches,
)
from common.testing.memory_streams import MemoryStore, MemoryStreams

log = logs.get(__name__)

MAX_CACHED_ROUTES = 4096
FLUSH_TIMEOUT_S = 10.0


def _delivery_context() -> contextvars.Context:
    """Handlers may start tasks in an anyio group. They run outside any task here, where sniffio, if it is installed, can't
    tell anyio which event loop this is unless it is told."""
    context = contextvars.copy_context()
    if importlib.util.find_spec("sniffio") is not None:
        library = importlib.import_module("sniffio").current_async_library_cvar
        context.run(library.set, "asyncio")
    return context


class MemorySubscription:
    def __init__(self, bus: MemoryBus, subject: str, handler: Handler, queue: str, max_pending: int) -> None:
        self.bus = bus
        self.subject = subject
        self.tokens = subject.split(".")
        self.handler = handler
        self.queue = queue
        self.max_pending = max_pending
        self.pending = 0
        self.active = True

    @property
    def num_waiting(self) -> int:
        return self.pending

    async def unsubscribe(self) -> None:
        """Messages that have arrived but were not handled yet are dropped. Harmless twice."""
        self.active = False
        self.bus._forget(self)


class MemoryBroker:
    """The server: knows who subscribes to what, and carries each message to them."""

    def __init__(self, *, max_payload: int = 8 * 1024 * 1024) -> None:
        self.max_payload = max_payload
        self.store = MemoryStore()
        self.running = True
        self.num_delivered = 0
        self._buses: list[MemoryBus] = []
        self._subscriptions: list[MemorySubscription] = []
        self._routes: dict[str, list[MemorySubscription]] = {}
        self._turns: dict[tuple[str, str], int] = {}
        self._predicates: list[Callable[[BusMessage], bool]] = []
        self._names = itertools.count()

    def connect(self, name: str, *, max_pending_bytes: int = 8 * 1024 * 1024) -> MemoryBus:
        bus = MemoryBus(self, f"{name}-{next(self._names)}", max_pending_bytes=max_pending_bytes)
        self._buses.append(bus)
        if self.running:
            bus._set_connected(True)
        return bus

    @property
    def services(self) -> list[ServiceInfo]:
        """What everyone connected has registered."""
        return [bus.service for bus in self._buses if bus.service is not None and bus.connected]

    def stop(self) -> None:
        self.running = False
        for bus in list(self._buses):
            bus._set_connected(False)

    def start(self) -> None:
        """Everyone reconnects one after another, as with a real server: what the first sends may find nobody yet."""
        self.running = True
        for bus in list(self._buses):
            if not bus._is_cut:
                bus._set_connected(True)

    def cut(self, bus: MemoryBus) -> None:
        bus._is_cut = True
        bus._set_connected(False)

    def heal(self, bus: MemoryBus) -> None:
        bus._is_cut = False
        if self.running:
            bus._set_connected(True)

    def drop(self, predicate: Callable[[BusMessage], bool]) -> Callable[[], None]:
        """Lose every message for which `predicate` is true, until the function that this returns is called."""
        self._predicates.append(predicate)

        def undo() -> None:
            if predicate in self._predicates:
                self._predicates.remove(predicate)

        return undo

    def _remove_bus(self, bus: MemoryBus) -> None:
        if bus in self._buses:
            self._buses.remove(bus)
        self._detach(bus)

    def _attach(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)
        self._routes.clear()

    def _detach(self, bus: MemoryBus, subscription: MemorySubscription | None = None) -> None:
        self._subscriptions = [
            other
            for other in self._subscriptions
            if other.bus is not bus or (subscription is not None and other is not subscription)
        ]
        self._routes.clear()

    def _route(self, subject: str) -> list[MemorySubscription]:
        route = self._routes.get(subject)
        if route is None:
            if len(self._routes) >= MAX_CACHED_ROUTES:
                self._routes.clear()
            tokens = subject.split(".")
            route = [subscription for subscription in self._subscriptions if matches(subscription.tokens, tokens)]
            self._routes[subject] = route
        return route

    def _carry(self, sender: MemoryBus, message: BusMessage) -> None:
        if any(predicate(message) for predicate in self._predicates):
            return
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        delivered = False
        for subscription in self._route(message.subject):
            if subscription.queue:
                groups.setdefault((subscription.subject, subscription.queue), []).append(subscription)
            else:
                subscription.bus._receive(subscription, message)
                delivered = True
        for group, members in groups.items():
            turn = self._turns.get(group, 0)
            self._turns[group] = turn + 1
            member = members[turn % len(members)]
            member.bus._receive(member, message)
            delivered = True
        if not delivered and message.reply:
            self._answer_no_responders(sender, message.reply)

    def _answer_no_responders(self, sender: MemoryBus, reply: str) -> None:
        """To the sender alone, and only if it listens on the reply subject, as a server does."""
        status = BusMessage(subject=reply, data=b"", headers={STATUS_HEADER: NO_RESPONDERS_STATUS})
        for subscription in self._route(reply):
            if subscription.bus is sender:
                sender._receive(subscription, status)


class MemoryBus:
    """One connection to a `MemoryBroker`; implements `Bus`."""

    def __init__(self, broker: MemoryBroker, name: str, *, max_pending_bytes: int) -> None:
        self.name = name
        self.tenant = ""
        self.num_dropped = 0
        self.service: ServiceInfo | None = None
        self._broker = broker
        self._max_pending_bytes = max_pending_bytes
        self._replies = PendingReplies(subjects.reply_prefix(name))
        self._subscriptions: list[MemorySubscription] = []
        self._callbacks: list[Callable[[bool], None]] = []
        self._arrived: deque[tuple[MemorySubscription, BusMessage]] = deque()
        self._outgoing: deque[BusMessage] = deque()
        self._outgoing_bytes = 0
        self._delivery_scheduled = False
        self._connected = False
        self._closed = False
        self._killed = False
        self._is_cut = False
        self._inboxes = itertools.count()
        self._context = _delivery_context()
        self.streams = MemoryStreams(broker.store, lambda: self._connected and not self._killed, broker.max_payload)
        self._add(self._replies.pattern, self._replies.deliver, "", 65536)

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    def on_connection_change(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    async def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        if self._closed:
            raise BusClosed
        check_subject(subject)
        if reply:
            check_subject(reply)
        check_size(data, headers, self.max_payload)
        message = BusMessage(subject=subject, data=bytes(data), reply=reply, headers=dict(headers) if headers else {})
        if self._killed:
            return
        if self._connected:
            self._broker._carry(self, message)
        elif self._outgoing_bytes + len(data) > self._max_pending_bytes:
            self.num_dropped += 1
        else:
            self._outgoing.append(message)
            self._outgoing_bytes += len(data)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        reply = self._replies.new_subject()
        future = self._replies.expect(reply)
        try:
            await self.publish(subject, data, reply=reply, headers=headers)
            return await self._replies.wait(reply, future, timeout_s, target=subject)
        finally:
            self._replies.forget(reply)

    async def has_listener(self, subject: str) -> bool | None:
        return bool(self._broker._route(check_subject(subject))) if self._connected else None

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65536
    ) -> MemorySubscription:
        if self._closed:
            raise BusClosed
        return self._add(subject, handler, queue, max_pending)

    def new_inbox(self) -> str:
        return f"{subjects.reply_prefix(self.name)}-inbox.{next(self._inboxes)}"

    async def register(self, service: ServiceInfo) -> None:
        """There are no NATS tools to answer here; `MemoryBroker.services` tells what was registered."""
        self.service = service

    async def flush(self) -> None:
        """:raises RequestTimeout: if the server stays away. :raises BusClosed: after close."""
        waited_s = 0.0
        while not self._connected:
            if self._closed:
                raise BusClosed
            if waited_s >= FLUSH_TIMEOUT_S:
                raise RequestTimeout("the bus is disconnected")
            await asyncio.sleep(0.01)
            waited_s += 0.01

    async def close(self) -> None:
        if self._closed:
            return
        self._broker._remove_bus(self)
        while self._arrived:
            self._deliver_some()
        self._closed = True
        self._connected = False

    def kill(self) -> None:
        """As after kill -9: nothing arrives, nothing is sent, and the dead process is told nothing."""
        self._killed = True
        self._arrived.clear()
        self._broker._remove_bus(self)

    def _add(self, subject: str, handler: Handler, queue: str, max_pending: int) -> MemorySubscription:
        subscription = MemorySubscription(self, subject, handler, queue, max_pending)
        self._subscriptions.append(subscription)
        if self._connected and not self._killed:
            self._broker._attach(subscription)
        return subscription

    def _forget(self, subscription: MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._broker._detach(self, subscription)

    def _set_connected(self, connected: bool) -> None:
        if self._killed or self._closed or connected == self._connected:
            return
        self._connected = connected
        if connected:
            for subscription in self._subscriptions:
                self._broker._attach(subscription)
            while self._outgoing:
                self._broker._carry(self, self._outgoing.popleft())
            self._outgoing_bytes = 0
            self._replies.interrupt()
        else:
            self._broker._detach(self)
            for subscription, _ in self._arrived:
                subscription.pending -= 1
            self._arrived.clear()
        for callback in self._callbacks:
            callback(connected)

    def _receive(self, subscription: MemorySubscription, message: BusMessage) -> None:
        if subscription.pending >= subscription.max_pending:
            self.num_dropped += 1
            log.warning("slow_consumer", bus=self.name, subject=subscription.subject, dropped=self.num_dropped)
            return
        subscription.pending += 1
        self._arrived.append((subscription, message))
        self._schedule_delivery()

    def _schedule_delivery(self) -> None:
        if not self._delivery_scheduled:
            self._delivery_scheduled = True
            asyncio.get_running_loop().call_soon(self._on_turn, context=self._context)

    def _on_turn(self) -> None:
        self._delivery_scheduled = False
        self._deliver_some()
        if self._arrived:
            self._schedule_delivery()

    def _deliver_some(self) -> None:
        """What has arrived by now; what the handlers cause to arrive waits for the next turn of the loop."""
        for _ in range(len(self._arrived)):
            if not self._arrived:  # a handler disconnected or killed this bus
                return
            subscription, message = self._arrived.popleft()
            if not subscription.active:
                subscription.pending -= 1
                continue
            self._broker.num_delivered += 1
            try:
                subscription.handler(message)
            except Exception:
                log.exception("bus_handler_failed", bus=self.name, subject=message.subject)
            finally:
                subscription.pending -= 1
