"""Blocks of the kvstore's memory on their way to disk, in the background.

    committed in memory ─► queue ─► leased there, a place on disk reserved ─► written ─► in the index
                             └ gone from memory meanwhile: missed

Each turn first saves what the turns before have changed in the index, so that the index never names a slot that is written
again.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio

from common.protocol.explain_messages import RequestContext, WorkerEvent
from common.runtime import logs
from services.kvstore.arena import Arena
from services.kvstore.arenas import Arenas
from services.kvstore.disk_counts import DiskCounts
from services.kvstore.disk_folder import Copy, DiskFolder, Outcome
from services.kvstore.disk_threads import DiskThreads, LeftBehind
from services.kvstore.index_file import MAX_HASH_BYTES

log = logs.get("kvstore")

WRITE_BYTES = 16 << 20
"""Written between two looks at the queue, and leased in memory meanwhile."""
MAX_QUEUED = 1 << 18
"""Blocks that wait at most; the oldest are not written then."""
SAVE_EVERY_S = 5.0
"""Seconds between saves of what was used, for the eviction order after a restart."""
RETRY_S = 30.0
"""Seconds after a full or failing disk in which nothing grows there, or is written."""
HEADROOM_BYTES = 128 << 10
"""Given back where the disk is full, so that the index can still be written."""
FULL = (errno.ENOSPC, errno.EDQUOT)
NOBODY = RequestContext()


class Queued(NamedTuple):
    """Since when a block waits, and the request that it was computed for."""

    at: float
    context: RequestContext


class WriteBack:
    """`yield_to_reads` returns when nobody waits for the disk, or has waited for long."""

    def __init__(
        self,
        folder: DiskFolder,
        arenas: Arenas,
        counts: DiskCounts,
        clock: Callable[[], float],
        yield_to_reads: Callable[[], Awaitable[None]],
        threads: DiskThreads,
    ) -> None:
        self._folder = folder
        self._arenas = arenas
        self._counts = counts
        self._clock = clock
        self._yield_to_reads = yield_to_reads
        self._threads = threads
        self._queue: OrderedDict[tuple[str, bytes], Queued] = OrderedDict()
        self._num_writing = 0
        self._unsaved = False
        self._no_write_before = self._limited_until = 0.0
        self._queued, self._progress = anyio.Event(), anyio.Event()

    @property
    def settled(self) -> bool:
        """Whether nothing waits to be written or saved."""
        return not self._queue and not self._num_writing and not self._unsaved

    @property
    def num_queued(self) -> int:
        """Blocks that are not on disk yet."""
        return len(self._queue) + self._num_writing

    def add(self, arena: Arena, hashes: Sequence[bytes], context: RequestContext = NOBODY) -> None:
        """These blocks are readable in memory from now on: write them when there is time. `context`: the request that they were
        computed for."""
        queued = Queued(self._clock(), context)
        for block_hash in hashes:
            if 0 < len(block_hash) <= MAX_HASH_BYTES:
                self._queue[arena.fingerprint, block_hash] = queued
        while len(self._queue) > MAX_QUEUED:
            self._queue.popitem(last=False)
            self._counts.missed()
        self._queued.set()

    async def run(self) -> None:
        """Write what is queued, until cancelled or left behind."""
        while not self._threads.left_behind:
            rests = self._clock() < self._no_write_before  # what comes meanwhile is no reason to try again
            if not self._unsaved and (rests or not self._queue):
                self._queued = anyio.Event()
                with anyio.move_on_after(SAVE_EVERY_S):
                    await (anyio.sleep_forever() if rests else self._queued.wait())
            await self._yield_to_reads()
            await self._write()

    async def flush(self) -> None:
        """Return when everything queued is written, or the disk takes nothing, or hangs."""
        while not self.settled and self._clock() >= self._no_write_before and not self._threads.are_stuck:
            with anyio.move_on_after(self._threads.stuck_in_s):
                await self._progress.wait()

    async def _write(self) -> None:
        """Save what changed in the index, and write a batch of the queue, which then is unsaved."""
        folder, index, now = self._folder, self._folder.index, self._clock()
        if now >= self._limited_until:
            index.limit_bytes = index.capacity_bytes
        batch = self._next_batch() if now >= self._no_write_before else []
        clear = [(file, file.to_clear) for file in index.files.values() if file.to_clear]
        for file, _ in clear:
            file.to_clear = []
        empty, changes = index.take_empty(), index.take_changes()
        if not batch and not clear and not empty and not changes:
            self._unsaved = False
            self._signal()
            return
        self._num_writing = len(batch)
        outcome, saved, began_at = Outcome(), False, self._clock()
        try:
            copies = [copy for _, copy, _ in batch]
            outcome, saved = await self._threads.run(lambda: folder.write(copies, clear, empty, changes))
        except LeftBehind:
            return
        finally:
            self._num_writing, self._unsaved = 0, outcome.done > 0
            for number, (arena, copy, _) in enumerate(batch):
                arena.index.end_lease([copy.segment_slot])
                (index.commit if number < outcome.done else index.abandon)(copy.file, copy.block_hash)
            for file, slots in clear:
                index.cleared(file, slots)
            if not saved:
                index.put_back({key: record for key, record in changes.items() if key[0] in index.files})
            self._counts.wrote(outcome.done)
            self._written(batch[: outcome.done], began_at)
            self._counts.evicted_so_far(index.evicted)
        left = [((copy.file.fingerprint, copy.block_hash), queued) for _, copy, queued in batch[outcome.done :]]
        if outcome.damaged:  # in memory; whoever reads it there will say so
            self._counts.missed()
            left = left[1:]
        for key, queued in reversed(left):
            self._queue[key] = queued
            self._queue.move_to_end(key, last=False)
        if outcome.error is not None:
            self._failed(outcome.error, outcome.done)
        self._signal()

    def _written(self, written: Sequence[tuple[Arena, Copy, Queued]], began_at: float) -> None:
        """Count what a batch has written, and remember it with the requests that it was computed for."""
        now, num_bytes = self._clock(), 0
        by_request: dict[Queued, list[int]] = {}
        for arena, _, queued in written:
            num_bytes += arena.block_bytes
            if queued.context.request:
                by_request.setdefault(queued, []).append(arena.block_bytes)
        self._counts.copied("write", num_bytes, now - began_at)
        for queued, sizes in by_request.items():
            facts = (("written_blocks", len(sizes)),)
            event = WorkerEvent("write-back", queued.at, now, num_bytes=sum(sizes), facts=facts)
            self._counts.remember(queued.context, event)

    def _next_batch(self) -> list[tuple[Arena, Copy, Queued]]:
        """Take blocks out of the queue, each leased in memory and with a place on disk."""
        folder, size = self._folder, 0
        batch: list[tuple[Arena, Copy, Queued]] = []
        while self._queue and size < WRITE_BYTES:
            (fingerprint, block_hash), queued = self._queue.popitem(last=False)
            arena = self._arenas.get(fingerprint)
            slot = None if arena is None else arena.index.find(block_hash)
            file = None if arena is None else folder.file(fingerprint, arena.block_bytes)
            if arena is None or slot is None or file is None:
                self._counts.missed()
                continue
            if block_hash in file.blocks:
                continue
            (checksum,) = arena.index.checksums_of([slot])
            order = arena.index.order
            file.order.measured(order.seconds_per_byte * file.slot_bytes)
            parent, owner = order.parent_of(block_hash), order.owner_of(block_hash)
            block = folder.index.reserve(file, block_hash, parent, checksum, owner)
            if block is None:
                self._counts.missed()
                continue
            arena.index.lease([slot])
            batch.append((arena, Copy(file, block_hash, block, arena.segment, slot), queued))
            size += file.slot_bytes
        return batch

    def _failed(self, error: OSError, done: int) -> None:
        """A full disk keeps what it has, and new blocks take the place of old ones; any other failure stops writing for a
        while."""
        self._counts.failed("write")
        now, folder, index = self._clock(), self._folder, self._folder.index
        if error.errno in FULL:
            is_new = now >= self._limited_until
            index.limit_bytes, self._limited_until = max(0, index.used_bytes - HEADROOM_BYTES), now + RETRY_S
            index.shrink_to_limit()
            if is_new:
                log.error("kv_disk_full", folder=str(folder.path), mib=index.used_bytes >> 20, again_in_s=RETRY_S)
                return
            if done:
                return
        elif now >= self._no_write_before:
            log.error("kv_disk_not_written", folder=str(folder.path), reason=error.strerror or str(error), again_in_s=RETRY_S)
        self._no_write_before = now + RETRY_S

    def _signal(self) -> None:
        progress, self._progress = self._progress, anyio.Event()
        progress.set()
