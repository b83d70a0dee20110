"""Which KV block lies in which slot of which file on disk, and which gives way when the quota is reached. Pure: no I/O.

    free ─ reserve ─► writing ─ commit ─► readable ─ evict, forget ─► to clear ─ cleared ─► free
      ▲                  └ abandon ─► free                               └ reserve, by the same file ─► writing
      └───────────────────────────────────────────────────────────────────┘

Each fingerprint has a file with slots of its own size. All files share one quota and one clock. What gives way is chosen in two
steps: first whose block, then which. A model that was used lately loses nothing to others while it has less than an equal share
of the quota, and so it is with tenants, by their weights (`owners.py`). Among what is left the block of least worth goes
(`eviction.py`): a prefix that many requests shared outlives prompts that came once.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from common.cache.prefix import OWNER_BYTES
from services.kvstore.eviction import EvictionClock, LeafOrder, Rank
from services.kvstore.owners import Owners

_RECORD = struct.Struct(f"<QIdQB{OWNER_BYTES}s")  # slot, checksum, rank, hits, owner; the parent's hash follows


class DiskBlock(msgspec.Struct):
    """A block on disk. `checksum`: CRC-32 of its bytes."""

    slot: int
    checksum: int
    readable: bool = False


class DiskFile:
    """The blocks of one fingerprint. `identity`: 16 bytes that name what may be found here; see `disk_folder.identity_of`."""

    def __init__(
        self, fingerprint: str, identity: bytes, block_bytes: int, slot_bytes: int, clock: EvictionClock, owners: Owners[bytes]
    ) -> None:
        self.fingerprint = fingerprint
        self.identity = identity
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes
        self.blocks: dict[bytes, DiskBlock] = {}
        self.order = LeafOrder(clock, owners, slot_bytes)
        self.to_clear: list[int] = []
        """Slots whose disk space is to be given back before anything else is written there."""
        self.free: list[int] = []
        self.num_touched = 0

    @property
    def model(self) -> str:
        """The fingerprint without the number of the cache group."""
        return self.fingerprint.partition("-")[0]

    @property
    def used_bytes(self) -> int:
        return len(self.blocks) * self.slot_bytes

    def find(self, block_hash: bytes) -> DiskBlock | None:
        """Return a readable block."""
        block = self.blocks.get(block_hash)
        return block if block is not None and block.readable else None

    def take_slot(self) -> int:
        if self.to_clear:
            return self.to_clear.pop()
        if self.free:
            return heapq.heappop(self.free)
        self.num_touched += 1
        return self.num_touched - 1


class DiskIndex:
    """The files of one folder. `capacity_bytes`: of all blocks together. `clock`: seconds, for `active_s`: how long after its
    last use a model or a tenant keeps its share. `weights`: of tenants, see `Owners`."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        clock: Callable[[], float],
        active_s: float,
        weights: dict[bytes, float] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = capacity_bytes
        self.files: dict[str, DiskFile] = {}
        self.used_bytes = 0
        self.num_blocks = 0  # readable ones
        self.evicted = 0
        self._uses = EvictionClock()
        self._owners: Owners[bytes] = Owners(clock, active_s, weights)
        self._models: Owners[str] = Owners(clock, active_s)
        self._changed: set[tuple[str, bytes]] = set()

    def file(self, fingerprint: str, identity: bytes, block_bytes: int, slot_bytes: int) -> DiskFile | None:
        """Return the file of a fingerprint, a new one where there is none; None if that has blocks of another size."""
        file = self.files.get(fingerprint)
        if file is None:
            file = self.files[fingerprint] = DiskFile(fingerprint, identity, block_bytes, slot_bytes, self._uses, self._owners)
        return file if file.block_bytes == block_bytes else None

    # -- what is found

    def use(self, file: DiskFile, block_hash: bytes) -> None:
        """A lookup found this block, here or in memory. Nothing happens where it is not on disk."""
        block = file.find(block_hash)
        if block is None:
            return
        file.order.use([block_hash])
        self._models.use(file.model)
        self._changed.add((file.fingerprint, block_hash))

    # -- writing

    def reserve(self, file: DiskFile, block_hash: bytes, parent: bytes, checksum: int, owner: bytes = b"") -> DiskBlock | None:
        """Return the place for a new block of an owner's, which is not to be evicted until `commit` or `abandon`. None: it is
        there already, or nothing can give way for it."""
        if block_hash in file.blocks:
            return None
        self._models.use(file.model)
        if parent in file.blocks:
            file.order.hold(parent)
        try:
            while self.used_bytes + file.slot_bytes > self.limit_bytes:
                if not self._evict(file, owner):
                    return None
        finally:
            if parent in file.blocks:
                file.order.let_go(parent)
        block = file.blocks[block_hash] = DiskBlock(file.take_slot(), checksum)
        self._take(file)
        file.order.add(block_hash, parent, owner)
        file.order.hold(block_hash)
        return block

    def commit(self, file: DiskFile, block_hash: bytes) -> None:
        """The block is written, and may be found."""
        block = file.blocks[block_hash]
        assert not block.readable, "a block was committed twice"
        block.readable = True
        self.num_blocks += 1
        file.order.let_go(block_hash)
        self._changed.add((file.fingerprint, block_hash))

    def abandon(self, file: DiskFile, block_hash: bytes) -> None:
        """The block could not be written."""
        assert not file.blocks[block_hash].readable, "a block was abandoned after its commit"
        self._remove(file, block_hash)
        file.order.remove(block_hash)

    def forget(self, file: DiskFile, block_hash: bytes) -> None:
        """The block can't be read, or is not what it should be. Harmless if it is gone."""
        if file.find(block_hash) is not None:
            self._remove(file, block_hash)
            file.order.remove(block_hash)

    def cleared(self, file: DiskFile, slots: list[int]) -> None:
        """These slots of `to_clear`, which the caller took out of it, have given their space back."""
        for slot in slots:
            heapq.heappush(file.free, slot)

    # -- what is kept over restarts

    def restore(self, file: DiskFile, records: Mapping[bytes, bytes], num_slots: int) -> int:
        """Take over the records of an earlier run, by hash, of slots 0 … `num_slots` - 1, which the file has; return how many
        were of no use: damaged, of another slot, or of one slot twice."""
        found: list[tuple[bytes, _Record]] = []
        slots: set[int] = set()
        for block_hash, record in records.items():
            decoded = _decode(record)
            if decoded is None or decoded.slot >= num_slots or decoded.slot in slots:
                self._changed.add((file.fingerprint, block_hash))
                continue
            slots.add(decoded.slot)
            found.append((block_hash, decoded))
        for block_hash, record in sorted(found, key=lambda entry: entry[1].rank):
            file.blocks[block_hash] = DiskBlock(record.slot, record.checksum, True)
            file.order.add(block_hash, record.parent, record.owner, hits=record.hits, worth=record.rank.worth)
            self._take(file)
            self._owners.use(record.owner)  # nobody could ask meanwhile
        if found:  # what comes now is worth more than what would have gone next
            self._uses.level = max(self._uses.level, min(record.rank.worth for _, record in found))
        self.num_blocks += len(found)
        file.num_touched = max(slots, default=-1) + 1
        file.free = [slot for slot in range(file.num_touched) if slot not in slots]
        return len(records) - len(found)

    def take_changes(self) -> dict[tuple[str, bytes], bytes | None]:
        """Return the records that changed since the last call, by fingerprint and hash; None: it is gone."""
        changed, self._changed = self._changed, set()
        changes: dict[tuple[str, bytes], bytes | None] = {}
        for fingerprint, block_hash in changed:
            file = self.files[fingerprint]
            block = file.find(block_hash)
            changes[fingerprint, block_hash] = None if block is None else _encode(block, file.order, block_hash)
        return changes

    def put_back(self, changes: Mapping[tuple[str, bytes], bytes | None]) -> None:
        """These could not be kept; `take_changes` returns them again, as they are then."""
        self._changed.update(changes)

    def take_empty(self) -> list[DiskFile]:
        """Remove and return the files that hold nothing, but for those of models in use."""
        empty = [file for file in self.files.values() if not file.blocks and not self._models.is_active(file.model)]
        for file in empty:
            file.order.close()
            del self.files[file.fingerprint]
        self._changed = {(fingerprint, block_hash) for fingerprint, block_hash in self._changed if fingerprint in self.files}
        return empty

    def shrink_to_limit(self) -> None:
        """Evict until the limit holds: the quota may be smaller than in the run before."""
        while self.used_bytes > self.limit_bytes and self._evict(None, None):
            pass

    def check(self) -> None:
        """Count everything again. :raises AssertionError: where a counter is not what the blocks say."""
        assert self.used_bytes == sum(file.used_bytes for file in self.files.values())
        blocks = [block for file in self.files.values() for block in file.blocks.values()]
        assert self.num_blocks == sum(block.readable for block in blocks)
        for file in self.files.values():
            known = [*(block.slot for block in file.blocks.values()), *file.free, *file.to_clear]
            assert len(known) == len(set(known)), "a slot is in two states"
            assert set(known) <= set(range(file.num_touched))
            assert len(file.order) == len(file.blocks)

    # -- eviction

    def _evict(self, asking: DiskFile | None, owner: bytes | None) -> bool:
        """Give up one block for `owner` in `asking`, or for the limit. False: nothing can be given up."""
        file, owners = self._victim(asking, owner)
        if file is None:
            return False
        block_hash = file.order.pop(owners)
        assert block_hash is not None
        self._remove(file, block_hash)
        self.evicted += 1
        return True

    def _victim(self, asking: DiskFile | None, owner: bytes | None) -> tuple[DiskFile | None, Set[bytes] | None]:
        """Return whose block goes: a file of a model, and owners, that have more than their shares, or have not been used for
        long; where there are none, any (of owners: None)."""
        size = 0 if asking is None else asking.slot_bytes
        models = self._models.first_to_go(self.limit_bytes, None if asking is None else asking.model, size)
        first = self._owners.first_to_go(self.limit_bytes, owner, size)
        files = [file for file in self.files.values() if file.order.first() is not None]
        open_to = [file for file in files if models is None or file.model in models] or files
        for owners in (first, None):
            ranks: Sequence[tuple[Rank, DiskFile]]
            ranks = [(rank, file) for file in open_to if (rank := file.order.first(owners)) is not None]
            if ranks:
                return min(ranks, key=lambda candidate: candidate[0])[1], owners
        return None, None

    def _take(self, file: DiskFile) -> None:
        """Count a block more; `_remove` counts one less."""
        self.used_bytes += file.slot_bytes
        self._models.take(file.model, file.slot_bytes)

    def _remove(self, file: DiskFile, block_hash: bytes) -> None:
        """Forget the block everywhere but in the file's eviction order."""
        block = file.blocks.pop(block_hash)
        self.used_bytes -= file.slot_bytes
        self._models.give(file.model, file.slot_bytes)
        self.num_blocks -= block.readable
        file.to_clear.append(block.slot)
        self._changed.add((file.fingerprint, block_hash))


class _Record(NamedTuple):
    slot: int
    checksum: int
    rank: Rank
    hits: int
    owner: bytes
    parent: bytes


def _encode(block: DiskBlock, order: LeafOrder, block_hash: bytes) -> bytes:
    owner, parent = order.owner_of(block_hash), order.parent_of(block_hash)
    return _RECORD.pack(block.slot, block.checksum, *order.rank_of(block_hash), order.hits_of(block_hash), owner) + parent


def _decode(record: bytes) -> _Record | None:
    """None: it is no record."""
    if len(record) < _RECORD.size:
        return None
    slot, checksum, worth, number, hits, owner = _RECORD.unpack_from(record)
    if not 0 <= worth < math.inf:  # NaN is not
        return None
    return _Record(slot, checksum, Rank(worth, number), hits, owner if any(owner) else b"", record[_RECORD.size :])
