"""Columns of numbers in one pinned buffer, so that one copy takes them to a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray


def pack_columns(columns: Mapping[str, NDArray[np.int32]]) -> tuple[torch.Tensor, dict[str, int]]:
    """Return the columns one after the other, int32, pinned if there is a CUDA device; and the size of each, in order."""
    sizes = {name: len(column) for name, column in columns.items()}
    pinned = torch.cuda.is_available()
    buffer = torch.zeros(sum(map(_padded, sizes.values())), dtype=torch.int32, pin_memory=pinned)
    place = buffer.numpy()
    start = 0
    for name, size in sizes.items():
        place[start : start + size] = columns[name]
        start += _padded(size)
    return buffer, sizes


def unpack_columns(buffer: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the columns as views of `buffer`."""
    columns: dict[str, torch.Tensor] = {}
    start = 0
    for name, size in sizes.items():
        columns[name] = buffer[start : start + size]
        start += _padded(size)
    return columns


def _padded(size: int) -> int:
    return -(-size // 4) * 4  # every column starts at a multiple of 16 bytes
