"""`embed` on a GPU: one program a token. It has no programmatic dependence: it begins a step, and ends the one before."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops.sizes import next_power_of_2
from common.ops.tensors import Feed


@triton.jit
def embed_kernel(
    tokens,
    feed_index,
    sampled,
    table,
    out,
    vocab_size,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FED: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    if FED:
        index = tl.load(feed_index + row)
        token = tl.where(index >= 0, tl.load(sampled + tl.maximum(index, 0)), token)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    values = tl.load(table + token.to(tl.int64) * SIZE + column, mask=inside)
    tl.store(out + row.to(tl.int64) * SIZE + column, values, mask=inside)


def embed_triton(tokens: torch.Tensor, table: torch.Tensor, feed: Feed | None) -> torch.Tensor:
    vocab_size, size = table.shape
    out = torch.empty(len(tokens), size, dtype=table.dtype, device=table.device)
    if len(tokens):
        embed_kernel[(len(tokens),)](
            tokens,
            feed.places if feed else tokens,
            feed.sampled if feed else tokens,
            table,
            out,
            vocab_size,
            SIZE=size,
            BLOCK=next_power_of_2(size),
            FED=feed is not None,
            num_warps=4,
        )
    return out
