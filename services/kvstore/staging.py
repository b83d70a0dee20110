"""A kvstore's memory that workers of other hosts read over NIXL: blocks are copied there for a reader.

Arenas come and go, and give their memory back block by block; memory that is registered must stay. So this buffer alone is
registered, once, for the life of the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from common.protocol.handles import WorkerRef
from common.protocol.transfer_messages import MemoryDescribed
from common.transfer.checksums import crc32
from common.transfer.nixl import SharedMemory
from common.transfer.nixl_agent import NixlAgent
from services.kvstore.arena import Arena
from services.kvstore.extents import Extent, Extents


class Staging:
    """`num_bytes` of memory, and which of it is free. `agent`: its name among NIXL's agents."""

    def __init__(self, agent: str, num_bytes: int, *, interface: str, transports: str) -> None:
        """:raises ConfigError: NIXL is missing, can't be used as configured, or the memory can't be registered."""
        made = NixlAgent(agent, interface=interface, transports=transports)
        self.agent = agent
        self.extents = Extents(num_bytes)
        self._memory = np.zeros(num_bytes, np.uint8)
        made.register(self._memory)
        self._shared = SharedMemory(made, [])

    def address(self, extent: Extent) -> int:
        """Return where an extent begins, as readers of other hosts name it."""
        return self._memory.ctypes.data + extent.offset

    def describe(self, worker: WorkerRef) -> MemoryDescribed:
        """Return how workers of other hosts reach the buffer."""
        described = self._shared.describe(worker)
        return msgspec.structs.replace(described, staging=self._memory.ctypes.data, staging_bytes=self._memory.nbytes)

    def copy(self, arena: Arena, slots: Sequence[int], checksums: Sequence[int], extents: Sequence[Extent]) -> int:
        """Copy slots of an arena to extents. Blocks: call it in a thread, with the slots leased.

        Returns how many blocks, from the first on, have the right checksum in the buffer. :raises OSError: one can't be read.
        """
        done, size = 0, arena.block_bytes
        for extent in extents:
            for row in range(extent.num_blocks):
                begin = extent.offset + row * size
                block = self._memory[begin : begin + size].data
                arena.segment.read_block(slots[done], block)
                if crc32(block) != checksums[done]:
                    return done
                done += 1
        return done
