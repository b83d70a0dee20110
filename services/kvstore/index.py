"""Which block hash lies in which slot of an arena, and who may touch it. Pure; knows slots, never bytes.

    unused ─ grow ─► spare ─ reserve ─► writing ─ commit ─► readable ─ evict (an unleased leaf, see `eviction`) ─► spare
      ▲                │                   └ abandon ─► spare    └ forget (damaged) ─► spare when its last lease ends
      ├─── shrink ─────┤
      └► growing ──────┘    begin_growth, end_growth: a thread takes its memory meanwhile

A lookup finds readable slots only, so a writer that dies before its commit leaves nothing behind. A hash has one slot: what
somebody is writing is not granted to a second writer. Unused slots take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Set

import msgspec

from common.protocol.messages import KvUsage
from services.kvstore.eviction import LeafOrder, Rank


class _Slot(msgspec.Struct):
    block_hash: bytes = b""
    readable: bool = False
    forgotten: bool = False
    leases: int = 0
    checksum: int = 0


class BlockIndex:
    """Slots 0 … `num_slots` - 1 of one fingerprint.

    `make_room` is called when there is no spare slot for an owner's block: it calls `grow` or `evict`, or returns False. An
    index without one uses all its slots, then evicts. `order`: that of what is evicted.
    """

    def __init__(
        self, num_slots: int, *, make_room: Callable[[bytes], bool] | None = None, order: LeafOrder | None = None
    ) -> None:
        self.num_slots = num_slots
        self.order = LeafOrder() if order is None else order
        self.evicted = 0
        self._make_room = make_room or (lambda owner: self.grow() is not None or self.evict())
        self._slots: dict[int, _Slot] = {}  # those in use
        self._by_hash: dict[bytes, int] = {}
        self._spare: list[int] = []
        self._unused: list[int] = []  # that were spare once
        self._growing: set[int] = set()
        self._num_touched = 0  # slots from here on were never used: an arena of tiny blocks may have a billion
        self._num_writing = 0
        self._num_leased = 0

    @property
    def num_readable(self) -> int:
        return len(self._slots) - self._num_writing

    @property
    def num_spare(self) -> int:
        """Slots with memory that hold nothing."""
        return len(self._spare)

    @property
    def num_with_memory(self) -> int:
        return len(self._slots) + len(self._spare) + len(self._growing)

    @property
    def num_growing(self) -> int:
        """Slots whose memory is being taken."""
        return len(self._growing)

    @property
    def unused(self) -> list[int]:
        """Slots that had memory once and have none now."""
        return list(self._unused)

    def usage(self) -> KvUsage:
        """Slots being written count as owned; unused ones are free."""
        in_use = len(self._slots)
        return KvUsage(
            total=self.num_slots,
            free=self.num_slots - in_use,
            owned=self._num_writing,
            leased=self._num_leased,
            cached=in_use - self._num_writing - self._num_leased,
        )

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Readable slots of the longest leading part of a chain, which count as used now. Lease them before anything else."""
        found = []
        for block_hash in hashes:
            slot = self.find(block_hash)
            if slot is None:
                break
            found.append(slot)
        return self._used(found)

    def lookup_tail(self, hashes: Sequence[bytes], firsts: Sequence[int]) -> tuple[int, list[int]]:
        """Find the longest leading part of a chain of which all that is read is there: see `BlockLookup`.

        Return the index of the first hash that is read of it, and their slots as `lookup` does.
        """
        first, end = longest_tail(firsts, lambda index: self.find(hashes[index]) is not None)
        return first, self._used([self._by_hash[block_hash] for block_hash in hashes[first:end]])

    def find(self, block_hash: bytes) -> int | None:
        """Return the slot where a block is readable. It does not count as used."""
        slot = self._by_hash.get(block_hash)
        return slot if slot is not None and self._slots[slot].readable else None

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a block is readable or being written."""
        return block_hash in self._by_hash

    def _used(self, slots: list[int]) -> list[int]:
        self.order.use([self._slots[slot].block_hash for slot in reversed(slots)])
        return slots

    def hashes_of(self, slots: Sequence[int]) -> list[bytes]:
        return [self._slots[slot].block_hash for slot in slots]

    def checksums_of(self, slots: Sequence[int]) -> list[int]:
        return [self._slots[slot].checksum for slot in slots]

    def lease(self, slots: Sequence[int]) -> None:
        for slot in slots:
            entry = self._slots[slot]
            assert entry.readable, f"slot {slot} leased before it was committed"
            self._num_leased += not entry.leases
            entry.leases += 1
            self.order.hold(entry.block_hash)

    def end_lease(self, slots: Sequence[int]) -> None:
        for slot in slots:
            entry = self._slots[slot]
            assert entry.leases > 0, f"the lease of slot {slot} ended more often than it was taken"
            entry.leases -= 1
            self._num_leased -= not entry.leases
            if not entry.forgotten:
                self.order.let_go(entry.block_hash)
            elif not entry.leases:
                self._free_slot(slot)

    def reserve(
        self, hashes: Sequence[bytes], enough: Callable[[], bool] = lambda: False, owner: bytes = b""
    ) -> list[tuple[int, int]]:
        """(index into `hashes`, slot to write) for each hash of an owner's chain that is neither stored nor being written.

        Evicts what it must, never the chain's own blocks. Ends early when no slot can be had, since a tail is of no use without
        what comes before it, and after a slot when there are `enough`.
        """
        known = [block_hash for block_hash in hashes if block_hash in self._by_hash]
        for block_hash in reversed(known):
            self.order.touch(block_hash)
            self.order.hold(block_hash)
        granted = []
        for i, block_hash in enumerate(hashes):
            if block_hash in self._by_hash:
                continue
            slot = self._take_spare(owner)
            if slot is None:
                break
            self._slots[slot] = _Slot(block_hash)
            self._by_hash[block_hash] = slot
            self.order.add(block_hash, hashes[i - 1] if i else b"", owner, held=True)
            self._num_writing += 1
            granted.append((i, slot))
            if enough():
                break
        for block_hash in known:
            self.order.let_go(block_hash)
        return granted

    def commit(self, slots: Sequence[int], checksums: Sequence[int]) -> None:
        """The writer is done: the slots may be read, and must then have these CRC-32."""
        for slot, checksum in zip(slots, checksums, strict=True):
            entry = self._slots[slot]
            assert not entry.readable, f"slot {slot} committed twice"
            entry.readable = True
            entry.checksum = checksum
            self._num_writing -= 1
            self.order.let_go(entry.block_hash)

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

    def grow(self) -> int | None:
        """One more spare slot, which must have memory before the caller returns to the event loop. None: all are in use."""
        slot = self._take_unused()
        if slot is not None:
            self._spare.append(slot)
        return slot

    def begin_growth(self) -> int | None:
        """Return a slot that is nobody's until `end_growth`, so that it can get memory meanwhile. None: all are in use."""
        slot = self._take_unused()
        if slot is not None:
            self._growing.add(slot)
        return slot

    def end_growth(self, slot: int, *, has_memory: bool) -> None:
        """The slot is spare, the last to be reserved; or it got no memory and is unused."""
        self._growing.remove(slot)
        if has_memory:
            self._spare.insert(0, slot)
        else:
            self._unused.append(slot)

    def shrink(self) -> int | None:
        """One spare slot less: its memory goes back. None: there is no spare one."""
        if not self._spare:
            return None
        slot = self._spare.pop()
        self._unused.append(slot)
        return slot

    def keep(self, slot: int) -> None:
        """A slot that `shrink` gave keeps its memory after all: it is spare again, and the last that `shrink` gives."""
        self._unused.remove(slot)
        self._spare.insert(0, slot)

    def first(self, owners: Set[bytes] | None = None) -> Rank | None:
        """Return the rank of the block that `evict` would give up. None: there is none to give up."""
        return self.order.first(owners)

    def evict(self, owners: Set[bytes] | None = None) -> bool:
        """Give up the block of least worth, of these owners (None: of all), that nothing needs; its slot is spare. False: there
        is none."""
        block_hash = self.order.pop(owners)
        if block_hash is None:
            return False
        self.evicted += 1
        self._free_slot(self._by_hash.pop(block_hash))
        return True

    def check(self) -> None:
        """Count everything again. :raises AssertionError: where a counter or an index is not what the slots say."""
        entries = self._slots.values()
        known = [*self._spare, *self._unused, *self._growing, *self._slots]
        assert len(known) == len(set(known)), "a slot is in two states"
        assert sorted(known) == list(range(self._num_touched)), "slots leaked, or one was used before its time"
        assert self._num_touched <= self.num_slots
        assert self._num_writing == sum(not entry.readable for entry in entries)
        assert self._num_leased == sum(entry.leases > 0 for entry in entries)
        assert all(entry.readable or not entry.leases for entry in entries), "a slot is read while it is written"
        mapped = {entry.block_hash: slot for slot, entry in self._slots.items() if not entry.forgotten}
        assert mapped == self._by_hash, "a hash names the wrong slot"
        assert len(self.order) == len(mapped), "the eviction order has other blocks than the index"

    def _take_spare(self, owner: bytes) -> int | None:
        if not self._spare and not self._make_room(owner):
            return None
        return self._spare.pop()

    def _take_unused(self) -> int | None:
        if self._unused:
            return self._unused.pop()
        if self._num_touched >= self.num_slots:
            return None
        self._num_touched += 1
        return self._num_touched - 1

    def _unmap(self, entry: _Slot) -> None:
        del self._by_hash[entry.block_hash]
        self.order.remove(entry.block_hash)

    def _free_slot(self, slot: int) -> None:
        del self._slots[slot]
        self._spare.append(slot)


def longest_tail(firsts: Sequence[int], has: Callable[[int], bool]) -> tuple[int, int]:
    """Return the first and the end of what is read of the longest leading part of a chain of which all that is read is there.

    `firsts`: see `BlockLookup`. `has(i)`: whether block i is there. (0, 0): there is no such part.
    """
    end = len(firsts)
    while end:
        first = firsts[end - 1]
        missing = next((i for i in range(end - 1, first - 1, -1) if not has(i)), None)
        if missing is None:
            return first, end
        end = missing  # whatever ends behind a later block reads this one, too
    return 0, 0
