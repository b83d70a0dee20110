"""Blocks on their way from disk back to the kvstore's memory, because somebody looked them up.

    lookup ─► what is on disk and not in memory ─► read, 8 MiB at a time, checked ─► committed in memory ─► the lookup is
    answered
                                                      └ damaged, or no memory for it: what was read so far counts

A lookup is answered after `ANSWER_S` at the latest, with what is in memory by then and how many blocks are still coming.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from common.protocol.cache_messages import BlockLookup
from common.protocol.errors import PenstockError
from common.protocol.explain_messages import RequestContext, WorkerEvent
from common.runtime import logs
from services.kvstore.arena import Arena
from services.kvstore.arenas import Arenas
from services.kvstore.disk_counts import DiskCounts
from services.kvstore.disk_folder import Copy, DiskFolder, Outcome
from services.kvstore.disk_index import DiskFile
from services.kvstore.disk_threads import DiskThreads, LeftBehind
from services.kvstore.index import longest_tail

log = logs.get("kvstore")

ANSWER_S = 0.1
"""A lookup waits for the disk at most so long; less than workers wait for an answer (`store_lookups.ASK_TIMEOUT_S`)."""
READ_BYTES = 8 << 20
"""Read between two looks at who waits, by `NUM_THREADS` threads."""
NUM_THREADS = 4
"""Each waits for the disk, copies and computes checksums in turn; while some wait, others use the cores."""
YIELD_S = 1.0
"""Writing waits for reading at most so long."""
SLOW_S = 3.0
"""Seconds after a wait that brought nothing in which no lookup waits for the disk."""
MAX_READS = 8
"""Hash chains read at once; further lookups are answered from memory."""


class Promotion:
    """`tasks`: where reading goes on behind an answered lookup; until it is set nothing is read."""

    def __init__(
        self, folder: DiskFolder, arenas: Arenas, counts: DiskCounts, clock: Callable[[], float], threads: DiskThreads
    ) -> None:
        self.tasks: TaskGroup | None = None
        self._folder = folder
        self._arenas = arenas
        self._counts = counts
        self._clock = clock
        self._threads = threads
        self._reading: set[tuple[str, bytes]] = set()
        self._num_reads = 0
        self._no_wait_before = 0.0
        self._progress = anyio.Event()

    async def idle(self) -> None:
        """Return when nothing is being read, or after `YIELD_S`."""
        with anyio.move_on_after(YIELD_S):
            while self._reading:
                await self._progress.wait()

    def missing(self, lookup: BlockLookup, arena: Arena | None) -> range:
        """Return which hashes of a lookup have to be read from disk, or are being read, for the longest answer to it; those in
        between that are in memory included. Empty: memory gives as long a one, too much is being read already, or the disk
        hangs."""
        file = self._folder.index.files.get(lookup.fingerprint)
        if file is None or self._num_reads >= MAX_READS or self.tasks is None or self._threads.are_stuck:
            return range(0)
        hashes = lookup.hashes

        def in_memory(index: int) -> bool:
            return arena is not None and arena.index.find(hashes[index]) is not None

        def somewhere(index: int) -> bool:
            return in_memory(index) or file.find(hashes[index]) is not None

        if lookup.firsts:
            first, end = longest_tail(lookup.firsts, somewhere)
        else:
            first, end = 0, next((i for i in range(len(hashes)) if not somewhere(i)), len(hashes))
        begin = next((i for i in range(first, end) if not in_memory(i)), end)
        return range(begin, end)

    def coming(self, lookup: BlockLookup, start: int) -> int:
        """Return how many hashes of a lookup from `start` on are being read now."""
        count = 0
        while start + count < len(lookup.hashes) and (lookup.fingerprint, lookup.hashes[start + count]) in self._reading:
            count += 1
        return count

    async def bring(self, lookup: BlockLookup, missing: range) -> None:
        """Have the `missing` blocks read into memory, and wait for them, if the lookup does, for at most `ANSWER_S`; reading
        goes on behind that."""
        keys = [(lookup.fingerprint, lookup.hashes[i]) for i in missing]
        new = [key for key in keys if key not in self._reading]
        if new and self.tasks is not None:
            self._reading.update(new)
            self._num_reads += 1
            self.tasks.start_soon(self._read, lookup, missing, new)
        if not lookup.waits or self._clock() < self._no_wait_before:
            return
        left = sum(key in self._reading for key in keys)
        with anyio.move_on_after(ANSWER_S) as waiting:
            while any(key in self._reading for key in keys):
                await self._progress.wait()
        if waiting.cancelled_caught and left == sum(key in self._reading for key in keys):
            self._no_wait_before = self._clock() + SLOW_S
            log.warning("kv_disk_slow", folder=str(self._folder.path), waited_s=ANSWER_S, nobody_waits_s=SLOW_S)

    async def _read(self, lookup: BlockLookup, missing: range, keys: list[tuple[str, bytes]]) -> None:
        """Read the blocks `keys`, all of them in the range `missing` of the lookup's chain, until one can't be had."""
        mine, hashes = set(keys), lookup.hashes
        try:
            file = self._folder.index.files.get(lookup.fingerprint)
            if file is None:
                return
            step = max(1, READ_BYTES // file.slot_bytes)
            for start in range(missing.start, missing.stop, step):
                part = range(start, min(start + step, missing.stop))
                done = {(lookup.fingerprint, hashes[i]) for i in part} & mine
                # the block before it is its predecessor in the eviction order; what is read of a window has none
                first = start if lookup.firsts else max(start - 1, 0)
                if done and not await self._read_some(file, hashes[first : part.stop], lookup.context):
                    return
                self._reading -= done
                self._signal()
        except PenstockError as error:
            log.info("kv_disk_read_stopped", code=error.code, reason=str(error))
        finally:
            self._num_reads -= 1
            self._reading -= mine
            self._signal()

    async def _read_some(self, file: DiskFile, hashes: list[bytes], context: RequestContext) -> bool:
        """Read those of a part of a chain that are not in memory. False: not all of them are there now.

        :raises PenstockError: there is no memory for this fingerprint.
        """
        arena = self._arenas.of(file.fingerprint, file.block_bytes)
        owner = next((file.order.owner_of(one) for one in hashes if one in file.blocks), b"")
        granted = arena.reserve(hashes, owner)
        copies: list[Copy] = []
        for i, slot in granted:
            block = file.find(hashes[i])
            if block is None:
                break
            copies.append(Copy(file, hashes[i], block, arena.segment, slot))
            file.order.hold(hashes[i])
        done, began_at = 0, self._clock()
        try:
            if copies:
                outcome = await self._copy(copies)
                done = outcome.done
                if outcome.damaged or outcome.error:
                    self._failed(copies[done], outcome.error)
        finally:
            slots = [slot for _, slot in granted]
            arena.index.commit(slots[:done], [copy.block.checksum for copy in copies[:done]])
            arena.index.abandon(slots[done:])
            for copy in copies:
                if file.find(copy.block_hash) is copy.block:
                    file.order.let_go(copy.block_hash)
        now, num_bytes = self._clock(), done * file.block_bytes
        self._counts.hit(done)
        self._counts.copied("read", num_bytes, now - began_at)
        if done:
            event = WorkerEvent("disk read", began_at, now, num_bytes=num_bytes, facts=(("read_blocks", done),))
            self._counts.remember(context, event)
        return done == len(granted) and all(block_hash in arena.index for block_hash in hashes)

    async def _copy(self, copies: list[Copy]) -> Outcome:
        """Read blocks in several threads; return what became of them up to the first that failed."""
        size = -(-len(copies) // NUM_THREADS)
        parts = [copies[start : start + size] for start in range(0, len(copies), size)]
        outcomes = [Outcome() for _ in parts]

        async def copy(number: int) -> None:
            with contextlib.suppress(LeftBehind):
                outcomes[number] = await self._threads.run(lambda: self._folder.read(parts[number]))

        async with anyio.create_task_group() as tasks:
            for number in range(len(parts)):
                tasks.start_soon(copy, number)
        done = 0
        for part, outcome in zip(parts, outcomes, strict=True):
            done += outcome.done
            if outcome.done < len(part):
                return Outcome(done, outcome.damaged, outcome.error)
        return Outcome(done)

    def _failed(self, copy: Copy, error: OSError | None) -> None:
        """Forget the block; others may be as good as ever."""
        if error is None:
            self._counts.damage()
        else:
            self._counts.failed("read")
        log.warning(
            "kv_disk_block_damaged" if error is None else "kv_disk_not_read",
            hash=copy.block_hash.hex(),
            folder=str(self._folder.path),
            reason="its checksum is wrong" if error is None else error.strerror,
        )
        self._folder.index.forget(copy.file, copy.block_hash)

    def _signal(self) -> None:
        progress, self._progress = self._progress, anyio.Event()
        progress.set()
