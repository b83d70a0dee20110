"""What survives everyone's restart, as the rest of Penstock sees it: numbered messages in streams that a server keeps.

    sequence = await streams.append(subject, data, expected_last=0)    kept once this returns; nobody else was first
    stored = await streams.last(stream, subject)                       the newest message of one subject
    queue = await streams.queue(stream, "name", subjects)              each message for one of those who share the name

`jetstream.py` implements it on NATS, `memory_streams.py` in memory. Everything here may be repeated after a `RequestTimeout`:
with `expected_last` the second attempt meets what the first one left, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A stream and its bounds: what would go beyond `max_bytes` is refused, and messages go after `max_age_s`.

    `latest_only`: a subject keeps its newest message alone. `is_queue`: messages go as they are acked.
    """

    name: str
    subjects: Sequence[str]
    max_bytes: int
    max_age_s: float
    latest_only: bool = False
    is_queue: bool = False
    replicas: int = 1


class Stored(msgspec.Struct, frozen=True):
    """A message in a stream. `sequence` numbers the messages of a stream from 1."""

    subject: str
    data: bytes
    sequence: int
    headers: Mapping[str, str] = {}


class Delivery(Protocol):
    """A message that is this process's to work on, until it acks it, gives it back, or is silent for `ack_wait_s`."""

    @property
    def message(self) -> Stored: ...

    @property
    def num_deliveries(self) -> int:
        """How often it was delivered so far, to whomever; 1 the first time."""
        ...

    async def ack(self) -> None:
        """It is done, and is never delivered again unless the server loses this."""
        ...

    async def working(self) -> None:
        """It takes longer: the wait begins anew."""
        ...

    async def give_back(self, delay_s: float = 0.0) -> None:
        """Somebody may have it, after a while."""
        ...


class WorkQueue(Protocol):
    async def fetch(self, count: int, wait_s: float) -> list[Delivery]:
        """Up to `count` messages that are there now, or the first that comes within `wait_s`. Empty: none did, or the server
        was away. One call at a time.

        :raises RequestTimeout: the queue is gone: ask `Streams.queue` for it again.
        """
        ...

    async def close(self) -> None:
        """Take no more. What was fetched stays this process's."""
        ...


class Streams(Protocol):
    """Every method raises RequestTimeout when the server does not answer in time, and JetStreamOff where it keeps nothing."""

    async def available(self) -> bool:
        """Whether the server keeps streams, and this process may use them."""
        ...

    async def ensure(self, spec: StreamSpec) -> None:
        """Make the stream, or give the one that is there these bounds.

        :raises StorageFull: the server has no room for one with these bounds.
        """
        ...

    async def append(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, expected_last: int | None = None
    ) -> int:
        """Keep a message; returns its sequence. `expected_last`: of the newest message of this subject, 0 for none.

        :raises StreamConflict: the newest one is another; nothing is kept then. :raises StorageFull: nothing is kept then.
        :raises PayloadTooLarge: before anything is sent.
        """
        ...

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message of a subject."""
        ...

    async def read(self, stream: str, subjects: str, *, after: int = 0, limit: int = 256) -> list[Stored]:
        """The oldest messages that match behind sequence `after`. Fewer than `limit` may come, but none only if there are
        none."""
        ...

    async def purge(self, stream: str, subjects: str) -> int:
        """Remove every message that matches; returns how many there were."""
        ...

    async def queue(self, stream: str, name: str, subjects: Sequence[str], *, ack_wait_s: float = 30.0) -> WorkQueue:
        """Share the messages that match with all who use the same `name`."""
        ...
