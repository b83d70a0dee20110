"""A worker's side of the kvstore: fetch the blocks of a prompt instead of computing them, and offer what was computed.

    fetch   BlockLookup ─► BlockLease ─► copy, compare generations and checksums ─► ReleaseLease
            └─ again for what the store still reads from its disk ─┘
    offer   BlockOffer ─► BlockGrant ─► copy ─► BlockCommit with checksums (or ReleaseLease: not written)

The store is a convenience. Whatever goes wrong here is a miss: nothing raises, nobody waits for a store that does not answer
at once, and one that failed is left alone for a while. A block is taken only if its bytes are those that were committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from common.cache.spec import group_name
from common.protocol.cache_messages import BlockCommit, BlockGrant, BlockLease, BlockOffer, BlockOwner
from common.protocol.errors import PenstockError, ProtocolError, StaleHandle
from common.protocol.explain_messages import RequestContext
from common.protocol.handles import WorkerRef, new_lease
from common.protocol.messages import ReleaseLease, RenewLeases
from common.runtime import logs
from common.runtime.actor import Actor
from common.transfer.base import RemoteBlocks, Transport
from common.transfer.block_memory import BlockMemory
from common.transfer.checked_copies import CopyIn, CopyOut, checksums_of, num_good
from common.transfer.measured import MeasuredTransport, TransferCounts
from common.transfer.shm import StoreTransport, host_id
from common.worker.fetch_choice import FetchChoice
from common.worker.fetch_rate import FetchRates
from common.worker.remote_stores import RemoteStores
from common.worker.store_lookups import MAX_STORES, Search, StoreLookups

log = logs.get("store_client")

CHUNK_BYTES = 16 << 20
"""Copied between two looks at the clock and at cancellation."""
RENEW_EVERY_S = 1.0
MAX_OFFERS = 4
"""Offers under way; more are not made, since the blocks of a waiting offer are kept from everyone else."""

DISK_WAIT_S = 1.0
"""A fetch waits so long in all for answers of stores that read from a disk."""


class Origin(NamedTuple):
    """What offered blocks were computed for, whose request that was, and the tokens of a block (0: not said)."""

    context: RequestContext = RequestContext()
    owner: BlockOwner = BlockOwner()
    block_tokens: int = 0


NOBODYS = Origin()


class _GroupBlocks(NamedTuple):
    """The worker's blocks of one cache group, and the fingerprint under which kvstores keep such blocks."""

    memory: BlockMemory
    fingerprint: str

    def chunks(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        size = max(1, CHUNK_BYTES // self.memory.block_bytes, self.memory.num_at_once)
        return ((start, min(start + size, num_blocks)) for start in range(0, num_blocks, size))


class StoreClient:
    """Talks to kvstores on behalf of `actor`: to those of this host, and for what they lack, through `remote`, to others.

    `pools`: the worker's own blocks, of each cache group; of 0 bytes where they are in a GPU's memory without a stage: then no
    kvstore is asked, nor is one without `enabled`. A kvstore keeps the blocks of each group apart, under a fingerprint of the
    group's own. The caller keeps the blocks it passes retained until the coroutine returns. `rates`: whether a prefix that
    a kvstore has is fetched or computed.
    """

    def __init__(
        self,
        actor: Actor,
        pools: Sequence[BlockMemory],
        fingerprint: str,
        shm_dir: str,
        *,
        transport: Transport | None = None,
        enabled: bool = True,
        transfers: TransferCounts | None = None,
        rates: FetchRates | None = None,
    ) -> None:
        self.actor = actor
        self._pools = [_GroupBlocks(memory, group_name(fingerprint, group)) for group, memory in enumerate(pools)]
        self.host = host_id(shm_dir)
        self.lookups = StoreLookups(actor, self.host, enabled=enabled and bool(pools[0].block_bytes))
        self.remote: RemoteStores | None = None
        """Stores of other hosts, with `kv_transfer nixl`."""
        self._stored = StoreTransport(shm_dir, pools[0].pinned)
        self._transfers = transfers or TransferCounts(actor.metrics)
        self._is_direct = transport is None
        self._transport = MeasuredTransport(transport or self._stored, self._transfers)
        self.choice = FetchChoice(rates or FetchRates(lambda: 0.0), actor.metrics, actor.clock)
        self._offers = 0
        self._fetched = actor.metrics.counter("store_fetched_blocks_total", "KV blocks copied from a kvstore")
        self._offered = actor.metrics.counter("store_offered_blocks_total", "KV blocks copied to a kvstore")

    @property
    def available(self) -> bool:
        """Is there a kvstore worth asking?"""
        return bool(self.lookups.stores() or (self.remote is not None and self.remote.stores()))

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block of each cache group."""
        return [pool.memory.block_bytes for pool in self._pools]

    async def find(self, hashes: Sequence[bytes], firsts: Sequence[int], group: int, search: Search | None = None) -> int:
        """Return the length, in blocks, of the longest leading part of a hash chain of which a kvstore has all that the group
        reads: `hashes[firsts[i] : i + 1]` of the part that ends behind block i. 0 on any failure.

        Nothing is held: by the time of the `fetch` it may be gone.
        """
        search = search or Search()
        stores = self.lookups.stores()[:MAX_STORES] if hashes else []
        waits = self.choice.expects("disk", len(hashes), search)
        found = await self.lookups.leases(self._pools[group].fingerprint, stores, hashes, search, firsts, waits=waits)
        try:
            search.num_from_disk = max([search.num_from_disk, *(lease.num_from_disk for lease in found)])
            length = max((lease.first + len(lease.blocks) for lease in found), default=0)
        finally:
            self.lookups.release(found)
        if self.remote is not None and length < len(hashes):
            length = max(length, await self.remote.find(self._pools[group], hashes, firsts, search))
        return length

    async def fetch(
        self, hashes: Sequence[bytes], into_blocks: Sequence[int], group: int = 0, search: Search | None = None
    ) -> int:
        """Copy the longest stored leading part of a hash chain to `into_blocks` of a group; returns its length in blocks.

        The content of the blocks beyond that length is undefined. 0 on any failure. A store that does not answer costs 0.2 s,
        once; copying goes on as long as it makes progress. What a store reads from its disk is waited for while each answer
        brings more of it, and for `DISK_WAIT_S` in all. What is computed sooner is not copied. `search`: what is noted of it.
        """
        pool = self._pools[group]
        wanted = list(hashes[: len(into_blocks)])
        stores, search = self.lookups.stores()[:MAX_STORES], search or Search()
        copied, waited_s, coming, from_disk = 0, 0.0, 0, 0
        while stores and wanted[copied:] and waited_s < DISK_WAIT_S:
            asked_at, waits = self.actor.clock(), self.choice.expects("disk", len(wanted) - copied, search)
            found = await self.lookups.leases(pool.fingerprint, stores, wanted[copied:], search, waits=waits)
            answered_s = self.actor.clock() - asked_at
            waited_s += answered_s
            try:
                best = max(found, key=lambda lease: len(lease.blocks) + lease.coming, default=None)
                if best is None:
                    break
                self.lookups.release(found, keep=best)
                read = min(len(best.blocks), max(best.num_from_disk, coming))
                if waits:
                    self.choice.measured("disk", pool.memory.block_bytes, read, answered_s, read + best.coming)
                if not self.choice.pays("kvstore", len(best.blocks), search):
                    break
                more = await self._copy_in(pool, best, wanted[copied:], into_blocks[copied:], search)
                copied += more
                from_disk += min(more, read)
                coming = best.coming if self.choice.pays("disk", best.coming, search) else 0
                if not more or more < len(best.blocks) or not coming:
                    break
                stores = [best.store]
            finally:
                self.lookups.release(found)
        search.num_from_disk = max(search.num_from_disk, from_disk)
        if self.remote is not None and copied < len(wanted):
            copied += await self.remote.fetch(pool, wanted[copied:], into_blocks[copied : len(wanted)], search)
        search.num_bytes += copied * pool.memory.block_bytes
        self._fetched.inc(copied)
        return copied

    async def offer(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        group: int = 0,
        origin: Origin = NOBODYS,
    ) -> None:
        """Give the store what it lacks of a hash chain whose KV is in `blocks` of a group. Best effort."""
        keepers = self.keepers(hashes)
        if len(hashes) != len(blocks) or not keepers or self._offers >= MAX_OFFERS:
            return
        store = keepers[0]
        self._offers += 1
        try:
            end, before = 0, -1
            while before < end < len(hashes):  # the store takes memory bit by bit, so it may grant less than there is
                start, before = max(end - 1, 0), end  # the rest follows on the last of those before
                offer = self._offer(group, list(hashes[start:]), origin)
                last = await self._offer_to(self._pools[group], store, offer, blocks[start:])
                end = start + last + 1 if last is not None else end
        except PenstockError as error:
            self.lookups.failed(store, error)
        finally:
            self._offers -= 1

    def keepers(self, hashes: Sequence[bytes]) -> list[WorkerRef]:
        """Return the store of this host that a hash chain would be offered to now, if there is one."""
        stores = self.lookups.stores() if hashes else []
        return [max(stores, key=lambda known: _affinity(known, hashes[0]))] if stores else []

    def close(self) -> None:
        """Let go of the stores' segments."""
        self._stored.close()

    # -- fetch

    async def _copy_in(
        self, pool: _GroupBlocks, lease: BlockLease, hashes: list[bytes], into_blocks: Sequence[int], search: Search
    ) -> int:
        copied, began_at = 0, self.actor.clock()
        renewed_at = self.actor.clock()
        try:
            for start, end in pool.chunks(len(lease.blocks)):
                renewed_at = self._renew(lease.store, lease.lease, renewed_at)
                good = await anyio.to_thread.run_sync(self._read_chunk, pool, lease, start, end, list(into_blocks[start:end]))
                copied += good
                if good < end - start:
                    damaged = hashes[start + good]
                    self.actor.send(lease.store, ReleaseLease(leases=[lease.lease], damaged=[damaged]))
                    self.lookups.failures.labels("checksum").inc()
                    self._transfers.failed("kvstore", "read", "checksum")
                    search.error = "checksum"
                    log.warning("kvstore_block_damaged", store=lease.store.id, hash=damaged.hex())
                    break
        except PenstockError as error:
            search.error = error.code
            self.lookups.failed(lease.store, error)
        else:
            self.choice.measured("kvstore", pool.memory.block_bytes, copied, self.actor.clock() - began_at, copied)
        return copied

    def _read_chunk(self, pool: _GroupBlocks, lease: BlockLease, start: int, end: int, into_blocks: list[int]) -> int:
        """In a thread. Blocks [start, end) of the lease; returns how many leading ones have the right checksum."""
        blocks, generations, checksums = (part[start:end] for part in (lease.blocks, lease.generations, lease.checksums))
        if self._is_direct and self._stored.lends(lease.segment, pool.fingerprint):
            with (
                self._transfers.measure("kvstore", "read") as copy,
                self._stored.lend(lease.segment, pool.fingerprint, pool.memory.block_bytes, blocks, generations) as lent,
            ):
                good = pool.memory.write(into_blocks, CopyIn(lent, blocks, checksums))
                copy.num_bytes = good * pool.memory.block_bytes
            return good

        def fill(rows: np.ndarray, indices: Sequence[int], part: range) -> int:
            mine = slice(part.start, part.stop)
            source = RemoteBlocks(self.host, lease.segment, pool.fingerprint, blocks[mine], generations[mine])
            self._transport.read(source, rows, indices)
            return num_good(rows, indices, checksums[mine])

        return pool.memory.write(into_blocks, fill)

    # -- offer

    def _offer(self, group: int, hashes: list[bytes], origin: Origin) -> BlockOffer:
        pool = self._pools[group]
        return BlockOffer(
            holder=self.actor.ref,
            fingerprint=pool.fingerprint,
            block_bytes=pool.memory.block_bytes,
            hashes=hashes,
            lease=new_lease(),
            context=origin.context,
            owner=origin.owner,
            # what computes a token again makes its KV of all groups
            cost_s=self.choice.compute_s(origin.block_tokens) * pool.memory.block_bytes / sum(self.block_bytes),
        )

    async def _offer_to(self, pool: _GroupBlocks, store: WorkerRef, offer: BlockOffer, blocks: Sequence[int]) -> int | None:
        """Returns the index of the last block that the store took; None: none."""
        hashes = offer.hashes
        grant = await self.lookups.ask(store, offer)
        if not isinstance(grant, BlockGrant):
            raise ProtocolError(f"{type(grant).__name__} in answer to an offer")
        if not grant.lease:
            return None
        committed = False
        try:
            if len(grant.indices) != len(grant.blocks) or not all(0 <= index < len(hashes) for index in grant.indices):
                raise ProtocolError("a grant that does not fit its offer")
            source_blocks = [blocks[index] for index in grant.indices]
            if grant.generations and len(grant.generations) != len(grant.blocks):
                raise ProtocolError("a grant of blocks that have not a generation each")
            checksums = await self._copy_out(pool, store, grant, source_blocks)
            self.actor.send(store, BlockCommit(lease=grant.lease, checksums=checksums))
            committed = True
            self._offered.inc(len(checksums))
        finally:
            if not committed:
                self.actor.send(store, ReleaseLease(leases=[grant.lease]))
        return max(grant.indices, default=None)

    async def _copy_out(self, pool: _GroupBlocks, store: WorkerRef, grant: BlockGrant, source_blocks: list[int]) -> list[int]:
        """Returns the checksums of what was copied. :raises StaleHandle: the grant may have ended meanwhile."""
        checksums: list[int] = []
        renewed_at = self.actor.clock()
        for start, end in pool.chunks(len(source_blocks)):
            renewed_at = self._renew(store, grant.lease, renewed_at)
            checksums += await anyio.to_thread.run_sync(self._write_chunk, pool, grant, start, source_blocks[start:end])
            # this process was stopped, or the machine is that slow: the slots may be somebody else's by now
            if self.actor.clock() - renewed_at > RENEW_EVERY_S + self.actor.config.dead_after_s:
                raise StaleHandle("the store's grant has probably ended")
        return checksums

    def _write_chunk(self, pool: _GroupBlocks, grant: BlockGrant, start: int, source_blocks: list[int]) -> list[int]:
        """In a thread. Blocks of the grant from `start` on; returns the checksums of what was copied."""
        end, block_bytes = start + len(source_blocks), pool.memory.block_bytes
        blocks, generations = grant.blocks[start:end], grant.generations[start:end]

        def take(rows: np.ndarray, indices: Sequence[int], part: range) -> list[int]:
            self._stored.write(grant.segment, pool.fingerprint, blocks[part.start : part.stop], rows, indices)
            return checksums_of(rows, indices)

        with self._transfers.measure("kvstore", "write") as copy:
            if generations and self._stored.lends(grant.segment, pool.fingerprint):
                with self._stored.lend(grant.segment, pool.fingerprint, block_bytes, blocks, generations) as lent:
                    parts = pool.memory.read(source_blocks, CopyOut(lent, blocks))
            else:
                parts = pool.memory.read(source_blocks, take)
            copy.num_bytes = len(source_blocks) * block_bytes
        return [checksum for checksums in parts for checksum in checksums]

    # -- both

    def _renew(self, store: WorkerRef, lease: str, renewed_at: float) -> float:
        """Renew the lease if it is time; returns when it was renewed last."""
        now = self.actor.clock()
        if now - renewed_at < RENEW_EVERY_S:
            return renewed_at
        self.actor.send(store, RenewLeases(holder=self.actor.ref, leases=[lease]))
        return now


def _affinity(store: WorkerRef, block_hash: bytes) -> bytes:
    """Rendezvous hashing: every worker of the host offers the same chain to the same store."""
    return hashlib.blake2b(block_hash, key=store.id.encode()[:64], digest_size=8).digest()
