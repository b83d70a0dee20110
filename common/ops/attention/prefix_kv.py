"""A step's K and V beside the pool that holds what is before them, and copies of it as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class StepKv:
    """K and V of a step, and the pool that holds what is before them.

    key, value: [tokens, kv_heads, head_dim] in the queries' dtype.
    block_ids: `DeviceBatch.block_ids`.
    pool, layer, kv_scale: as `paged_attention` has them.
    """

    key: torch.Tensor
    value: torch.Tensor
    pool: torch.Tensor
    layer: int
    block_ids: torch.Tensor
    kv_scale: torch.Tensor | None


def gather_prefix(kv: StepKv, first_block: int, begin: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of keys [begin, end) of the sequence whose blocks begin at block_ids[first_block]: [keys, kv_heads,
    head_dim] in `dtype` each."""
    size = kv.pool.shape[3]
    ids = kv.block_ids[first_block + begin // size : first_block - (-end // size)]
    skipped = begin % size
    key, value = (_blocks(kv, index, ids, dtype).flatten(0, 1)[skipped : skipped + end - begin] for index in (0, 1))
    return key, value


def gather_context(
    kv: StepKv, first_block: int, begin: int, start: int, own: slice, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of keys [begin, start), as `gather_prefix` does, and behind them the step's tokens `own`. begin: where a
    block begins."""
    size, kv_heads, head_dim = kv.pool.shape[3:]
    ids = kv.block_ids[first_block + begin // size : first_block - (-start // size)]
    before = start - begin
    rows = max(len(ids) * size, before + own.stop - own.start)
    gathered: list[torch.Tensor] = []
    for index, tokens in enumerate((kv.key, kv.value)):
        both = torch.empty(rows, kv_heads, head_dim, dtype=dtype, device=kv.pool.device)
        copied = both[: len(ids) * size].view(len(ids), size, kv_heads, head_dim)
        if kv.pool.dtype == dtype:
            torch.index_select(kv.pool[:, kv.layer, index], 0, ids, out=copied)
        else:
            copied.copy_(_blocks(kv, index, ids, dtype))
        both[before : before + own.stop - own.start] = tokens[own]
        gathered.append(both)
    return gathered[0], gathered[1]


def _blocks(kv: StepKv, index: int, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """K (0) or V (1) of blocks: [blocks, block_tokens, kv_heads, head_dim]."""
    entries = kv.pool[:, kv.layer, index]
    if entries.dtype != torch.float8_e4m3fn:
        return entries.index_select(0, ids)
    copied = entries.view(torch.uint8).index_select(0, ids).view(entries.dtype).to(dtype)  # not every device indexes 8 bits
    return copied if kv.kv_scale is None else copied * kv.kv_scale[kv.layer, index].to(dtype)[:, None]
