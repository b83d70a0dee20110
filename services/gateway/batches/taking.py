"""Takes work from a queue for as long as the gateway runs, whatever happens to the server meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

import anyio

from common.protocol import subjects
from common.protocol.errors import BusError, PenstockError
from common.runtime import logs
from common.runtime.streams import Delivery, Streams, WorkQueue

log = logs.get("batches")

ACK_WAIT_S = 12.0
"""Work of a gateway that says nothing for so long is given to another one."""
WORKING_EVERY_S = 4.0
FETCH_WAIT_S = 2.0
RETRY_S = 1.0


class Taker:
    """Use as a context manager. `name` is what all gateways call the queue of what matches `pattern`."""

    def __init__(self, streams: Streams, name: str, pattern: str) -> None:
        self._streams = streams
        self._name = name
        self._pattern = pattern
        self._queue: WorkQueue | None = None

    async def __aenter__(self) -> Taker:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.move_on_after(1, shield=True):
            await self._close()

    async def take(self, count: int) -> list[Delivery]:
        """Up to `count`; empty if there was nothing for a while."""
        try:
            if self._queue is None:
                self._queue = await self._streams.queue(subjects.LINES, self._name, [self._pattern], ack_wait_s=ACK_WAIT_S)
            return await self._queue.fetch(count, FETCH_WAIT_S)
        except PenstockError as error:
            log.info("queue_lost", queue=self._name, reason=str(error))
            await self._close()
            await anyio.sleep(RETRY_S)
            return []

    async def _close(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            await quietly(queue.close)


async def quietly(ask: Callable[[], Awaitable[None]]) -> None:
    """For what costs a repetition when it is lost, and no result."""
    try:
        await ask()
    except BusError as error:
        log.debug("lost", reason=str(error))
