"""What `paged_attention` computes: one query at a time, over its own keys, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Row(Protocol):
    """See `paged_attention.AttentionRow`."""

    @property
    def first(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int]: ...


def paged_attention_reference(
    query: torch.Tensor, pool: torch.Tensor, layer: int, rows: Sequence[Row], scale: float
) -> torch.Tensor:
    """query: [tokens, heads, head_dim]. Returns the same shape; tokens of no row are zero."""
    kv_heads, head_dim = pool.shape[4:]
    group = query.shape[1] // kv_heads
    out = torch.zeros_like(query)
    for row in rows:
        keys, values = (
            pool[list(row.blocks), layer, which].reshape(-1, kv_heads, head_dim).double().repeat_interleave(group, dim=1)
            for which in (0, 1)
        )
        for i in range(row.length):
            end = row.start + i + 1
            scores = torch.einsum("hd,khd->hk", query[row.first + i].double(), keys[:end]) * scale
            out[row.first + i] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[:end]).to(query.dtype)
    return out
