"""The kvstore's second tier: blocks of its shared memory on disk, written in the background and read back before workers need
them.

    committed in memory ─► queue ─► written, 16 MiB at a time ─► in the index: found again, also after a restart
    looked up, on disk but not in memory ─► read, 4 MiB at a time ─► committed in memory ─► leased like any other block

A worker never touches the disk and never waits for it for long: its lookup is answered after `ANSWER_S` at the latest, with
what is in memory by then and how many blocks are still coming. Whatever goes wrong here costs speed alone. The log says each
problem once, and the store goes on with its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from common.protocol.cache_messages import BlockLookup, KvTier
from common.protocol.explain_messages import RequestContext
from common.runtime import logs
from common.runtime.metrics import Metrics
from services.kvstore.arena import Arena
from services.kvstore.arenas import Arenas
from services.kvstore.config import KvstoreConfig
from services.kvstore.disk_counts import DiskCounts
from services.kvstore.disk_folder import DiskFolder, DiskUnavailable
from services.kvstore.disk_threads import STUCK_S, DiskThreads
from services.kvstore.eviction import LeafOrder
from services.kvstore.promotion import Promotion
from services.kvstore.write_back import NOBODY, WriteBack

log = logs.get("kvstore")

OPEN_S = 10.0
"""Seconds after which a store is ready though its disk has not answered."""
LOOK_AGAIN_S = 0.5


class DiskTier:
    """Off where no folder is set, and where it can't be used: then nothing is found, and nothing is written. Everything here
    runs in the event loop, and copies in threads."""

    def __init__(
        self,
        config: KvstoreConfig,
        arenas: Arenas,
        metrics: Metrics,
        counts: DiskCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder: DiskFolder | None = None
        self._config = config
        self._arenas = arenas
        self._clock = clock
        self._counts = counts
        self._threads = DiskThreads(clock)
        self._write_back: WriteBack | None = None
        self._promotion: Promotion | None = None
        self._problem = ""
        self._hangs = False
        self._began_at = 0.0
        self._found: DiskFolder | DiskUnavailable | None = None
        metrics.gauge("kvstore_disk_blocks", "Blocks on disk", read=lambda: float(self.num_blocks))
        metrics.gauge("kvstore_disk_bytes", "Bytes of blocks on disk", read=lambda: float(self.used_bytes))
        metrics.gauge("kvstore_disk_queue_blocks", "Blocks waiting to be written to disk", read=lambda: float(self.num_queued))

    @property
    def settled(self) -> bool:
        """Whether nothing waits to be written or saved."""
        return self._write_back is None or self._write_back.settled

    @property
    def num_blocks(self) -> int:
        return self.folder.index.num_blocks if self.folder else 0

    @property
    def used_bytes(self) -> int:
        return self.folder.index.used_bytes if self.folder else 0

    def orders(self) -> list[tuple[str, LeafOrder]]:
        """Return the fingerprints that have files, and the order of their blocks."""
        return [(file.fingerprint, file.order) for file in self.folder.index.files.values()] if self.folder else []

    @property
    def num_queued(self) -> int:
        """Blocks that are not on disk yet."""
        return self._write_back.num_queued if self._write_back else 0

    def usage(self) -> KvTier:
        return KvTier(
            name="disk",
            blocks=self.num_blocks,
            bytes=self.used_bytes,
            capacity_bytes=self._config.kv_disk_gb << 30,
            hit_blocks=self._counts.hits,
            evicted_blocks=self._counts.evicted,
            queued_blocks=self.num_queued,
            damaged_blocks=self._counts.damaged,
            problem=self._problem,
        )

    def tick(self) -> None:
        """Say once when the disk hangs, and when it answers again."""
        if not self._threads.are_stuck:
            if self._hangs:
                self._hangs, self._problem = False, ""
                log.info("kv_disk_answers", folder=self._config.kv_disk)
        elif not self._hangs:
            self._hangs, self._problem = True, f"{self._config.kv_disk} has not ended a write or read for {STUCK_S:g} s"
            log.error("kv_disk_off", reason=self._problem, until="it answers")

    # -- life

    async def open(self) -> None:
        """Open the folder, if there is to be one. Where it can't be used the store goes on without, and until it answers."""
        if not self._config.kv_disk:
            return
        self._began_at = self._clock()
        with anyio.move_on_after(OPEN_S):
            await anyio.to_thread.run_sync(self._try_to_open, abandon_on_cancel=True)
        if self._found is None:
            self._problem = f"{self._config.kv_disk} has not answered for {OPEN_S:g} s"
            log.error("kv_disk_off", reason=self._problem, until="it answers")
        else:
            self._take(self._found)

    def _try_to_open(self) -> None:
        """Blocks."""
        try:
            self._found = self._opened()
        except DiskUnavailable as error:
            self._found = error

    def _take(self, found: DiskFolder | DiskUnavailable) -> None:
        if isinstance(found, DiskUnavailable):
            self._problem = str(found)
            log.error("kv_disk_off", reason=self._problem)
            return
        self.folder, self._problem = found, ""
        self._promotion = Promotion(found, self._arenas, self._counts, self._clock, self._threads)
        idle = self._promotion.idle
        self._write_back = WriteBack(found, self._arenas, self._counts, self._clock, idle, self._threads)
        took_s = round(self._clock() - self._began_at, 2)
        log.info("kv_disk_open", folder=str(found.path), blocks=self.num_blocks, mib=self.used_bytes >> 20, took_s=took_s)

    def _opened(self) -> DiskFolder:
        """:raises DiskUnavailable: the folder can't be used."""
        try:
            path = Path(self._config.kv_disk).expanduser().absolute()
        except RuntimeError as error:  # ~user, and there is no such user
            raise DiskUnavailable(f"{self._config.kv_disk} can't be used: {error}") from error
        return DiskFolder.open(
            path,
            capacity_bytes=self._config.kv_disk_gb << 30,
            clock=self._clock,
            active_s=self._config.forget_after_s,
            weights=self._arenas.owners.weights,
        )

    async def run(self) -> None:
        """Write what is queued, and read what is looked up, until cancelled."""
        if self._config.kv_disk and self._found is None:
            while self._found is None:  # noqa: ASYNC110  # a thread that was given up says it, if it ever does
                await anyio.sleep(LOOK_AGAIN_S)
            self._take(self._found)
        if self._write_back is None or self._promotion is None:
            await anyio.sleep_forever()
            return
        async with anyio.create_task_group() as self._promotion.tasks:
            await self._write_back.run()

    async def flush(self) -> None:
        """Return when everything queued is written, or the disk takes nothing. What hangs is waited for no more."""
        try:
            if self._write_back is not None:
                await self._write_back.flush()
        finally:
            await self._threads.settle()

    def close(self) -> None:
        """Save the index, and let the folder go, unless a thread that was left behind has it."""
        if self.folder is not None and not self._threads.left_behind:
            self.folder.close()

    # -- what the store tells and asks

    def committed(self, arena: Arena, hashes: Sequence[bytes], context: RequestContext = NOBODY) -> None:
        """These blocks are readable in memory from now on. `context`: the request that they were computed for."""
        if self._write_back is not None:
            self._write_back.add(arena, hashes, context)

    def used(self, fingerprint: str, hashes: Sequence[bytes]) -> None:
        """A lookup found these blocks in memory: they are worth keeping on disk, too."""
        file = self.folder.index.files.get(fingerprint) if self.folder else None
        if self.folder is None or file is None:
            return
        for block_hash in reversed(hashes):
            self.folder.index.use(file, block_hash)

    def missing(self, lookup: BlockLookup, arena: Arena | None) -> range:
        """See `Promotion.missing`."""
        return self._promotion.missing(lookup, arena) if self._promotion else range(0)

    def coming(self, lookup: BlockLookup, start: int) -> int:
        """See `Promotion.coming`."""
        return self._promotion.coming(lookup, start) if self._promotion else 0

    async def bring(self, lookup: BlockLookup, missing: range) -> None:
        """See `Promotion.bring`."""
        if self._promotion is not None:
            await self._promotion.bring(lookup, missing)
