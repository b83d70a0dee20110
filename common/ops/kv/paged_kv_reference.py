"""What `write_kv` does, one token at a time."""

from __future__ import annotations

import torch


def write_kv_reference(
    pool: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, blocks: list[int], offsets: list[int]
) -> None:
    """key, value: [tokens, kv_heads, head_dim]; token i is entry offsets[i] of block blocks[i]."""
    for token, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        pool[block, layer, 0, offset] = key[token]
        pool[block, layer, 1, offset] = value[token]
