"""What an actor sends: an ordered, bounded queue that one task drains, so that sending never waits and never fails.

Each connection keeps the order in which messages were put here. When the bus can't keep up, the newest messages are
dropped and counted: every stream numbers its messages, and the receiver fetches again what it misses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel

from common.protocol.errors import PenstockError
from common.runtime import logs
from common.runtime.bus import Bus

log = logs.get(__name__)

BATCH = 256
"""Messages sent before others get a turn in the event loop: publishing itself need not wait for anything."""


class Outbox:
    """`on_dropped(n)` is called for messages that will never be sent."""

    def __init__(self, bus: Bus, *, max_messages: int = 65536, on_dropped: Callable[[int], None] = lambda _: None) -> None:
        self._bus = bus
        self._max_messages = max_messages
        self._on_dropped = on_dropped
        self._queue: deque[tuple[str, bytes] | anyio.Event] = deque()
        self._filled = anyio.Event()
        self._full_since_log = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, subject: str, data: bytes) -> None:
        if len(self._queue) >= self._max_messages:
            self._on_dropped(1)
            if self._full_since_log % 1000 == 0:
                log.warning("outbox_full", subject=subject, dropped=self._full_since_log + 1)
            self._full_since_log += 1
            return
        self._queue.append((subject, data))
        self._filled.set()

    def clear(self) -> None:
        """Drop everything not sent yet."""
        dropped = 0
        while self._queue:
            entry = self._queue.popleft()
            if isinstance(entry, anyio.Event):
                entry.set()
            else:
                dropped += 1
        if dropped:
            self._on_dropped(dropped)

    async def passed(self) -> None:
        """Returns once everything put before this call has been handed to the bus (or dropped)."""
        if self._queue:
            marker = anyio.Event()
            self._queue.append(marker)
            await marker.wait()

    async def run(self, before_send: Callable[[], None] = lambda: None) -> None:
        """Drain the queue for ever. `before_send` is called before each batch, and may clear the queue."""
        while True:
            if not self._queue:
                self._filled = anyio.Event()
                await self._filled.wait()
            before_send()
            await self.send_queued()

    async def send_queued(self) -> None:
        sent = 0
        while self._queue:
            entry = self._queue.popleft()
            if isinstance(entry, anyio.Event):
                entry.set()
                continue
            try:
                await self._bus.publish(*entry)
            except PenstockError as error:
                self._on_dropped(1)
                log.warning("message_dropped", subject=entry[0], reason=str(error))
            sent += 1
            if sent % BATCH == 0:
                await anyio.lowlevel.checkpoint()
        self._full_since_log = 0
