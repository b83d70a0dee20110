"""What `paged_attention` computes: one query at a time, over the keys that it sees, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.attention.form import AttentionForm


class Row(Protocol):
    """See `paged_attention.AttentionRow`."""

    @property
    def first(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> Sequence[int] | NDArray[np.int32]: ...


def paged_attention_reference(
    query: torch.Tensor, pool: torch.Tensor, layer: int, rows: Sequence[Row], form: AttentionForm
) -> torch.Tensor:
    """query: [tokens, heads, head_dim]. Returns the same shape; tokens of no row are zero."""
    block_tokens, kv_heads, head_dim = pool.shape[3:]
    group = query.shape[1] // kv_heads
    out = torch.zeros_like(query)
    for row in rows:
        begin = form.first_key(row.start) // block_tokens  # blocks before may be gone
        ids = list(row.blocks)[begin : -(-(row.start + row.length) // block_tokens)]
        keys, values = (
            pool[ids, layer, which].reshape(-1, kv_heads, head_dim).double().repeat_interleave(group, dim=1) for which in (0, 1)
        )
        for i in range(row.length):
            position = row.start + i
            seen = slice(form.first_key(position) - begin * block_tokens, position + 1 - begin * block_tokens)
            scores = torch.einsum("hd,khd->hk", query[row.first + i].double(), keys[seen]) * form.scale
            if form.soft_cap:
                scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
            if form.sinks is not None:
                scores = torch.cat((scores, form.sinks.double()[:, None]), 1)
            weights = scores.softmax(-1)[:, : position + 1 - form.first_key(position)]
            out[row.first + i] = torch.einsum("hk,khd->hd", weights, values[seen]).to(query.dtype)
    return out
