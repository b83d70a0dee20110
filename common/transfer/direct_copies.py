"""Copies between a kvstore's pinned memory and a GPU's blocks that the copy engine makes alone.

    write   memory ─► blocks ─► their checksums, on the GPU
    read    blocks ─► memory;   the blocks' checksums, on the GPU

So checksums are of what is in the GPU's memory, and no processor of the host touches a byte. One stream copies part after part,
and another one computes the checksums of each that has arrived while the next is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.transfer.paths import Operation
from common.transfer.stage_ring import StageRing, ended

if TYPE_CHECKING:
    import torch

PART_BYTES = 32 << 20
"""Copied in 0.6 ms where a link is fast, and then checked in half of that. Shorter parts leave programs idle."""
PROGRAMS = 32  # they check faster than a link copies; the other multiprocessors belong to the step that runs meanwhile


class DirectCopies:
    """`streams`: of each direction two, to copy and to check; none on a CPU."""

    def __init__(self, ring: StageRing, streams: Mapping[Operation, Sequence[torch.cuda.Stream]]) -> None:
        self._ring, self._streams = ring, streams
        self._launch_locks: dict[Operation, threading.Lock] = {"read": threading.Lock(), "write": threading.Lock()}
        self._reads_in_turn = threading.Lock()

    def copy(
        self, pool: torch.Tensor, blocks: NDArray[np.int64], addresses: NDArray[np.int64], operation: Operation
    ) -> NDArray[np.int64]:
        """Copy from pinned memory at `addresses` to blocks of a pool, uint8 [num_blocks, block_bytes], or from blocks to memory
        ("read"); return the blocks' checksums, int64. Blocks until all of it has ended.

        :raises TransportUnavailable: the GPU failed.
        """
        assert len(blocks) == len(addresses) and (not len(blocks) or (blocks.min() >= 0 and blocks.max() < len(pool)))
        places = pool.data_ptr() + blocks * pool.shape[1]
        if operation == "write":
            return self._in_parts(pool, blocks, (places, addresses), operation)
        with self._reads_in_turn:  # side by side they are slower, all together (docs/performance/kv.md)
            return self._in_parts(pool, blocks, (addresses, places), operation)

    def checksums(self, pool: torch.Tensor, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the checksums of blocks. Otherwise as `copy`."""
        return self._in_parts(pool, blocks, None, "read")

    def _in_parts(
        self,
        pool: torch.Tensor,
        blocks: NDArray[np.int64],
        places: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
        operation: Operation,
    ) -> NDArray[np.int64]:
        """`places`: the addresses to which and from which blocks are copied first."""
        import torch

        from common.ops.kv.block_crc import block_crc

        block_bytes, on_gpu = pool.shape[1], pool.is_cuda
        copying, checking = self._streams[operation] or (None, None)
        size = max(4, PART_BYTES // block_bytes // 4 * 4)  # a kernel is compiled anew for arrays that begin elsewhere
        parts = [slice(start, start + size) for start in range(0, len(blocks), size)]
        with ended((copying, checking), self._launch_locks[operation]), torch.inference_mode(), torch.cuda.stream(checking):
            copied: list[torch.cuda.Event] = []  # of each part
            if places is not None:
                copied = self._launch_copies(*places, parts, block_bytes, copying)
            ids = torch.from_numpy(blocks)
            ids = ids.pin_memory().to(pool.device, non_blocking=True) if on_gpu else ids
            found = torch.empty(len(blocks), dtype=torch.int32, device=pool.device)
            sums = torch.empty(len(blocks), dtype=torch.int32, pin_memory=on_gpu)  # of this stream's GPU
            for number, part in enumerate(parts):
                if checking is not None and operation == "write":  # what is read is there already
                    checking.wait_event(copied[number])
                block_crc(pool, ids[part], found[part], max_programs=PROGRAMS)
            sums.copy_(found, non_blocking=True)
        return sums.numpy().astype(np.int64) & 0xFFFFFFFF

    def _launch_copies(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        parts: Sequence[slice],
        block_bytes: int,
        stream: torch.cuda.Stream | None,
    ) -> list[torch.cuda.Event]:
        """Launch the copies of all parts; return an event for the end of each, none on a CPU."""
        import torch

        ends: list[torch.cuda.Event] = []
        for part in parts:
            handle = 0 if stream is None else stream.cuda_stream
            self._ring.copy_each(targets[part], sources[part], block_bytes, handle)
            if stream is not None:
                end = torch.cuda.Event()
                end.record(stream)
                ends.append(end)
        return ends
