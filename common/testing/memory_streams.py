"""Streams inside one process, for tests on the memory bus: what is kept outlives every bus, also `broker.stop()`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import anyio
import msgspec

from common.protocol.errors import JetStreamOff, RequestTimeout, StorageFull, StreamConflict
from common.runtime.routing import check_size, check_subject, matches
from common.runtime.streams import Delivery, Stored, StreamSpec

POLL_S = 0.005


class _Consumer:
    """`held`: until when each message that was delivered is its receiver's. `counts`: how often each was delivered."""

    def __init__(self, filters: Sequence[str], ack_wait_s: float) -> None:
        self.filters = [subject.split(".") for subject in filters]
        self.ack_wait_s = ack_wait_s
        self.held: dict[int, float] = {}
        self.counts: dict[int, int] = {}


class _Stream:
    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.patterns = [subject.split(".") for subject in spec.subjects]
        self.messages: dict[int, Stored] = {}
        self.sequence = 0
        self.consumers: dict[str, _Consumer] = {}

    def last(self, subject: str) -> Stored | None:
        return next((stored for stored in reversed(self.messages.values()) if stored.subject == subject), None)

    def matching(self, subjects: str) -> list[Stored]:
        pattern = subjects.split(".")
        return [stored for stored in self.messages.values() if matches(pattern, stored.subject.split("."))]

    @property
    def num_bytes(self) -> int:
        return sum(len(stored.data) for stored in self.messages.values())


class MemoryStore:
    """What the server keeps. `enabled`: whether it has streams at all."""

    def __init__(self) -> None:
        self.enabled = False
        self.streams: dict[str, _Stream] = {}

    def taking(self, subject: str) -> _Stream | None:
        tokens = subject.split(".")
        return next(
            (found for found in self.streams.values() if any(matches(pattern, tokens) for pattern in found.patterns)), None
        )


class MemoryStreams:
    """`Streams` as one connection has them; `connected` says whether it can reach the server now."""

    def __init__(self, store: MemoryStore, connected: Callable[[], bool], max_payload: int) -> None:
        self._store = store
        self._connected = connected
        self._max_payload = max_payload

    async def available(self) -> bool:
        return self._store.enabled and self._connected()

    async def ensure(self, spec: StreamSpec) -> None:
        await self._reach()
        known = self._store.streams.get(spec.name)
        if known is None:
            self._store.streams[spec.name] = _Stream(spec)
        else:
            known.spec = spec

    async def append(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, expected_last: int | None = None
    ) -> int:
        check_size(data, headers, self._max_payload)
        await self._reach()
        stream = self._store.taking(check_subject(subject))
        if stream is None:
            raise RequestTimeout(f"no stream takes {subject}")
        last = stream.last(subject)
        if expected_last is not None and expected_last != (0 if last is None else last.sequence):
            raise StreamConflict(f"wrong last sequence: {0 if last is None else last.sequence}")
        if stream.num_bytes + len(data) > stream.spec.max_bytes:
            raise StorageFull("the space for files and batches is full: delete files, or try again later")
        if stream.spec.latest_only and last is not None:
            del stream.messages[last.sequence]
        stream.sequence += 1
        stream.messages[stream.sequence] = Stored(subject, bytes(data), stream.sequence, dict(headers or {}))
        return stream.sequence

    async def last(self, stream: str, subject: str) -> Stored | None:
        await self._reach()
        return self._stream(stream).last(subject)

    async def read(self, stream: str, subjects: str, *, after: int = 0, limit: int = 256) -> list[Stored]:
        await self._reach()
        return [stored for stored in self._stream(stream).matching(subjects) if stored.sequence > after][:limit]

    async def purge(self, stream: str, subjects: str) -> int:
        await self._reach()
        found = self._stream(stream)
        gone = found.matching(subjects)
        for stored in gone:
            del found.messages[stored.sequence]
        return len(gone)

    async def queue(self, stream: str, name: str, subjects: Sequence[str], *, ack_wait_s: float = 30.0) -> MemoryQueue:
        await self._reach()
        found = self._stream(stream)
        consumer = found.consumers.setdefault(name, _Consumer(subjects, ack_wait_s))
        return MemoryQueue(found, consumer, self._connected)

    def _stream(self, name: str) -> _Stream:
        if name not in self._store.streams:
            raise RequestTimeout(f"the stream {name} does not answer")
        return self._store.streams[name]

    async def _reach(self) -> None:
        await anyio.lowlevel.checkpoint()
        if not self._connected():
            raise RequestTimeout("the bus is disconnected")
        if not self._store.enabled:
            raise JetStreamOff("files and batches need a NATS server with JetStream")


class MemoryQueue:
    """See `WorkQueue`."""

    def __init__(self, stream: _Stream, consumer: _Consumer, connected: Callable[[], bool]) -> None:
        self._stream = stream
        self._consumer = consumer
        self._connected = connected
        self._closed = False

    async def fetch(self, count: int, wait_s: float) -> list[Delivery]:
        ends_at = time.monotonic() + wait_s
        while True:
            await anyio.lowlevel.checkpoint()
            found = self._take(count) if self._connected() and not self._closed else []
            if found or time.monotonic() >= ends_at:
                return found
            await anyio.sleep(POLL_S)

    async def close(self) -> None:
        self._closed = True

    def _take(self, count: int) -> list[Delivery]:
        consumer, now = self._consumer, time.monotonic()
        found: list[Delivery] = []
        for sequence, stored in self._stream.messages.items():
            if len(found) >= count:
                break
            tokens = stored.subject.split(".")
            if consumer.held.get(sequence, 0.0) > now or not any(matches(each, tokens) for each in consumer.filters):
                continue
            consumer.held[sequence] = now + consumer.ack_wait_s
            consumer.counts[sequence] = consumer.counts.get(sequence, 0) + 1
            found.append(MemoryDelivery(self._stream, consumer, stored, consumer.counts[sequence], self._connected))
        return found


class MemoryDelivery(msgspec.Struct, frozen=True):
    """See `Delivery`."""

    stream: _Stream
    consumer: _Consumer
    message: Stored
    num_deliveries: int
    connected: Callable[[], bool]

    async def ack(self) -> None:
        if self.connected():
            self.stream.messages.pop(self.message.sequence, None)

    async def working(self) -> None:
        if self.connected():
            self.consumer.held[self.message.sequence] = time.monotonic() + self.consumer.ack_wait_s

    async def give_back(self, delay_s: float = 0.0) -> None:
        if self.connected():
            self.consumer.held[self.message.sequence] = time.monotonic() + delay_s
