"""The reader's side of hand-offs from workers of other hosts: blocks that are read where they are, or that their owner stages.

    pull ─► the owner's blocks are in host memory: read from there
         └► in a GPU's: for some MiB at a time, several at once, StageLeased ─► read over NIXL ─► checksums ─► own blocks
                            └ no room at the owner: asked again after a pause, and given up after `nixl_timeout_s`

Own blocks may be in a GPU's memory, too. What one reader asks an owner for at once is bounded here, by what the owner allows.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import anyio
import numpy as np

from common.protocol.errors import Cancelled, OutOfCredits, PenstockError, TransportUnavailable
from common.protocol.handles import WorkerRef
from common.protocol.transfer_messages import StageLeased
from common.runtime.actor import Actor
from common.transfer.awaited import Awaited
from common.transfer.base import LocalBlocks, RemoteBlocks, Transport
from common.transfer.block_memory import BlockMemory
from common.transfer.nixl import NixlTransport
from common.transfer.paths import KvPath
from common.transfer.staging import MAX_COPIES
from common.transfer.transfer import Transfer
from common.worker.staged_reads import NUM_READERS, StagedReads

PAUSE_FIRST_S, PAUSE_MOST_S = 0.01, 0.2
"""Between two questions to an owner that has no room."""


class GroupMemory(NamedTuple):
    """This worker's blocks of a cache group."""

    group: int
    memory: BlockMemory


class StagedPulls:
    """`groups`: this worker's cache groups by their fingerprints. `direct`: reads blocks in other hosts' memory.
    `timeout_s`: for an owner's answer, and to wait for room there."""

    def __init__(
        self,
        actor: Actor,
        nixl: NixlTransport,
        direct: Transport,
        reads: StagedReads,
        groups: Mapping[str, GroupMemory],
        *,
        timeout_s: float,
    ) -> None:
        self.actor = actor
        self.nixl = nixl
        self.direct = direct
        self.reads = reads
        self.groups = groups
        self.timeout_s = timeout_s
        self._limiters: WeakValueDictionary[str, anyio.CapacityLimiter] = WeakValueDictionary()

    def limiter(self, agent: str) -> anyio.CapacityLimiter:
        """Return what bounds the copies at an owner; it lives as long as someone has it."""
        limiter = self._limiters.get(agent)
        if limiter is None:
            self._limiters[agent] = limiter = anyio.CapacityLimiter(MAX_COPIES)
        return limiter


class Handoff:
    """A `Transport` to an owner on another host, for what one of its leases covers. `agent`: the owner's."""

    def __init__(self, pulls: StagedPulls, owner: WorkerRef, agent: str, lease: str) -> None:
        self.pulls = pulls
        self.owner = owner
        self.agent = agent
        self.lease = lease

    @property
    def slice_bytes(self) -> int:
        """See `Transport.slice_bytes`."""
        return self.pulls.direct.slice_bytes

    def path_of(self, source: RemoteBlocks) -> KvPath:
        """See `Transport.path_of`."""
        return self.pulls.direct.path_of(source)

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`. What the owner would have to stage can't be read so."""
        return self.pulls.direct.read(source, into, into_blocks)

    def begin(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.begin`."""
        return None

    def prepare(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.prepare`."""
        return None

    def progress_of(self, host: str, segment: str, fingerprint: str) -> Callable[[], int] | None:
        """See `Transport.progress_of`."""
        return None

    def pull(self, source: RemoteBlocks, target: LocalBlocks, after: Awaited | None = None) -> Transfer:
        """See `Transport.pull`."""
        assert after is None, "no progress can be read of another host"
        staging_bytes = self.pulls.nixl.staging_bytes(self.agent)
        if not staging_bytes:
            return self.pulls.direct.pull(source, target)
        return _StagedTransfer(self, source, target, staging_bytes)


class _StagedTransfer(Transfer):
    """Copies parts, `NUM_READERS` at once."""

    def __init__(self, handoff: Handoff, source: RemoteBlocks, target: LocalBlocks, staging_bytes: int) -> None:
        super().__init__(handoff.read, source, target)
        self._handoff = handoff
        self._staging_bytes = staging_bytes
        self._copied_parts: dict[int, int] = {}

    async def _copied(self) -> int:
        pulls, num_blocks = self._handoff.pulls, len(self.source.blocks)
        group = pulls.groups.get(self.source.fingerprint)
        if group is None or group.memory.block_bytes > min(pulls.nixl.slice_bytes, self._staging_bytes):
            raise TransportUnavailable(f"{self._handoff.owner.id} stages blocks that can't be read here")
        part_bytes = min(pulls.nixl.slice_bytes, self._staging_bytes // MAX_COPIES)
        size = max(1, part_bytes // group.memory.block_bytes)
        todo = deque(range(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size))
        limiter = pulls.limiter(self._handoff.agent)
        failures: list[PenstockError] = []

        async def copy_parts() -> None:
            while todo:
                part = todo.popleft()
                try:
                    async with limiter:
                        await self._copy_part(group, part)
                except PenstockError as error:
                    failures.append(error)
                    todo.clear()

        async with anyio.create_task_group() as tasks:
            for _ in range(min(NUM_READERS, len(todo))):
                tasks.start_soon(copy_parts)
        if failures:
            raise failures[0]
        return self.num_bytes

    async def _copy_part(self, group: GroupMemory, part: range) -> None:
        """:raises PenstockError: the blocks of the part hold anything. :raises Cancelled: they were not begun."""
        handoff, pulls = self._handoff, self._handoff.pulls
        mine, pause_s = slice(part.start, part.stop), PAUSE_FIRST_S
        ends_at = pulls.actor.clock() + pulls.timeout_s
        while True:
            if self.is_cancelled:
                raise Cancelled(f"the copy was given up after {self.num_blocks} of {len(self.source.blocks)} blocks")
            question = StageLeased(
                holder=pulls.actor.ref,
                lease=handoff.lease,
                stage=os.urandom(8).hex(),
                group=group.group,
                blocks=list(self.source.blocks[mine]),
                generations=list(self.source.generations[mine]),
            )
            into = list(self.target.blocks[mine])
            try:
                await pulls.reads.read(
                    handoff.owner, handoff.agent, question, group.memory, into, None, timeout_s=pulls.timeout_s
                )
            except OutOfCredits:
                if pulls.actor.clock() >= ends_at:
                    raise
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MOST_S)
            else:
                break
        self.num_bytes += len(part) * group.memory.block_bytes
        self._copied_parts[part.start] = len(part)
        while count := self._copied_parts.get(self.num_blocks):  # a part ends where the next begins
            self.num_blocks += count
