"""Takes memory for blocks before it is needed, in a thread, while others are served.

    an offer was granted ─► as long as nobody has all of the capacity: the arena gets spare slots, up to `AHEAD_BYTES` of them

Memory costs 0.4 s for each GiB: to find it, and to zero it. While an offer waits for that, the store answers nobody else, and
later its worker's threads zero pages instead of copying. Only stores with much memory take it ahead, as where GPUs are. Where
there is no capacity left, or no memory, offers get the memory of blocks that are evicted, and nothing happens here.
"""

from __future__ import annotations

import anyio
import anyio.to_thread

from common.protocol.errors import ConfigError
from common.runtime import logs
from services.kvstore.arena import Arena
from services.kvstore.arenas import Arenas

log = logs.get("kvstore")

AHEAD_BYTES = 1 << 30
MIN_CAPACITY_BYTES = 8 << 30
"""A store of less takes no memory before it is needed: it would be a large part."""
STEP_BYTES = 64 << 20
"""Taken in one call of a thread: some 30 ms."""


class Growth:
    """Of the arena that was granted to last."""

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._arena: Arena | None = None
        self._wake = anyio.Event()
        self._zeros = b""

    def granted(self, arena: Arena) -> None:
        """Blocks of this arena were granted."""
        if self._arenas.capacity_bytes >= MIN_CAPACITY_BYTES:
            self._arena = arena
            self._wake.set()

    async def run(self) -> None:
        """Take memory whenever some was granted, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            while self._arena is not None and await self._step(self._arena):
                pass

    async def _step(self, arena: Arena) -> bool:
        """Whether the arena has some more spare slots now."""
        if self._arenas.get(arena.fingerprint) is not arena:
            return False
        room = min(AHEAD_BYTES - arena.index.num_spare * arena.slot_bytes, self._arenas.free_bytes, STEP_BYTES)
        slots = [slot for _ in range(room // arena.slot_bytes) if (slot := arena.index.begin_growth()) is not None]
        if not slots:
            return False
        filled: list[int] = []
        try:
            error = await anyio.to_thread.run_sync(self._fill, arena, slots, filled)
        finally:
            for slot in slots:
                arena.index.end_growth(slot, has_memory=slot in filled)
        if error is not None:
            self._arenas.limit(error)
        return error is None

    def _fill(self, arena: Arena, slots: list[int], filled: list[int]) -> Exception | None:
        """In a thread. Return why there is no memory for the slots that are not in `filled`; None: they all have some."""
        if len(self._zeros) < arena.slot_bytes:
            self._zeros = bytes(arena.slot_bytes)
        for slot in slots:
            try:
                arena.segment.fill(slot, memoryview(self._zeros)[: arena.slot_bytes])
            except (ConfigError, OSError) as error:
                return error
            filled.append(slot)
        return None
