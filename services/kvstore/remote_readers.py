"""Workers of other hosts that read from this kvstore, with the setting `kv_transfer nixl`; without it nothing is done.

    DescribeMemory ─► MemoryDescribed          once: how to reach the staging buffer
    BlockLookup    ─► BlockLease               as for workers of this host
    StageBlocks    ─► copied and checked, in a thread ─► BlocksStaged ─► the worker reads over NIXL ─► UnstageBlocks
                      └ no room, or too much at once for one worker: Rejected, which is a miss

A copy in the staging buffer belongs to its lease, and ends with it, however the lease ends. While blocks are being copied they
are leased once more, and their extents are not given to others. A reader that is late finds other bytes, whose checksums are
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio
import anyio.to_thread

from common.protocol.errors import InvalidParameter, OutOfCredits, PenstockError, StaleHandle, TransportUnavailable
from common.protocol.explain_messages import WorkerEvent
from common.protocol.messages import Rejected
from common.protocol.transfer_messages import BlocksStaged, KvEndpoint, StageBlocks
from common.runtime import logs
from common.runtime.actor import Actor
from common.runtime.request_records import RequestRecords
from services.kvstore.config import KvstoreConfig
from services.kvstore.extents import Extent
from services.kvstore.holds import Hold
from services.kvstore.staging import Staging

log = logs.get("kvstore")

MAX_STAGES = 4
"""Copies that one worker may have here at once: it reads some while others are made."""
NUM_THREADS = 2
"""Copies made at once."""


@dataclass(slots=True)
class _Stage:
    """Blocks in the staging buffer. `is_copying`: a thread still writes there. `has_ended`: nobody wants it any more."""

    holder: str
    extents: list[Extent]
    hold: Hold
    is_copying: bool = True
    has_ended: bool = False


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
        self._stages: dict[str, _Stage] = {}
        self._limiter = anyio.CapacityLimiter(NUM_THREADS)

    async def open(self) -> None:
        """Take and register the staging buffer, if the setting says so.

        :raises ConfigError: NIXL is missing, can't be used as configured, or the memory can't be registered.
        """
        if self._config.kv_transfer != "nixl":
            return
        ref, config = self._actor.ref, self._config
        self._staging = await anyio.to_thread.run_sync(
            lambda: Staging(
                f"{ref.id}-{ref.epoch:x}",
                config.staging_mb << 20,
                interface=config.nixl_interface,
                transports=config.nixl_transports,
            )
        )
        metrics = self._actor.metrics
        self._num_bytes = metrics.counter("kvstore_staged_bytes_total", "KV bytes copied for workers of other hosts")
        self._refusals = metrics.counter(
            "kvstore_staging_refusals_total", "Blocks for workers of other hosts that were not copied, by reason", ["reason"]
        )
        metrics.gauge(
            "kvstore_staging_free_bytes", "Bytes of the staging buffer that hold nothing", read=lambda: float(self.free_bytes)
        )
        log.info("kv_endpoint", worker=ref.id, agent=self._staging.agent, staging_mb=config.staging_mb)

    @property
    def endpoints(self) -> list[KvEndpoint]:
        """What the heartbeat says of this."""
        return [] if self._staging is None else [KvEndpoint("nixl", self._staging.agent)]

    @property
    def free_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.extents.free_bytes

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
        if not question.stage or question.stage in self._stages:
            raise InvalidParameter("there are staged blocks of this name", param="stage")
        if sum(stage.holder == question.holder.id for stage in self._stages.values()) >= MAX_STAGES:
            self._refusals.labels("reader").inc()
            raise OutOfCredits(f"{question.holder.id} has {MAX_STAGES} copies here that it has not read")
        extents = staging.extents.take(question.end - question.start, hold.arena.block_bytes)
        if extents is None:
            self._refusals.labels("full").inc()
            raise OutOfCredits("the staging buffer is full")
        stage = _Stage(question.holder.id, extents, hold)
        self._stages[question.stage] = stage
        hold.stages.add(question.stage)
        slots = hold.slots[question.start : question.end]
        hold.arena.index.lease(slots)
        self._actor.task_group.start_soon(self._copy, staging, stage, question, slots, reply)

    def end(self, names: Iterable[str]) -> None:
        """Nobody reads these any more: free them, once they are not being written. Harmless twice."""
        for name in list(names):
            stage = self._stages.get(name)
            if stage is None:
                continue
            stage.has_ended = True
            stage.hold.stages.discard(name)
            if not stage.is_copying:
                self._free(name, stage)

    def check(self) -> None:
        """Count everything again. :raises AssertionError: bytes are taken that no copy has."""
        if self._staging is not None:
            self._staging.extents.check()
            taken = sum(extent.num_bytes for stage in self._stages.values() for extent in stage.extents)
            assert self.free_bytes + taken == self._staging.extents.num_bytes, "extents leaked"

    async def _copy(self, staging: Staging, stage: _Stage, question: StageBlocks, slots: list[int], reply: str) -> None:
        arena, began_at = stage.hold.arena, self._actor.clock()
        hashes, checksums = arena.index.hashes_of(slots), arena.index.checksums_of(slots)
        done = -1
        try:
            copy = lambda: staging.copy(arena, slots, checksums, stage.extents)  # noqa: E731
            done = await anyio.to_thread.run_sync(copy, limiter=self._limiter)
        except OSError as error:
            log.warning("blocks_not_staged", segment=arena.segment.name, reason=error.strerror)
        finally:
            if 0 <= done < len(slots):
                self._damaged(stage.hold, [hashes[done]])
            arena.index.end_lease(slots)
            stage.is_copying = False
            if done <= 0 or stage.has_ended:
                stage.hold.stages.discard(question.stage)
                self._free(question.stage, stage)
        if question.stage not in self._stages:
            error = StaleHandle("the lease has ended" if stage.has_ended else "the first block can't be read")
            self._refusals.labels(error.code).inc()
            self._reject(reply, error)
            return
        num_bytes = done * arena.block_bytes
        self._num_bytes.inc(num_bytes)
        event = WorkerEvent("stage", began_at, self._actor.clock(), num_bytes=num_bytes, peer=question.holder.id)
        self._records.note(stage.hold.context, event)
        extents = [(staging.address(extent), extent.num_blocks) for extent in stage.extents]
        self._actor.answer(
            reply,
            BlocksStaged(
                store=self._actor.ref,
                stage=question.stage,
                block_bytes=arena.block_bytes,
                extents=extents,
                checksums=checksums[:done],
            ),
        )

    def _reject(self, reply: str, error: PenstockError) -> None:
        self._actor.answer(reply, Rejected(worker=self._actor.ref, code=error.code, message=str(error)))

    def _free(self, name: str, stage: _Stage) -> None:
        del self._stages[name]
        assert self._staging is not None
        self._staging.extents.give_back(stage.extents)
