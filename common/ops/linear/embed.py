"""Token ids to rows of the embedding. On a GPU an id may be one that the step before sampled and that no host has seen."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.ops.backend import on_device
from common.ops.tensors import Feed


def embed(tokens: torch.Tensor, table: torch.Tensor, feed: Feed | None = None) -> torch.Tensor:
    """tokens: int64 [tokens]. table: [vocab_size, size]. Returns [tokens, size]; an id outside the table reads its edge.

    :raises ValueError: if shapes don't fit, or for a feed on a CPU.
    """
    if tokens.ndim != 1 or table.ndim != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"embed takes int64 tokens [n] and a table [vocab, size], not {list(tokens.shape)}")
    if not on_device(tokens):
        if feed is not None:
            raise ValueError("a feed is for GPUs; on a CPU the tokens are known")
        return F.embedding(tokens, table)
    from common.ops.linear.embed_triton import embed_triton

    return embed_triton(tokens, table, feed)
