"""The memory of one fingerprint: a shared-memory segment, and the index of what lies in it.

Workers of the host copy blocks in and out of the segment themselves; the store only says where. A slot's generation is
raised before it is granted to a writer and before it loses its memory, so that who still reads it under an old lease notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from common.protocol.errors import InvalidParameter
from common.runtime import logs
from common.transfer.segment import Segment
from common.transfer.store_segment import slot_bytes
from services.kvstore.eviction import EvictionClock, LeafOrder
from services.kvstore.index import BlockIndex
from services.kvstore.owners import Owners

log = logs.get("kvstore")

MAX_BLOCK_BYTES = 1 << 32
MAX_GROWTH_S = 0.01
"""Memory is taken for so long for one question, at 0.5 to 5 GB/s; the store answers nobody else meanwhile. What `Growth` has
taken before costs nothing."""


class Arena:
    """Slots for blocks of `block_bytes` each, as many as `capacity_bytes` could hold. Each gets memory by `grow`, and gives it
    back by `shrink`. `make_room`: see `BlockIndex`. `clock`, `owners`: what orders and counts blocks of all arenas."""

    def __init__(
        self,
        directory: str,
        name: str,
        *,
        fingerprint: str,
        block_bytes: int,
        capacity_bytes: int,
        make_room: Callable[[Arena, bytes], bool],
        clock: EvictionClock,
        owners: Owners[bytes],
        now: float,
    ) -> None:
        """:raises InvalidParameter: no block fits. :raises ConfigError: the directory has no room for the segment."""
        if not 0 < block_bytes <= min(capacity_bytes, MAX_BLOCK_BYTES) or slot_bytes(block_bytes) > capacity_bytes:
            raise InvalidParameter(f"blocks of {block_bytes} bytes don't fit {capacity_bytes >> 20} MiB: raise capacity_mb")
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes(block_bytes)
        self.used_at = now
        num_slots = capacity_bytes // self.slot_bytes
        self.segment = Segment.create(
            directory, name, num_blocks=num_slots, block_bytes=self.slot_bytes, fingerprint=fingerprint, sparse=True
        )
        self._table_bytes = self.segment.memory_bytes
        order = LeafOrder(clock, owners, self.slot_bytes)
        self.index = BlockIndex(num_slots, make_room=lambda owner: make_room(self, owner), order=order)

    @property
    def memory_bytes(self) -> int:
        """Memory of all slots that have some."""
        return self.index.num_with_memory * self.slot_bytes

    @property
    def stored_bytes(self) -> int:
        return self.index.num_readable * self.slot_bytes

    @property
    def is_idle(self) -> bool:
        """Nobody reads or writes here."""
        usage = self.index.usage()
        return not usage.owned and not usage.leased and not self.index.num_growing

    def reserve(self, hashes: Sequence[bytes], owner: bytes = b"") -> list[tuple[int, int]]:
        """See `BlockIndex.reserve`; the slots have new generations. It ends early when the arena has taken memory
        for `MAX_GROWTH_S`."""
        before, end = self.memory_bytes, time.perf_counter() + MAX_GROWTH_S
        granted = self.index.reserve(hashes, lambda: self.memory_bytes > before and time.perf_counter() >= end, owner)
        for _, slot in granted:
            self.segment.generations[slot] += 1
        return granted

    def generations_of(self, slots: Sequence[int]) -> list[int]:
        return self.segment.generations[np.array(slots, np.int64)].tolist()

    def grow(self) -> bool:
        """One more spare slot. False: the arena is as large as it can be. :raises ConfigError: there is no memory."""
        slot = self.index.grow()
        if slot is None:
            return False
        try:
            self.segment.back(slot)
        except BaseException:
            self.index.shrink()
            raise
        return True

    def shrink(self) -> bool:
        """One spare slot less, whose memory goes back to the system. False: there is none, or the system can't take it, or a
        worker still copies it, whose lease has ended."""
        slot = self.index.shrink()
        if slot is None:
            return False
        self.segment.generations[slot] += 1
        try:
            self.segment.unback(slot)
        except BlockingIOError:
            self.index.keep(slot)
            self.segment.progress[0] += 1  # who has it pinned lets go (`segment_pins`)
            return False
        except OSError as error:
            self.index.keep(slot)
            log.warning("memory_not_given_back", segment=self.segment.name, reason=error.strerror)
            return False
        return True

    def reclaim(self) -> int:
        """Take back memory that slots without any got from a writer that outlived its grant; returns how many bytes."""
        before = self.segment.memory_bytes
        if before <= self._table_bytes + self.memory_bytes:
            return 0
        for slot in self.index.unused:
            with suppress(BlockingIOError):  # next time
                self.segment.unback(slot)
        return before - self.segment.memory_bytes

    def close(self) -> None:
        self.index.order.close()
        self.segment.close()
