"""Listens in on the bus: when a probe's task reaches a worker, and when its first token leaves for the gateway.

What lies between is the engine's own time; the rest of a client's time to first token is the gateway's (and HTTP's). A
probe is known by its seed, which no layer changes. Also counts the messages that carry tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from common.protocol import messages, subjects
from common.protocol.messages import DecodeTask, PrefillTask, TokenFrames
from common.runtime.bus import Bus, BusMessage

PROBE_SEED = 1 << 40


@dataclass(slots=True)
class Trip:
    """One probe on the bus. `perf_counter` seconds; `first_frame_at` is 0 until the first token was seen."""

    task_at: float
    first_frame_at: float = 0.0
    first_token: int = -1


class Tap:
    def __init__(self) -> None:
        self.num_messages = 0
        self.num_bytes = 0
        self._by_seed: dict[int, Trip] = {}
        self._waiting: dict[bytes, Trip] = {}

    async def listen(self, bus: Bus, *, gateway: str, workers: Iterable[tuple[str, str]]) -> None:
        """`workers`: (role, id) of everyone who may be given a task."""
        await bus.subscribe(subjects.inbox("gateway", gateway), self._on_gateway)
        for role, worker in workers:
            await bus.subscribe(subjects.inbox(role, worker), self._on_worker)

    def take(self, seed: int) -> Trip | None:
        """What was seen of a probe; forgets it."""
        trip = self._by_seed.pop(seed, None)
        self._waiting = {request: waiting for request, waiting in self._waiting.items() if waiting is not trip}
        return trip

    def _on_worker(self, message: BusMessage) -> None:
        if not message.data:
            return
        now = time.perf_counter()
        decoded = messages.decode(message.data)
        if isinstance(decoded, PrefillTask | DecodeTask) and decoded.generation.sampling.seed >= PROBE_SEED:
            trip = self._by_seed[decoded.generation.sampling.seed] = Trip(now)
            self._waiting[decoded.generation.request.encode()] = trip

    def _on_gateway(self, message: BusMessage) -> None:
        self.num_messages += 1
        self.num_bytes += len(message.data)
        if not any(request in message.data for request in self._waiting):
            return
        now = time.perf_counter()
        decoded = messages.decode(message.data)
        if not isinstance(decoded, TokenFrames):
            return
        for frame in decoded.frames:
            if frame.tokens and frame.start == 0:
                trip = self._waiting.pop(frame.request.encode(), None)
                if trip is not None:
                    trip.first_frame_at, trip.first_token = now, frame.tokens[0]
