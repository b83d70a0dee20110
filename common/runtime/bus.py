"""The bus as the rest of Penstock sees it. `nats_bus.py` and `memory_bus.py` implement it; nothing else knows which.

Delivery is at most once, ordered per publisher and subject. Whoever needs more numbers its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from common.runtime.streams import Streams


class BusMessage(msgspec.Struct, frozen=True):
    """One delivered message. `reply` is the subject to answer on, empty when none is asked for."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = {}


Handler = Callable[[BusMessage], None]
"""Called in the event loop for each message, in order. It must not block and must not raise: hand off to a mailbox."""


class Subscription(Protocol):
    @property
    def num_waiting(self) -> int:
        """Messages that have arrived and whose handler has not returned yet."""
        ...

    async def unsubscribe(self) -> None: ...


class Endpoint(msgspec.Struct, kw_only=True):
    """A public subject that a service listens to, and what came there so far.

    `queue`: its queue group, empty where every listener gets each message. `last_error`: an error's code.
    """

    name: str
    subject: str
    queue: str = ""
    num_requests: int = 0
    num_errors: int = 0
    processing_ns: int = 0
    last_error: str = ""


class ServiceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `$SRV.PING/INFO/STATS` tell of a service, beside its inbox. `stats` is called for each STATS, `endpoints` for each
    INFO and STATS."""

    name: str
    version: str
    description: str = ""
    metadata: dict[str, str] = {}
    stats: Callable[[], dict[str, Any]] | None = None
    endpoints: Callable[[], Sequence[Endpoint]] | None = None


class Bus(Protocol):
    """A connection. Every method may be called from the event loop's thread only. `tenant`: whose requests it sends; empty:
    nobody's in particular."""

    tenant: str

    @property
    def connected(self) -> bool:
        """False while the server is away. Publishing goes on into a bounded buffer."""
        ...

    @property
    def max_payload(self) -> int:
        """Bytes; a larger publish raises before anything is sent."""
        ...

    @property
    def streams(self) -> Streams:
        """What the server keeps, where it does."""
        ...

    def on_connection_change(self, callback: Callable[[bool], None]) -> None:
        """`callback(connected)` after each loss and each return of the server."""
        ...

    async def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        """:raises PayloadTooLarge, InvalidParameter: too much, or no subject or header; before anything is sent.
        :raises BusClosed: after close."""
        ...

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        """Publish with a reply inbox and wait for one answer.

        :raises NoResponders: nobody subscribes: the process is gone. :raises RequestTimeout: nobody answered in time, or
            the server came back from being away, and the question or its answer may be lost.
        :raises PayloadTooLarge: before anything is sent. :raises BusClosed: after close.
        """
        ...

    async def has_listener(self, subject: str) -> bool | None:
        """Whether somebody would get what is published to `subject` now; nobody gets anything. None: the server can't tell."""
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65536) -> Subscription:
        """Returns once the server knows of the subscription."""
        ...

    def new_inbox(self) -> str: ...

    async def register(self, service: ServiceInfo) -> None:
        """Answer the NATS micro framework's `$SRV.PING/INFO/STATS` for this process."""
        ...

    async def flush(self) -> None:
        """Returns once the server has everything published so far."""
        ...

    async def close(self) -> None:
        """Drain: deliver what has arrived, send what is buffered, then disconnect. Harmless twice."""
        ...
