"""The CRC-32 of blocks by zlib."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch


def block_crc_reference(pool: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
    """Return the CRC-32 of pool[block_ids], int32 [blocks]. pool: uint8 [num_blocks, block_bytes]."""
    rows = pool.cpu().numpy()
    return torch.tensor([zlib.crc32(rows[block]) for block in block_ids], dtype=torch.int64).to(torch.int32)
