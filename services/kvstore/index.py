"""Which block hash lies in which slot of an arena, and who may touch it. Pure; knows slots, never bytes.

    free ─ reserve ─► writing ─ commit ─► readable ─ evict (a leaf, unleased, least recently used) ─► free
                         └ abandon ─► free     └ forget (damaged) ─► free when its last lease ends

A lookup finds readable slots only, so a writer that dies before its commit leaves nothing behind. A hash has one slot: what
somebody is writing is not granted to a second writer.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from common.protocol.messages import KvUsage
from services.kvstore.eviction import LeafLru


class _Slot(msgspec.Struct):
    block_hash: bytes = b""
    readable: bool = False
    forgotten: bool = False
    leases: int = 0
    checksum: int = 0


class BlockIndex:
    """Slots 0 … `num_slots` - 1 of one fingerprint."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evicted = 0
        self._slots: dict[int, _Slot] = {}  # those in use
        self._by_hash: dict[bytes, int] = {}
        self._free: list[int] = []  # given back
        self._num_touched = 0  # slots from here on were never used: an arena of tiny blocks may have a billion
        self._lru = LeafLru()
        self._num_writing = 0
        self._num_leased = 0

    @property
    def num_readable(self) -> int:
        return len(self._slots) - self._num_writing

    def usage(self) -> KvUsage:
        """Slots being written count as owned."""
        in_use = len(self._slots)
        return KvUsage(
            total=self.num_slots,
            free=self._num_free,
            owned=self._num_writing,
            leased=self._num_leased,
            cached=in_use - self._num_writing - self._num_leased,
        )

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Readable slots of the longest leading part of a chain, which count as used now. Lease them before anything else."""
        found = []
        for block_hash in hashes:
            slot = self._by_hash.get(block_hash)
            if slot is None or not self._slots[slot].readable:
                break
            found.append(slot)
        for slot in reversed(found):
            self._lru.use(self._slots[slot].block_hash)
        return found

    def checksums_of(self, slots: Sequence[int]) -> list[int]:
        return [self._slots[slot].checksum for slot in slots]

    def lease(self, slots: Sequence[int]) -> None:
        for slot in slots:
            entry = self._slots[slot]
            assert entry.readable, f"slot {slot} leased before it was committed"
            self._num_leased += not entry.leases
            entry.leases += 1
            self._lru.hold(entry.block_hash)

    def end_lease(self, slots: Sequence[int]) -> None:
        for slot in slots:
            entry = self._slots[slot]
            assert entry.leases > 0, f"the lease of slot {slot} ended more often than it was taken"
            entry.leases -= 1
            self._num_leased -= not entry.leases
            if not entry.forgotten:
                self._lru.let_go(entry.block_hash)
            elif not entry.leases:
                self._free_slot(slot)

    def reserve(self, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """(index into `hashes`, slot to write) for each hash of a chain that is neither stored nor being written.

        Evicts what it must, never the chain's own blocks. Ends early when no slot can be had: a tail is of no use without
        what comes before it.
        """
        known = [block_hash for block_hash in hashes if block_hash in self._by_hash]
        for block_hash in reversed(known):
            self._lru.use(block_hash)
            self._lru.hold(block_hash)
        granted = []
        for i, block_hash in enumerate(hashes):
            if block_hash in self._by_hash:
                continue
            slot = self._free_one()
            if slot is None:
                break
            self._slots[slot] = _Slot(block_hash)
            self._by_hash[block_hash] = slot
            self._lru.add(block_hash, hashes[i - 1] if i else b"")
            self._lru.hold(block_hash)
            self._num_writing += 1
            granted.append((i, slot))
        for block_hash in known:
            self._lru.let_go(block_hash)
        return granted

    def commit(self, slots: Sequence[int], checksums: Sequence[int]) -> None:
        """The writer is done: the slots may be read, and must then have these CRC-32."""
        for slot, checksum in zip(slots, checksums, strict=True):
            entry = self._slots[slot]
            assert not entry.readable, f"slot {slot} committed twice"
            entry.readable = True
            entry.checksum = checksum
            self._num_writing -= 1
            self._lru.let_go(entry.block_hash)

    def abandon(self, slots: Sequence[int]) -> None:
        """The writer is gone or gave up: nothing of it may be read."""
        for slot in reversed(slots):
            entry = self._slots[slot]
            assert not entry.readable, f"slot {slot} abandoned after its commit"
            self._num_writing -= 1
            self._unmap(entry)
            self._free_slot(slot)

    def forget(self, slots: Sequence[int], damaged: Container[bytes]) -> int:
        """Drop those of the leased `slots` whose hash is in `damaged`; returns how many. Free once their leases end."""
        forgotten = 0
        for slot in slots:
            entry = self._slots[slot]
            if entry.block_hash in damaged and not entry.forgotten:
                assert entry.leases, f"slot {slot} was read without a lease"
                self._unmap(entry)
                entry.forgotten = True
                forgotten += 1
        return forgotten

    def check(self) -> None:
        """Count everything again. :raises AssertionError: where a counter or an index is not what the slots say."""
        entries = self._slots.values()
        assert len(self._free) == len(set(self._free)) and not set(self._free) & set(self._slots), "a slot is free twice"
        assert self._num_free + len(self._slots) == self.num_slots, "slots leaked"
        assert all(slot < self._num_touched for slot in (*self._free, *self._slots)), "a slot was used before its time"
        assert self._num_writing == sum(not entry.readable for entry in entries)
        assert self._num_leased == sum(entry.leases > 0 for entry in entries)
        assert all(entry.readable or not entry.leases for entry in entries), "a slot is read while it is written"
        mapped = {entry.block_hash: slot for slot, entry in self._slots.items() if not entry.forgotten}
        assert mapped == self._by_hash, "a hash names the wrong slot"
        assert len(self._lru) == len(mapped), "the eviction order has other blocks than the index"

    @property
    def _num_free(self) -> int:
        return len(self._free) + self.num_slots - self._num_touched

    def _free_one(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._num_touched < self.num_slots:
            self._num_touched += 1
            return self._num_touched - 1
        return self._evict()

    def _evict(self) -> int | None:
        block_hash = self._lru.pop()
        if block_hash is None:
            return None
        self.evicted += 1
        slot = self._by_hash.pop(block_hash)
        del self._slots[slot]
        return slot

    def _unmap(self, entry: _Slot) -> None:
        del self._by_hash[entry.block_hash]
        self._lru.remove(entry.block_hash)

    def _free_slot(self, slot: int) -> None:
        del self._slots[slot]
        self._free.append(slot)
