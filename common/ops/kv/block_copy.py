"""Copies many blocks of a pool in one launch: to a contiguous staging area, from one, or between two pools.

A pool is seen as bytes: uint8 [num_blocks, block_bytes], contiguous. One side may be pinned host memory, or memory of another
GPU that was opened under the context of the GPU that runs the kernel. The order of writes to one target is not defined: target
ids are distinct, and where both sides are one tensor, none is also a source.
"""

from __future__ import annotations

import torch

from common.ops.backend import on_device

ALIGNMENT_BYTES = 16


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor, *, max_programs: int | None = None) -> None:
    """out[i] = pool[block_ids[i]]. out: uint8 [len(block_ids), block_bytes], contiguous. For the rest see `copy_blocks`."""
    if len(out) != len(block_ids):
        raise ValueError(f"{len(block_ids)} blocks don't fit a staging area of {len(out)}")
    _copy(pool, block_ids, out, None, len(block_ids), max_programs)


def scatter_blocks(
    staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor, *, max_programs: int | None = None
) -> None:
    """pool[block_ids[i]] = staging[i]. staging: uint8 [len(block_ids), block_bytes], contiguous. Else as `copy_blocks`."""
    if len(staging) != len(block_ids):
        raise ValueError(f"{len(block_ids)} blocks don't come from a staging area of {len(staging)}")
    _copy(staging, None, pool, block_ids, len(block_ids), max_programs)


def copy_blocks(
    source: torch.Tensor,
    source_ids: torch.Tensor,
    target: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    max_programs: int | None = None,
) -> None:
    """target[target_ids[i]] = source[source_ids[i]]. source, target: uint8 [blocks, block_bytes]; block_bytes a multiple of 16.

    source_ids, target_ids: int64 or int32 [blocks], on the device that copies; a GPU doesn't check them. max_programs: how many
    programs at most, of 16 KB in flight each: few leave the multiprocessors to other kernels, where a link is the limit.

    :raises ValueError: if shapes, dtypes or alignment don't fit, or a GPU can't reach one side.
    """
    if source_ids.shape != target_ids.shape:
        raise ValueError(f"{len(source_ids)} blocks don't go to {len(target_ids)}")
    _copy(source, source_ids, target, target_ids, len(source_ids), max_programs)


def _copy(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    count: int,
    max_programs: int | None,
) -> None:
    for side in (source, target):
        if side.ndim != 2 or side.dtype != torch.uint8 or not side.is_contiguous() or side.shape[1] != source.shape[1]:
            raise ValueError(f"blocks are uint8 [blocks, bytes] of one size, not {side.dtype} {list(side.shape)}")
        if side.shape[1] % ALIGNMENT_BYTES or side.data_ptr() % ALIGNMENT_BYTES:
            raise ValueError(f"blocks begin and end at multiples of {ALIGNMENT_BYTES} bytes")
    for ids in (source_ids, target_ids):
        if ids is not None and (ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous()):
            raise ValueError(f"block ids are int32 or int64 [blocks], not {ids.dtype} {list(ids.shape)}")
    if not count:
        return
    if on_device(source) or on_device(target):
        if not all(on_device(side) or side.is_pinned() for side in (source, target)):
            raise ValueError("a GPU reads and writes host memory only where it is pinned")
        from common.ops.kv.block_copy_triton import copy_blocks_triton

        copy_blocks_triton(source, source_ids, target, target_ids, count, max_programs)
    elif target_ids is not None:
        blocks = source if source_ids is None else source.index_select(0, source_ids)
        target.index_copy_(0, target_ids.long(), blocks)
    elif source_ids is not None:
        torch.index_select(source, 0, source_ids, out=target)
