"""KV blocks between an engine's worker and the kvstore: a prefix that is there already, full blocks that others may want."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from anyio.abc import TaskGroup

from common.cache.pool import BlockPool
from common.engine.sequence import Sequence, SequenceCache
from common.worker.metrics import EngineMetrics
from common.worker.store_client import StoreClient
from common.worker.traces import WorkerTraces


class CopyScheduler(Protocol):
    def begin_copy(self, sequence: Sequence) -> None: ...
    def end_copy(self, sequence: Sequence, num_computed: int) -> None: ...


class Worker(Protocol):
    """What this needs of its worker."""

    task_group: TaskGroup
    pool: BlockPool
    cache: SequenceCache
    store: StoreClient
    counters: EngineMetrics
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
        if worker.store.available and len(sequence.tokens) - sequence.num_computed > worker.cache.block_tokens:
            worker.scheduler.begin_copy(sequence)
            worker.task_group.start_soon(self._fetch, sequence)

    async def _fetch(self, sequence: Sequence) -> None:
        worker = self._worker
        block_tokens = worker.cache.block_tokens
        have = sequence.num_computed // block_tokens
        copied, began_at = 0, worker.clock()
        try:
            hashes = worker.cache.hash(sequence, len(sequence.tokens) - 1)
            copied = await worker.store.fetch(hashes[have:], sequence.blocks[have : len(hashes)])
        finally:
            num_computed = (have + copied) * block_tokens
            sequence.num_cached = min(num_computed, sequence.generation.prompt_tokens)
            worker.counters.prefix_hits.inc(copied * block_tokens)
            worker.scheduler.end_copy(sequence, num_computed)
            worker.traces.copied(sequence, "prefix", began_at)
            worker.wake()

    def offer_soon(self, sequence: Sequence) -> None:
        """Offer the full blocks of a sequence in the background; call before its blocks are freed."""
        worker = self._worker
        hashes = worker.cache.hash(sequence, sequence.num_computed)
        blocks = sequence.blocks[: len(hashes)]
        if blocks and worker.store.available:
            worker.pool.retain(blocks)
            worker.task_group.start_soon(self._offer, blocks, list(hashes))

    async def _offer(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Give full blocks to the kvstore. They were retained, and are released here, whatever happens."""
        try:
            await self._worker.store.offer(hashes, blocks)
        finally:
            self._worker.pool.release(blocks)
            self._worker.wake()
