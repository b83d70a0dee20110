"""Workers of other hosts that read from this kvstore, with the setting `kv_transfer nixl`; without it nothing is done.

    DescribeMemory ─► MemoryDescribed          once: how to reach the staging buffer
    BlockLookup    ─► BlockLease               as for workers of this host
    StageBlocks    ─► copied and checked, in a thread ─► BlocksStaged ─► the worker reads over NIXL ─► UnstageBlocks
                      └ no room, or too much at once for one worker: Rejected, which is a miss

Arenas come and go, and give their memory back block by block, so that they can't be registered: blocks are copied to a staging
buffer (`common/transfer/staging.py`). While they are being copied they are leased once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import anyio
import anyio.to_thread
import numpy as np

from common.protocol.errors import InvalidParameter, PenstockError, StaleHandle, TransportUnavailable
from common.protocol.explain_messages import WorkerEvent
from common.protocol.messages import Rejected
from common.protocol.transfer_messages import KvEndpoint, StageBlocks
from common.runtime import logs
from common.runtime.actor import Actor
from common.runtime.request_records import RequestRecords
from common.transfer.checksums import crc32
from common.transfer.nixl_agent import NixlAgent
from common.transfer.staging import NUM_THREADS, StagedCopy, Staging
from services.kvstore.arena import Arena
from services.kvstore.config import KvstoreConfig
from services.kvstore.holds import Hold

log = logs.get("kvstore")


class RemoteReaders:
    """Of one kvstore. `damaged`: called with a hold and the hashes of blocks that failed their checksum."""

    def __init__(
        self, actor: Actor, config: KvstoreConfig, records: RequestRecords, damaged: Callable[[Hold, list[bytes]], None]
    ) -> None:
        self._actor = actor
        self._config = config
        self._records = records
        self._damaged = damaged
        self._staging: Staging | None = None
        self._limiter = anyio.CapacityLimiter(NUM_THREADS)

    async def open(self) -> None:
        """Take and register the staging buffer, if the setting says so.

        :raises ConfigError: NIXL is missing, can't be used as configured, or the memory can't be registered.
        """
        if self._config.kv_transfer != "nixl":
            return
        ref, config = self._actor.ref, self._config

        def opened() -> Staging:
            name = f"{ref.id}-{ref.epoch:x}"
            agent = NixlAgent(name, interface=config.nixl_interface, transports=config.nixl_transports)
            return Staging(agent, config.staging_mb << 20, self._actor.metrics, "kvstore")

        self._staging = await anyio.to_thread.run_sync(opened)
        log.info("kv_endpoint", worker=ref.id, agent=self._staging.agent, staging_mb=config.staging_mb)

    @property
    def endpoints(self) -> list[KvEndpoint]:
        """What the heartbeat says of this."""
        return [] if self._staging is None else [KvEndpoint("nixl", self._staging.agent)]

    @property
    def free_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.free_bytes

    def describe(self, reply: str) -> None:
        """Answer DescribeMemory."""
        if self._staging is None:
            code, message = TransportUnavailable.code, "this kvstore can't be read from other hosts"
            self._actor.answer(reply, Rejected(worker=self._actor.ref, code=code, message=message))
        else:
            self._actor.answer(reply, self._staging.describe(self._actor.ref))

    def stage(self, question: StageBlocks, hold: Hold | None, reply: str) -> None:
        """Begin to copy blocks of a lease; the answer is sent when they are there. `hold`: what the lease covers, None if the
        one who asks has no such lease.

        :raises PenstockError: nothing is copied.
        """
        staging = self._staging
        if staging is None:
            raise TransportUnavailable("this kvstore can't be read from other hosts")
        if hold is None or hold.writing:
            raise StaleHandle("there is no such lease to read from")
        if not 0 <= question.start < question.end <= len(hold.slots):
            raise InvalidParameter(f"the lease has {len(hold.slots)} blocks", param="start")
        slots = hold.slots[question.start : question.end]
        copy = staging.begin(question.stage, question.holder, len(slots), hold.arena.block_bytes, hold.stages)
        hold.arena.index.lease(slots)
        self._actor.task_group.start_soon(self._copy, staging, copy, hold, slots, reply)

    def end(self, names: Iterable[str]) -> None:
        """Nobody reads these any more: free them, once they are not being written. Harmless twice."""
        if self._staging is not None:
            self._staging.end(names)

    def check(self) -> None:
        """Count everything again. :raises AssertionError: bytes are taken that no copy has."""
        if self._staging is not None:
            self._staging.check()

    async def _copy(self, staging: Staging, copy: StagedCopy, hold: Hold, slots: list[int], reply: str) -> None:
        arena, began_at = hold.arena, self._actor.clock()
        hashes, checksums = arena.index.hashes_of(slots), arena.index.checksums_of(slots)
        done, is_wanted = -1, False
        try:
            copying = lambda: copy_slots(arena, slots, checksums, staging.rows(copy))  # noqa: E731
            done = await anyio.to_thread.run_sync(copying, limiter=self._limiter)
        except OSError as error:
            log.warning("blocks_not_staged", segment=arena.segment.name, reason=error.strerror)
        finally:
            if 0 <= done < len(slots):
                self._damaged(hold, [hashes[done]])
            arena.index.end_lease(slots)
            is_wanted = staging.copied(copy, done)
        if not is_wanted:
            error = StaleHandle("the lease has ended" if copy.has_ended else "the first block can't be read")
            staging.refused(error.code)
            self._reject(reply, error)
            return
        num_bytes = done * arena.block_bytes
        event = WorkerEvent("stage", began_at, self._actor.clock(), num_bytes=num_bytes, peer=copy.holder)
        self._records.note(hold.context, event)
        self._actor.answer(reply, staging.answer(copy, self._actor.ref, checksums[:done]))

    def _reject(self, reply: str, error: PenstockError) -> None:
        self._actor.answer(reply, Rejected(worker=self._actor.ref, code=error.code, message=str(error)))


def copy_slots(arena: Arena, slots: Sequence[int], checksums: Sequence[int], rows: Sequence[np.ndarray]) -> int:
    """Copy leased slots of an arena to `rows`. Blocks: call it in a thread.

    Returns how many blocks, from the first on, have the right checksum there. :raises OSError: one can't be read.
    """
    for done, (slot, checksum, row) in enumerate(zip(slots, checksums, rows, strict=True)):
        arena.segment.read_block(slot, row.data)
        if crc32(row.data) != checksum:
            return done
    return len(slots)
