"""KV blocks between an engine's worker and the kvstore: a prefix that is there already, full blocks that others may want."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from anyio.abc import TaskGroup

from common.cache.grouped_pool import HOLE, GroupedPool
from common.cache.prefix import owner_of
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.protocol.cache_messages import BlockOwner
from common.protocol.errors import OutOfBlocks
from common.protocol.explain_messages import RequestContext
from common.protocol.handles import WorkerRef
from common.protocol.trace_context import child_of
from common.worker.kv_counts import KvCounts
from common.worker.metrics import EngineMetrics
from common.worker.store_client import Origin, StoreClient
from common.worker.store_lookups import Search
from common.worker.traces import WorkerTraces


class CopyScheduler(Protocol):
    def begin_copy(self, sequence: Sequence) -> None: ...
    def end_copy(self, sequence: Sequence, num_computed: int) -> None: ...


class Worker(Protocol):
    """What this needs of its worker."""

    task_group: TaskGroup
    pool: GroupedPool
    cache: SequenceCache
    store: StoreClient
    counters: EngineMetrics
    kv: KvCounts
    ref: WorkerRef
    traces: WorkerTraces
    clock: Callable[[], float]

    @property
    def scheduler(self) -> CopyScheduler: ...

    def wake(self) -> None: ...


class Prefixes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def fetch(self, sequence: Sequence) -> None:
        """Fill the blocks behind the local prefix from a kvstore, if that could save work; the sequence runs afterwards.

        Call it in the turn that admitted the sequence: from then on a step may be planned with it.
        """
        worker = self._worker
        if sequence.needs_every_state:
            return
        worker.kv.looked_up(len(sequence.tokens))
        worker.kv.found("own", sequence.num_computed)
        if worker.store.available and len(sequence.tokens) - sequence.num_computed > worker.cache.block_tokens:
            worker.scheduler.begin_copy(sequence)
            worker.task_group.start_soon(self._fetch, sequence)

    async def _fetch(self, sequence: Sequence) -> None:
        worker = self._worker
        block_tokens = worker.cache.block_tokens
        have = sequence.num_computed // block_tokens
        copied, began_at, search = 0, worker.clock(), self._search(sequence)
        try:
            hashes = worker.cache.hash(sequence, len(sequence.tokens) - 1)
            copied = await self._copy_in(sequence, hashes, have, search)
        finally:
            num_computed = (have + copied) * block_tokens
            sequence.num_cached = min(num_computed, sequence.generation.prompt_tokens)
            worker.counters.prefix_hits.inc(copied * block_tokens)
            from_disk = min(copied, search.num_from_disk) * block_tokens
            remote = min(copied - from_disk // block_tokens, search.num_remote) * block_tokens
            worker.kv.found("kvstore_memory", copied * block_tokens - from_disk - remote)
            worker.kv.found("kvstore_disk", from_disk)
            worker.kv.found("kvstore_remote", remote)
            skipped = search.num_skipped * block_tokens
            facts = (("disk_hit_tokens", from_disk), ("remote_hit_tokens", remote), ("skipped_tokens", skipped))
            worker.scheduler.end_copy(sequence, num_computed)
            worker.traces.copied(
                sequence,
                "prefix",
                began_at,
                num_tokens=copied * block_tokens,
                num_bytes=search.num_bytes,
                error=search.error,
                facts=tuple((name, number) for name, number in facts if number),
                asked=search.stores,
            )
            worker.wake()

    def _search(self, sequence: Sequence) -> Search:
        """Return a search for its prefix, in which one that is computed sooner than fetched is computed."""
        worker = self._worker
        memory = zip(worker.pool.groups, worker.store.block_bytes, strict=True)
        block_bytes = sum(size for group, size in memory if group.retention.keeps_all)
        return Search(self._context(sequence), block_tokens=worker.cache.block_tokens, block_bytes=block_bytes)

    def _context(self, sequence: Sequence) -> RequestContext:
        """Return what a kvstore is told of the request: its spans are children of this worker's."""
        generation = sequence.generation
        return RequestContext(generation.request, generation.attempt, child_of(generation.trace, self._worker.ref.id))

    async def _copy_in(self, sequence: Sequence, hashes: list[bytes], have: int, search: Search) -> int:
        """Fetch blocks of every group for the same prefix; return how many blocks it is longer than `have`.

        Groups that keep all of a sequence say how long it can be at most, then those that keep a part, until all agree. Of
        these only those blocks are fetched that the token behind that prefix reads; without all of them, nothing counts.
        """
        worker, end = self._worker, len(hashes)
        groups = list(enumerate(zip(worker.pool.groups, sequence.tables, strict=True)))
        for index, (group, table) in groups:
            if group.retention.keeps_all:
                end = have + await worker.store.fetch(hashes[have:end], table[have:end], index, search)
        parts = [(index, table) for index, (group, table) in groups if not group.retention.keeps_all]
        end = await self._agreed_end(hashes, have, end, [index for index, _ in parts], search)
        if end == have:
            return 0
        try:
            worker.cache.reach(sequence, end * worker.cache.block_tokens)
        except OutOfBlocks:
            return 0
        for index, table in parts:
            begin = max(have, worker.cache.first_block(index, end * worker.cache.block_tokens))
            if await worker.store.fetch(hashes[begin:end], table[begin:end], index, search) < end - begin:
                return 0
        return end - have

    async def _agreed_end(self, hashes: list[bytes], have: int, end: int, groups: list[int], search: Search) -> int:
        """Return the largest number of blocks, at most `end`, behind which each of `groups` has what it reads."""
        agreed = asked = 0
        size = self._worker.cache.block_tokens
        while have < end and agreed < len(groups):
            index = groups[asked % len(groups)]
            first_token = self._worker.pool.groups[index].retention.first_token
            firsts = [max(first_token(length * size) // size, have) - have for length in range(have + 1, end + 1)]
            found = have + await self._worker.store.find(hashes[have:end], firsts, index, search)
            agreed = agreed + 1 if found == end else 1
            end, asked = found, asked + 1
        return end

    def offer_soon(self, sequence: Sequence) -> None:
        """Offer the full blocks of a sequence in the background; call before its blocks are freed."""
        worker = self._worker
        hashes = list(worker.cache.hash(sequence, sequence.num_computed))
        if not worker.store.keepers(hashes):
            return  # a sequence that has let go of its blocks has no tables either
        tables = [table[: len(hashes)] for table in sequence.tables]
        for index, ((pool, retention), table) in enumerate(zip(worker.pool.groups, tables, strict=True)):
            if retention.keeps_all:
                continue
            # who has the same tokens again computes the last one anew, and that one may read a block that was let go just now
            for i in range(worker.cache.first_block(index, max(sequence.num_computed - 1, 0)), len(table)):
                table[i] = pool.find(hashes[i]) if table[i] == HOLE else table[i]
        if sequence.timeline is not None:
            sequence.timeline.asked(worker.store.keepers(hashes))
        worker.pool.retain(tables)
        owner = BlockOwner(owner_of(sequence.tenant), sequence.generation.weight)
        origin = Origin(self._context(sequence), owner, worker.cache.block_tokens)
        worker.task_group.start_soon(self._offer, tables, hashes, origin)

    async def _offer(self, tables: list[list[int]], hashes: list[bytes], origin: Origin) -> None:
        """Give full blocks to the kvstore. They were retained, and are released here, whatever happens."""
        try:
            for index, table in enumerate(tables):
                held = [(block_hash, block) for block_hash, block in zip(hashes, table, strict=True) if block != HOLE]
                await self._worker.store.offer(
                    [block_hash for block_hash, _ in held], [block for _, block in held], index, origin
                )
        finally:
            self._worker.pool.release(tables)
            self._worker.wake()
