"""A worker's side of kvstores of other hosts: what stores of its own host lack is read from theirs, where that is worth it.

    BlockLookup ─► BlockLease ─► is it sooner copied than computed? ─► for 8 MiB at a time, two at once:
                                     StageBlocks ─► BlocksStaged ─► read over NIXL ─► checksums ─► the pool ─► UnstageBlocks
                                 ─► ReleaseLease

As with stores of the own host, whatever goes wrong is a miss. Bytes count only if they have the checksums of the lease, which
came over NATS: an answer that is damaged, of another life of the store or of another question, or a store that gave the staged
bytes to somebody else meanwhile, is noticed by that.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import anyio

from common.protocol.cache_messages import BlockLease
from common.protocol.errors import OutOfCredits, PenstockError, StaleHandle
from common.protocol.handles import WorkerRef
from common.protocol.messages import RenewLeases
from common.protocol.transfer_messages import StageBlocks
from common.runtime import logs
from common.runtime.actor import Actor
from common.transfer.block_memory import BlockMemory
from common.transfer.measured import TransferCounts
from common.transfer.nixl import NixlTransport
from common.transfer.staging import MAX_COPIES
from common.worker.fetch_choice import FetchChoice
from common.worker.remote_paths import RemotePaths
from common.worker.staged_reads import NUM_READERS, StagedReads
from common.worker.store_lookups import MAX_STORES, Search, StoreLookups

log = logs.get("store_client")

PATH = "kvstore_nixl"
STAGE_TIMEOUT_S = 1.0
RENEW_EVERY_S = 1.0
DISK_WAIT_S = 1.0
"""A fetch waits so long in all for answers of stores that read from a disk."""


class Group(Protocol):
    """The worker's blocks of one cache group, and the fingerprint under which kvstores keep them."""

    @property
    def memory(self) -> BlockMemory: ...
    @property
    def fingerprint(self) -> str: ...


class RemoteStores:
    """`choice`: whether to read or to compute, by measured speeds."""

    def __init__(
        self,
        actor: Actor,
        lookups: StoreLookups,
        paths: RemotePaths,
        transport: NixlTransport,
        *,
        choice: FetchChoice,
        counts: TransferCounts,
    ) -> None:
        self._actor = actor
        self._lookups = lookups
        self._paths = paths
        self._transport = transport
        self._choice = choice
        self._reads = StagedReads(actor, transport, counts, PATH)
        self._parts = anyio.CapacityLimiter(MAX_COPIES)
        """Further ones wait here, where they hold neither a thread nor room in a staging buffer."""

    def stores(self) -> list[WorkerRef]:
        """Return the stores of other hosts that can be read and have not failed lately: `MAX_STORES` over the fastest paths."""
        found = [store.worker for store in self._lookups.ready() if self._is_remote(store.host) and self._paths.works(store)]
        return sorted(found, key=self._paths.gb_per_s, reverse=True)[:MAX_STORES]

    async def find(self, group: Group, hashes: Sequence[bytes], firsts: Sequence[int], search: Search) -> int:
        """See `StoreClient.find`."""
        found = await self._lookups.leases(group.fingerprint, self.stores(), hashes, search, firsts)
        try:
            return max((lease.first + len(lease.blocks) for lease in found), default=0)
        finally:
            self._lookups.release(found)

    async def fetch(self, group: Group, hashes: Sequence[bytes], into_blocks: Sequence[int], search: Search) -> int:
        """Copy the longest leading part of a hash chain that a store of another host has; see `StoreClient.fetch`."""
        stores, copied, waited_s = self.stores(), 0, 0.0
        if group.memory.block_bytes > self._transport.slice_bytes or not search.pays.get(PATH, True):
            return 0
        while stores and copied < len(hashes) and waited_s < DISK_WAIT_S:
            asked_at = self._actor.clock()
            found = await self._lookups.leases(group.fingerprint, stores, hashes[copied:], search)
            waited_s += self._actor.clock() - asked_at
            try:
                best = max(found, key=lambda lease: len(lease.blocks) + lease.coming, default=None)
                if best is None or not self._pays(best, search):
                    break
                self._lookups.release(found, keep=best)
                more = await self._copy(group, best, into_blocks[copied:], search)
                copied += more
                if not more or more < len(best.blocks) or not best.coming:
                    break
                stores = [best.store]
            finally:
                self._lookups.release(found)
        search.num_remote = max(search.num_remote, copied)
        return copied

    def _is_remote(self, host: str) -> bool:
        return bool(host) and host != self._lookups.host

    def _pays(self, lease: BlockLease, search: Search) -> bool:
        tested = 1e9 * self._paths.gb_per_s(lease.store)
        return self._choice.pays(PATH, len(lease.blocks) + lease.coming, search, tested_bytes_per_s=tested)

    async def _copy(self, group: Group, lease: BlockLease, into_blocks: Sequence[int], search: Search) -> int:
        """Return how many leading blocks of the lease were copied."""
        began_at = self._actor.clock()
        size = self._transport.slice_bytes // group.memory.block_bytes
        parts = deque((start, min(start + size, len(lease.blocks))) for start in range(0, len(lease.blocks), size))
        copied: dict[int, int] = {}
        renewed_at = self._actor.clock()

        async def copy_parts() -> None:
            nonlocal renewed_at
            while parts:
                start, end = parts.popleft()
                if (now := self._actor.clock()) - renewed_at >= RENEW_EVERY_S:
                    renewed_at = now
                    self._actor.send(lease.store, RenewLeases(holder=self._actor.ref, leases=[lease.lease]))
                copied[start] = await self._copy_part(group, lease, start, end, list(into_blocks[start:end]), search)
                if copied[start] < end - start:
                    parts.clear()

        async with anyio.create_task_group() as tasks:
            for _ in range(min(NUM_READERS, len(parts))):
                tasks.start_soon(copy_parts)
        done = 0
        while copied.get(done):  # a part ends where the next begins, if it is whole
            done += copied[done]
        if done == len(lease.blocks):
            self._choice.measured(PATH, group.memory.block_bytes, done, self._actor.clock() - began_at, done)
        return done

    async def _copy_part(
        self, group: Group, lease: BlockLease, start: int, end: int, into_blocks: list[int], search: Search
    ) -> int:
        """Return how many leading blocks of [start, end) were copied; whatever goes wrong is noted."""
        try:
            agent = self._paths.agent_of(lease.store)
            question = StageBlocks(holder=self._actor.ref, lease=lease.lease, stage=os.urandom(8).hex(), start=start, end=end)
            expected = lease.checksums[start:end]
            async with self._parts:
                return await self._reads.read(
                    lease.store, agent, question, group.memory, into_blocks, expected, timeout_s=STAGE_TIMEOUT_S
                )
        except (OutOfCredits, StaleHandle) as error:  # the store is well: it has no room now, or the lease ended first
            search.error = error.code
            self._lookups.failures.labels(error.code).inc()
        except PenstockError as error:
            search.error = error.code
            self._lookups.failed(lease.store, error)
        return 0
