"""Buffers that outlive a step: fresh memory costs more in page faults than what is done in it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scratch:
    """Memory for gathered K and V, by name and dtype."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, width], uninitialised, valid until the next `take` of that name."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < rows * width:
            buffer = torch.empty(rows * width * 5 // 4, dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[: rows * width].view(rows, width)


class Gathered(NamedTuple):
    """Blocks of K or of V, [blocks, numbers], as the pool keeps them and in float32; one memory if the pool is float32."""

    stored: torch.Tensor
    wide: torch.Tensor

    @classmethod
    def take(cls, scratch: Scratch, name: str, num_blocks: int, pool: torch.Tensor) -> Gathered:
        """pool: one block per row."""
        stored = scratch.take(name, num_blocks, pool.shape[1], pool.dtype)
        return cls(stored, scratch.take(name, num_blocks, pool.shape[1], torch.float32))

    def fill(self, pool: torch.Tensor, entries: torch.Tensor) -> None:
        """entries: int64 [blocks], rows of `pool`."""
        torch.index_select(pool, 0, entries, out=self.stored)
        if self.stored.dtype != self.wide.dtype:
            self.wide.copy_(self.stored)
