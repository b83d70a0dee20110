"""Host memory from which readers of other hosts take copies of blocks: which of it is free, and whose the rest is.

    begin ─► rows, which a thread fills ─► copied ─► the reader is told where they are ─► end
       └ no room, or too much at once for one reader: OutOfCredits, nothing is taken

Blocks themselves can't be registered where their memory comes and goes, or is a GPU's. So this buffer alone is registered, for
the life of the process. A copy belongs to a lease, and ends with it, however the lease ends. While a thread writes it, its
memory is not given to others. A reader that is late finds other bytes, whose checksums are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from common.protocol.errors import InvalidParameter, OutOfCredits
from common.protocol.handles import WorkerRef
from common.protocol.transfer_messages import BlocksStaged, MemoryDescribed
from common.runtime.metrics import Metrics
from common.transfer.extents import Extent, Extents
from common.transfer.nixl import Agent, SharedMemory

MAX_COPIES = 4
"""Copies that one reader may have here at once: it reads some while others are made."""
NUM_THREADS = 2
"""Copies that an owner makes at once."""


@dataclass(slots=True, eq=False)
class StagedCopy:
    """Copies of blocks. `siblings`: names of all copies of its lease. `is_copying`: a thread still writes them. `has_ended`:
    nobody wants them any more."""

    name: str
    holder: str
    block_bytes: int
    extents: list[Extent]
    siblings: set[str]
    is_copying: bool = True
    has_ended: bool = False


class Staging:
    """`num_bytes` of memory. Only its rows are for other threads than the actor's."""

    def __init__(self, agent: Agent, num_bytes: int, metrics: Metrics, owner: str) -> None:
        """`owner`: with which the names of its metrics begin. :raises ConfigError: the memory can't be registered."""
        self.agent = agent.name
        self._extents = Extents(num_bytes)
        self._memory = np.zeros(num_bytes, np.uint8)
        agent.register(self._memory)
        self._shared = SharedMemory(agent, [])
        self._copies: dict[str, StagedCopy] = {}
        self._num_bytes = metrics.counter(f"{owner}_staged_bytes_total", "KV bytes copied for workers of other hosts")
        self._refusals = metrics.counter(
            f"{owner}_staging_refusals_total", "Blocks for workers of other hosts that were not copied, by reason", ["reason"]
        )
        metrics.gauge(
            f"{owner}_staging_free_bytes", "Bytes of the staging buffer that hold nothing", read=lambda: float(self.free_bytes)
        )

    @property
    def free_bytes(self) -> int:
        return self._extents.free_bytes

    def describe(self, worker: WorkerRef) -> MemoryDescribed:
        """Return how workers of other hosts reach the buffer."""
        described = self._shared.describe(worker)
        return msgspec.structs.replace(described, staging=self._memory.ctypes.data, staging_bytes=self._memory.nbytes)

    def begin(self, name: str, holder: WorkerRef, num_blocks: int, block_bytes: int, siblings: set[str]) -> StagedCopy:
        """Take memory for a copy that `holder` calls `name`; `copied` must follow. `siblings`: see `StagedCopy`.

        :raises InvalidParameter: there is a copy of this name. :raises OutOfCredits: there is no room now.
        """
        if not name or name in self._copies:
            raise InvalidParameter("there are staged blocks of this name", param="stage")
        if sum(copy.holder == holder.id for copy in self._copies.values()) >= MAX_COPIES:
            self._refusals.labels("reader").inc()
            raise OutOfCredits(f"{holder.id} has {MAX_COPIES} copies here that it has not read")
        extents = self._extents.take(num_blocks, block_bytes)
        if extents is None:
            self._refusals.labels("full").inc()
            raise OutOfCredits("the staging buffer is full")
        copy = StagedCopy(name, holder.id, block_bytes, extents, siblings)
        self._copies[name] = copy
        siblings.add(name)
        return copy

    def rows(self, copy: StagedCopy) -> list[np.ndarray]:
        """Return the memory of each block of a copy, uint8 [block_bytes]."""
        size = copy.block_bytes
        begins = (extent.offset + row * size for extent in copy.extents for row in range(extent.num_blocks))
        return [self._memory[begin : begin + size] for begin in begins]

    def copied(self, copy: StagedCopy, num_good: int) -> bool:
        """No thread writes the copy any more. `num_good`: its blocks, from the first on, that may be read; with none it ends.

        Returns whether it is still wanted.
        """
        copy.is_copying = False
        if num_good <= 0 or copy.has_ended:
            copy.siblings.discard(copy.name)
            self._free(copy)
            return False
        self._num_bytes.inc(num_good * copy.block_bytes)
        return True

    def refused(self, reason: str) -> None:
        """Count a copy that was begun and can't be read."""
        self._refusals.labels(reason).inc()

    def answer(self, copy: StagedCopy, owner: WorkerRef, checksums: list[int]) -> BlocksStaged:
        """Return where a copy is. `checksums`: of its good blocks."""
        extents = [(self._memory.ctypes.data + extent.offset, extent.num_blocks) for extent in copy.extents]
        return BlocksStaged(owner=owner, stage=copy.name, block_bytes=copy.block_bytes, extents=extents, checksums=checksums)

    def end(self, names: Iterable[str]) -> None:
        """Nobody reads these any more: free them, once they are not being written. Harmless twice."""
        for name in list(names):
            copy = self._copies.get(name)
            if copy is None:
                continue
            copy.has_ended = True
            copy.siblings.discard(name)
            if not copy.is_copying:
                self._free(copy)

    def check(self) -> None:
        """Count everything again. :raises AssertionError: bytes are taken that no copy has."""
        self._extents.check()
        taken = sum(extent.num_bytes for copy in self._copies.values() for extent in copy.extents)
        assert self.free_bytes + taken == self._extents.num_bytes, "extents leaked"

    def _free(self, copy: StagedCopy) -> None:
        del self._copies[copy.name]
        self._extents.give_back(copy.extents)
