"""Writing K and V into a block-first pool.

pool: [num_blocks, layers, 2, block_tokens, kv_heads, head_dim], contiguous; K at index 0, V at 1. All layers of a block are
one contiguous region, so that one copy moves it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class SlotMapping:
    """Where the tokens of a step go, worked out once for all layers.

    blocks, offsets: int64 [tokens]; token i is entry offsets[i] of block blocks[i].
    """

    def __init__(self, pool: torch.Tensor, blocks: np.ndarray, offsets: np.ndarray) -> None:
        _, layers, _, block_tokens, _, _ = pool.shape
        self.num_tokens = len(blocks)
        first = torch.from_numpy(blocks * (layers * 2 * block_tokens) + offsets)
        steps = torch.arange(layers * 2).mul_(block_tokens)
        self.rows = list((first + steps[:, None]).to(pool.device).unbind(0))  # [2 * layer + (0: K, 1: V)]


def write_kv(pool: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slots: SlotMapping) -> None:
    """key, value: [>= slots.num_tokens, kv_heads, head_dim] in the pool's dtype; tokens past the mapping are padding.

    :raises ValueError: if the heads are not the pool's.
    """
    kv_heads, head_dim = pool.shape[4:]
    if key.shape[1:] != (kv_heads, head_dim) or value.shape != key.shape:
        raise ValueError(f"the pool keeps [{kv_heads}, {head_dim}] per token, not {list(key.shape[1:])}")
    entries = pool.view(-1, kv_heads, head_dim)
    entries.index_copy_(0, slots.rows[2 * layer], key[: slots.num_tokens])
    entries.index_copy_(0, slots.rows[2 * layer + 1], value[: slots.num_tokens])


def clear_tails(pool: torch.Tensor, tails: Sequence[tuple[int, int]]) -> None:
    """Zeroes entries from `offset` on in each (block, offset), in all layers.

    Attention reads whole blocks and masks what is past the end: a stale infinity there would still become NaN (0 · inf).
    """
    for block, offset in tails:
        pool[block, :, :, offset:].zero_()
