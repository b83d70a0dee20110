"""Copies between a kvstore's pinned memory and a GPU's blocks that the copy engine makes alone.

    write   memory ─► blocks ─► their checksums, on the GPU
    read    blocks ─► memory;   the blocks' checksums, on the GPU

So checksums are of what is in the GPU's memory, and no processor of the host touches a byte. Parts take turns in two streams,
so that one's checksums are computed while the other is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.transfer.paths import Operation
from common.transfer.stage_ring import StageRing, ended

if TYPE_CHECKING:
    import torch

PART_BYTES = 32 << 20
"""Copied in 0.6 ms where a link is fast, and then checked in half of that."""
PROGRAMS = 32  # they check faster than a link copies; the other multiprocessors belong to the step that runs meanwhile


class DirectCopies:
    """`streams`: of each direction; none on a CPU."""

    def __init__(self, ring: StageRing, streams: Mapping[Operation, Sequence[torch.cuda.Stream]]) -> None:
        self._ring, self._streams = ring, streams

    def copy(
        self, pool: torch.Tensor, blocks: NDArray[np.int64], addresses: NDArray[np.int64], operation: Operation
    ) -> list[int]:
        """Copy from pinned memory at `addresses` to blocks of a pool, uint8 [num_blocks, block_bytes], or from blocks to memory
        ("read"); return the blocks' checksums. Blocks until all of it has ended.

        :raises TransportUnavailable: the GPU failed.
        """
        assert len(blocks) == len(addresses) and (not len(blocks) or (blocks.min() >= 0 and blocks.max() < len(pool)))
        places = pool.data_ptr() + blocks * pool.shape[1]
        return self._in_parts(pool, blocks, (places, addresses) if operation == "write" else (addresses, places), operation)

    def checksums(self, pool: torch.Tensor, blocks: NDArray[np.int64]) -> list[int]:
        """Return the checksums of blocks. Otherwise as `copy`."""
        return self._in_parts(pool, blocks, None, "read")

    def _in_parts(
        self,
        pool: torch.Tensor,
        blocks: NDArray[np.int64],
        places: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
        operation: Operation,
    ) -> list[int]:
        """`places`: the addresses to which and from which blocks are copied first."""
        import torch

        from common.ops.kv.block_crc import block_crc

        block_bytes, on_gpu = pool.shape[1], pool.is_cuda
        streams = self._streams[operation] or [None]
        size = max(4, PART_BYTES // block_bytes // 4 * 4)  # a kernel is compiled anew for arrays that begin elsewhere
        with ended(streams), torch.inference_mode():
            with torch.cuda.stream(streams[0]):
                ids = torch.from_numpy(blocks)
                ids = ids.pin_memory().to(pool.device, non_blocking=True) if on_gpu else ids
                found = torch.empty(len(blocks), dtype=torch.int32, device=pool.device)
                sums = torch.empty(len(blocks), dtype=torch.int32, pin_memory=on_gpu)  # of this stream's GPU
            for stream in streams[1:]:
                if stream is not None and streams[0] is not None:
                    stream.wait_stream(streams[0])
            for number, start in enumerate(range(0, len(blocks), size)):
                part, stream = slice(start, start + size), streams[number % len(streams)]
                if places is not None:
                    handle = 0 if stream is None else stream.cuda_stream
                    self._ring.copy_each(places[0][part], places[1][part], block_bytes, handle)
                with torch.cuda.stream(stream):
                    block_crc(pool, ids[part], found[part], max_programs=PROGRAMS)
                    sums[part].copy_(found[part], non_blocking=True)
        return (sums.numpy().astype(np.int64) & 0xFFFFFFFF).tolist()
