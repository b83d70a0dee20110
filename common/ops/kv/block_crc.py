"""The CRC-32 of KV blocks, computed where the blocks are: that of zlib, which kvstores and disks keep beside each block.

So blocks that the copy engine puts straight into a GPU's memory are checked there, after they have arrived, and no processor of
the host has to read them.
"""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.kv.block_crc_reference import block_crc_reference

WORD_BYTES = 4
"""On a GPU blocks consist of so many bytes, times anything, and begin at a multiple of them."""


def block_crc(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor, *, max_programs: int | None = None) -> None:
    """out[i] = the CRC-32 of pool[block_ids[i]], as the bits of an int32.

    pool: uint8 [num_blocks, block_bytes], contiguous. block_ids: int64 or int32 [blocks]; a GPU doesn't check them. out: int32
    [blocks]. max_programs: how many programs at most: few leave the multiprocessors to other kernels.

    :raises ValueError: if shapes, dtypes or alignment don't fit.
    """
    if pool.ndim != 2 or pool.dtype != torch.uint8 or not pool.is_contiguous():
        raise ValueError(f"blocks are uint8 [blocks, bytes], not {pool.dtype} {list(pool.shape)}")
    if block_ids.ndim != 1 or block_ids.dtype not in (torch.int32, torch.int64) or not block_ids.is_contiguous():
        raise ValueError(f"block ids are int32 or int64 [blocks], not {block_ids.dtype} {list(block_ids.shape)}")
    if out.shape != block_ids.shape or out.dtype != torch.int32 or not out.is_contiguous():
        raise ValueError(f"checksums of {len(block_ids)} blocks are int32 [blocks], not {out.dtype} {list(out.shape)}")
    if not len(block_ids):
        return
    if on_device(pool):
        if pool.shape[1] % WORD_BYTES or pool.data_ptr() % WORD_BYTES or not pool.shape[1]:
            raise ValueError(f"blocks begin and end at multiples of {WORD_BYTES} bytes")
        from common.ops.kv.block_crc_triton import block_crc_triton

        block_crc_triton(pool, block_ids, out, max_programs)
    else:
        out.copy_(block_crc_reference(pool, block_ids.tolist()))
