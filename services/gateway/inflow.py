"""Token frames on their way into the gateway: one slice of a step's message per turn of the event loop.

A step of a full decode worker brings hundreds of frames, and each wakes a stream that writes to a socket: milliseconds in
which nobody else would be heard. So first tokens go first, and the rest goes in slices, between which new requests and
other workers get their turn. Frames of one request stay in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel
import msgspec

from common.protocol.handles import WorkerRef
from common.protocol.messages import TokenFrame, TokenFrames, frame_units

SLICE_FRAMES = 8
"""About a quarter of a millisecond of work, the streams' writes included. A request passes the loop about ten times."""


class _Message(msgspec.Struct):
    worker: WorkerRef
    frames: deque[TokenFrame]
    number: int
    units: int
    arrived_at: float


class Inflow:
    """`take(message)` is called with each slice; `taken(worker, number, units, waited_s)` after the last one of a message."""

    def __init__(
        self,
        take: Callable[[TokenFrames], None],
        taken: Callable[[WorkerRef, int, int, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._take = take
        self._taken = taken
        self._clock = clock
        self._waiting: deque[_Message] = deque()
        self._arrived = anyio.Event()

    @property
    def lag_s(self) -> float:
        """How long the oldest frame has been waiting here."""
        return self._clock() - self._waiting[0].arrived_at if self._waiting else 0.0

    def put(self, message: TokenFrames) -> None:
        """A small message is taken at once, unless others wait."""
        units = sum(map(frame_units, message.frames))
        if not self._waiting and len(message.frames) <= SLICE_FRAMES:
            self._take(message)
            self._taken(message.worker, message.number, units, 0.0)
            return
        first, rest = [], deque[TokenFrame]()
        for frame in message.frames:
            if frame.start == 0:  # nothing of its request can be waiting
                first.append(frame)
            else:
                rest.append(frame)
        if first:
            self._take(TokenFrames(worker=message.worker, frames=first))
        self._waiting.append(_Message(message.worker, rest, message.number, units, self._clock()))
        self._arrived.set()

    def flush(self) -> None:
        """Take everything now: something else is about to be decided on what frames say."""
        while self._waiting:
            message = self._waiting.popleft()
            self._take(TokenFrames(worker=message.worker, frames=list(message.frames)))
            self._is_taken(message)

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _is_taken(self, message: _Message) -> None:
        self._taken(message.worker, message.number, message.units, self._clock() - message.arrived_at)

    async def run(self) -> None:
        """Take what waits, a slice per turn, for ever."""
        while True:
            self._arrived = anyio.Event()
            while self._waiting:
                message = self._waiting[0]
                frames = message.frames
                part = [frames.popleft() for _ in range(min(SLICE_FRAMES, len(frames)))]
                if not frames:
                    self._waiting.popleft()
                self._take(TokenFrames(worker=message.worker, frames=part))
                if not frames:
                    self._is_taken(message)
                await anyio.lowlevel.checkpoint()
            await self._arrived.wait()
