"""The owner's side of hand-offs to other hosts whose blocks are in a GPU's memory: copies of leased blocks in host memory.

    StageLeased ─► the GPU's blocks ─► pinned memory ─► staging buffer, checksums ─► BlocksStaged ─► UnstageBlocks
                   └ no such lease, or no room now: Rejected

A copy ends with its lease, however that ends (`common/transfer/staging.py`). While it is made, its blocks are leased once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

from common.cache.grouped_pool import HOLE, GroupedPool
from common.protocol.errors import InvalidParameter, PenstockError, StaleHandle
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message, Rejected
from common.protocol.transfer_messages import StageLeased
from common.transfer.block_memory import BlockMemory
from common.transfer.checksums import crc32
from common.transfer.staging import NUM_THREADS, StagedCopy, Staging


class Owner(Protocol):
    """What this needs of its worker."""

    ref: WorkerRef
    pool: GroupedPool
    task_group: TaskGroup

    def answer(self, reply: str, message: Message) -> None: ...
    def wake(self) -> None: ...


class StagedHandoffs:
    """`memories`: the worker's blocks of each cache group."""

    def __init__(self, staging: Staging, memories: Sequence[BlockMemory]) -> None:
        self.staging = staging
        self._memories = memories
        self._names: dict[str, set[str]] = {}
        """Of the copies of each lease."""
        self._limiter = anyio.CapacityLimiter(NUM_THREADS)

    def stage(self, worker: Owner, question: StageLeased, leased: Sequence[Sequence[int]] | None, reply: str) -> None:
        """Begin to copy blocks; the answer is sent when they are there, or at once if they can't be copied.

        `leased`: of each cache group, the blocks that the lease covers; None if the one who asks has no such lease.
        """
        try:
            tables = self._checked(worker.pool, question, leased)
            names = self._names.setdefault(question.lease, set())
            size = self._memories[question.group].block_bytes
            copy = self.staging.begin(question.stage, question.holder, len(question.blocks), size, names)
        except PenstockError as error:
            self._reject(worker, reply, error)
            return
        worker.pool.lease(tables)
        worker.task_group.start_soon(self._copy, worker, copy, question, tables, reply)

    def lease_ended(self, lease: str) -> None:
        """Free the copies of a lease. Harmless for one that has none."""
        self.staging.end(self._names.pop(lease, ()))

    def end(self, names: Iterable[str]) -> None:
        """Nobody reads these any more. Harmless twice."""
        self.staging.end(names)

    def _checked(self, pool: GroupedPool, question: StageLeased, leased: Sequence[Sequence[int]] | None) -> list[list[int]]:
        """Return the blocks that are asked for, as tables. :raises PenstockError: they are not those of the lease."""
        if leased is None:
            raise StaleHandle("there is no such lease to read from")
        if not 0 <= question.group < len(leased) or not question.blocks:
            raise InvalidParameter(f"the lease has {len(leased)} cache groups", param="group")
        if HOLE in question.blocks or not set(question.blocks) <= set(leased[question.group]):
            raise StaleHandle("the lease does not cover these blocks")
        if pool.groups[question.group].pool.generations_of(question.blocks) != question.generations:
            raise StaleHandle("blocks were reused since the handle was made")
        return [question.blocks if group == question.group else [] for group in range(len(leased))]

    async def _copy(self, worker: Owner, copy: StagedCopy, question: StageLeased, tables: list[list[int]], reply: str) -> None:
        rows, blocks = self.staging.rows(copy), question.blocks
        checksums = [0] * len(blocks)

        def take(content: np.ndarray, indices: Sequence[int], part: range) -> None:
            for index, i in zip(indices, part, strict=True):
                checksums[i] = crc32(content[index])
                rows[i][:] = content[index]

        num_good, is_wanted = 0, False
        error: PenstockError = StaleHandle("the lease has ended")
        try:
            memory = self._memories[question.group]
            await anyio.to_thread.run_sync(memory.read, blocks, take, limiter=self._limiter)
            num_good = len(blocks)
        except PenstockError as raised:
            error = raised
        finally:
            worker.pool.end_lease(tables)
            is_wanted = self.staging.copied(copy, num_good)
            worker.wake()  # somebody may have waited for these blocks
        if is_wanted:
            worker.answer(reply, self.staging.answer(copy, worker.ref, checksums))
        else:
            self.staging.refused(error.code)
            self._reject(worker, reply, error)

    def _reject(self, worker: Owner, reply: str, error: PenstockError) -> None:
        worker.answer(reply, Rejected(worker=worker.ref, code=error.code, message=str(error)))
