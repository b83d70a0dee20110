"""A TCP relay between NATS clients and their server that loses, delays and cuts at random.

    with relayed(nats_port, Faults(drop=0.05), seed=3) as relay:
        …  # clients of nats://127.0.0.1:{relay.port} reach the server through it

The stream is parsed into the frames of the NATS protocol, so that whole messages are lost and never parts of them. During a
partition nothing passes in either direction, and connections stay open; then it goes on where it was, or all connections are
cut. The same seed draws the same faults; which messages they meet depends on timing.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import anyio
import anyio.abc
from anyio.from_thread import start_blocking_portal

MESSAGES = (b"PUB", b"HPUB", b"MSG", b"HMSG")
"""Verbs of frames with a payload, whose size is the last word of their line."""
MAX_LINE_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16


class Faults(NamedTuple):
    """drop: chance of a message to be lost. delay: chance of a frame to wait up to `max_delay_s`, with all that come after it.

    open_s, closed_s: shortest and longest time between two partitions, and of one. cut: chance of a partition to end with
    cut connections.
    """

    drop: float = 0.0
    delay: float = 0.0
    max_delay_s: float = 0.0
    open_s: tuple[float, float] | None = None
    closed_s: tuple[float, float] = (0.0, 0.0)
    cut: float = 0.0


class Counts(NamedTuple):
    passed: int = 0
    dropped: int = 0
    delayed: int = 0
    partitions: int = 0
    cuts: int = 0


class FrameSplitter:
    """One direction of a connection."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are whole now.

        :raises ValueError: this is not the NATS protocol.
        """
        self._buffer += data
        frames: list[bytes] = []
        while (end := self._end()) is not None:
            frames.append(self._buffer[:end])
            self._buffer = self._buffer[end:]
        return frames

    def _end(self) -> int | None:
        line_end = self._buffer.find(b"\r\n")
        if line_end < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise ValueError("a line of the NATS protocol does not end")
            return None
        end = line_end + 2
        if is_message(self._buffer):
            end += int(self._buffer[:line_end].split()[-1]) + 2
        return end if len(self._buffer) >= end else None


def is_message(frame: bytes) -> bool:
    return frame.split(b" ", 1)[0].upper() in MESSAGES


def payload_of(frame: bytes) -> bytes:
    """Return what a message carries, without its headers."""
    line, _, rest = frame.partition(b"\r\n")
    words = line.split()
    header_bytes = int(words[-2]) if words[0].upper() in (b"HPUB", b"HMSG") else 0
    return rest[header_bytes:-2]


class Relay:
    """passed: called with each frame that has passed, in the relay's thread."""

    def __init__(self, target_port: int, faults: Faults, seed: int, passed: Callable[[bytes], None] | None = None) -> None:
        self.port = 0
        self._passed = passed
        self.counts = Counts()
        self._target_port = target_port
        self._faults = faults
        self._random = random.Random(seed)
        self._open = anyio.Event()
        self._open.set()
        self._connections: set[anyio.CancelScope] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        self.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, self._connected)
            if self._faults.open_s is not None:
                group.start_soon(self._part, self._faults.open_s)
            yield
            group.cancel_scope.cancel()

    async def _part(self, open_s: tuple[float, float]) -> None:
        while True:
            await anyio.sleep(self._random.uniform(*open_s))
            self._open = anyio.Event()
            self._count("partitions")
            await anyio.sleep(self._random.uniform(*self._faults.closed_s))
            if self._random.random() < self._faults.cut:
                self._count("cuts")
                for scope in list(self._connections):
                    scope.cancel()
            self._open.set()

    async def _connected(self, client: anyio.abc.SocketStream) -> None:
        async with client:
            await self._open.wait()
            try:
                server = await anyio.connect_tcp("127.0.0.1", self._target_port)
            except OSError:
                return
            async with server, anyio.create_task_group() as group:
                self._connections.add(group.cancel_scope)
                try:
                    group.start_soon(self._pump, client, server, group.cancel_scope)
                    await self._pump(server, client, group.cancel_scope)
                finally:
                    self._connections.discard(group.cancel_scope)

    async def _pump(self, source: anyio.abc.SocketStream, sink: anyio.abc.SocketStream, connection: anyio.CancelScope) -> None:
        frames = FrameSplitter()
        try:
            while True:
                for frame in frames.feed(await source.receive(_CHUNK_BYTES)):
                    await self._pass(frame, sink)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            connection.cancel()

    async def _pass(self, frame: bytes, sink: anyio.abc.SocketStream) -> None:
        if is_message(frame) and self._random.random() < self._faults.drop:
            self._count("dropped")
            return
        if self._random.random() < self._faults.delay:
            self._count("delayed")
            await anyio.sleep(self._random.uniform(0.0, self._faults.max_delay_s))
        await self._open.wait()
        await sink.send(frame)
        self._count("passed")
        if self._passed is not None:
            self._passed(frame)

    def _count(self, what: str) -> None:
        self.counts = self.counts._replace(**{what: getattr(self.counts, what) + 1})


@contextmanager
def relayed(target_port: int, faults: Faults, seed: int, passed: Callable[[bytes], None] | None = None) -> Iterator[Relay]:
    """Run a relay to a port of this machine, in a thread of its own."""

    async def make() -> Relay:
        return Relay(target_port, faults, seed, passed)

    with start_blocking_portal() as portal:
        relay = portal.call(make)
        with portal.wrap_async_context_manager(relay.running()):
            yield relay
