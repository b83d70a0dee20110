"""Large blocks of a GPU on their way to a kvstore's memory and back: past the stage's slots where that memory is pinned, else
through them.

    pinned       the copy engine alone, checksums on the GPU                       `direct_copies.py`
    not pinned   slots of pinned memory, copied and checked by all threads         `stage_ring.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.protocol.errors import TransportUnavailable
from common.runtime import logs
from common.transfer.checked_copies import CopyIn, CopyOut, checksums_of
from common.transfer.direct_copies import DirectCopies
from common.transfer.paths import Operation
from common.transfer.stage_ring import Slot, StageRing
from common.transfer.stage_threads import StageThreads

if TYPE_CHECKING:
    import torch

log = logs.get("transfer")


class Copied(NamedTuple):
    """How many blocks, from the first on, are good, and the checksums of those."""

    num_good: int
    checksums: list[int]


class LargeBlocks:
    """Copies in threads of a stage. `pinned`: where a kvstore's memory is to be pinned; None: nowhere."""

    def __init__(
        self,
        ring: StageRing,
        threads: StageThreads[Slot],
        slot_bytes: int,
        streams: Sequence[dict[Operation, torch.cuda.Stream]],
        *,
        pins: bool,
    ) -> None:
        by_operation: dict[Operation, list[torch.cuda.Stream]] = {
            "read": [of["read"] for of in streams if of],
            "write": [of["write"] for of in streams if of],
        }
        self._ring, self._threads, self._slot_bytes = ring, threads, slot_bytes
        self._direct = DirectCopies(ring, by_operation)
        self.pinned = ring.pinned_memory() if pins else None

    def check_pinned(self, pools: Sequence[torch.Tensor]) -> None:
        """Have nothing pinned where checksums on the GPU are wrong or can't be computed. Compiles what computes them."""
        if self.pinned is None:
            return
        try:
            for pool in pools:
                blocks = np.unique(np.array([0, len(pool) - 1], np.int64))
                content = pool[blocks.tolist()].cpu().numpy()
                if self._direct.checksums(pool, blocks).tolist() != checksums_of(content, range(len(blocks))):
                    raise TransportUnavailable("checksums on the GPU are wrong")
        except Exception as error:  # a kernel that does not compile, for instance
            log.warning("kvstore_not_pinned", reason=str(error), consequence="KV passes to and from it through the stage")
            self.pinned = None

    def copy(self, pool: torch.Tensor, blocks: Sequence[int], copy: CopyIn | CopyOut) -> Copied:
        """Copy blocks of a pool [num_blocks, block_bytes] as `copy` says.

        :raises TransportUnavailable: the stage is closed, or the GPU failed.
        """
        mine, theirs = np.array(blocks, np.int64), np.array(copy.blocks, np.int64)
        wanted = np.array(copy.checksums, np.int64) if isinstance(copy, CopyIn) else np.zeros(len(mine), np.int64)
        assert len(mine) == len(theirs) == len(wanted) and copy.memory.shape[1] == pool.shape[1]
        assert not len(mine) or (theirs.min() >= 0 and theirs.max() < len(copy.memory))
        if self.pinned is None:
            return self._in_ring(pool, mine, copy)
        addresses = copy.memory.ctypes.data + theirs * copy.memory.strides[0]
        with self.pinned.used(addresses, pool.shape[1]) as pinned:
            if not pinned.any():
                return self._in_ring(pool, mine, copy)
            direct, sums, num_good = np.flatnonzero(pinned), wanted.copy(), len(mine)
            sums[direct] = self._past_slots(pool, mine[direct], addresses[direct], _operation(copy))
        if isinstance(copy, CopyIn):
            num_good = min([num_good, *np.flatnonzero(sums != wanted)[:1].tolist()])
        others = np.flatnonzero(~pinned[:num_good])
        if len(others):
            rest = self._in_ring(pool, mine[others], _part_of(copy, others))
            sums[others] = rest.checksums
            num_good = min([num_good, *others[rest.num_good :][:1].tolist()])
        return Copied(num_good, sums.tolist())

    def _past_slots(
        self, pool: torch.Tensor, blocks: NDArray[np.int64], addresses: NDArray[np.int64], operation: Operation
    ) -> NDArray[np.int64]:
        """Return the blocks' checksums."""
        found: list[NDArray[np.int64]] = []

        def work(_slot: Slot, _paused: np.ndarray) -> None:
            found.append(self._direct.copy(pool, blocks, addresses, operation))

        self._threads.run(1, work, lambda: not found, operation)  # who waits there notices that the engine is given up
        return found[0]

    def _in_ring(self, pool: torch.Tensor, blocks: NDArray[np.int64], copy: CopyIn | CopyOut) -> Copied:
        call, operation = self._ring.call(pool, blocks.tolist(), copy, self._slot_bytes), _operation(copy)

        def work(slot: Slot, paused: np.ndarray) -> None:
            assert slot.handles is not None
            try:
                call.work(slot.host, slot.handles, paused)
            except TransportUnavailable:
                with suppress(RuntimeError):  # it is what failed
                    slot.streams[operation].synchronize()
                raise

        self._threads.run(call.num_blocks, work, lambda: call.more, operation)
        return Copied(call.num_good, call.checksums)


def _operation(copy: CopyIn | CopyOut) -> Operation:
    return "write" if isinstance(copy, CopyIn) else "read"


def _part_of(copy: CopyIn | CopyOut, positions: NDArray[np.int64]) -> CopyIn | CopyOut:
    blocks = [copy.blocks[position] for position in positions]
    if isinstance(copy, CopyIn):
        return CopyIn(copy.memory, blocks, [copy.checksums[position] for position in positions])
    return CopyOut(copy.memory, blocks)
