"""What `copy_blocks` does, block by block."""

from __future__ import annotations

import torch


def copy_blocks_reference(source: torch.Tensor, source_ids: list[int], target: torch.Tensor, target_ids: list[int]) -> None:
    """source, target: [blocks, bytes]."""
    for one, other in zip(source_ids, target_ids, strict=True):
        target[other] = source[one]
