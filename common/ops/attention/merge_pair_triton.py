"""Attention over some keys and over others becomes attention over both."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops.sizes import cdiv

_ROWS = 16
_WARPS = 4


@triton.jit
def merge_pair_kernel(
    first,  # [tokens, HEADS, HEAD_DIM], a token every first_stride
    first_sums,  # float32 [HEADS, tokens], a head every first_sums_stride
    second,
    second_sums,
    output,  # [tokens, HEADS, HEAD_DIM], contiguous
    output_sums,  # float32 [HEADS, tokens], contiguous
    tokens,
    first_stride,
    first_sums_stride,
    second_stride,
    second_sums_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = rows // HEADS, rows % HEADS
    mine = token < tokens
    a = tl.load(first_sums + head * first_sums_stride + token, mask=mine, other=0.0)
    b = tl.load(second_sums + head * second_sums_stride + token, mask=mine, other=0.0)
    best = tl.maximum(a, b)
    weight_a, weight_b = tl.exp(a - best), tl.exp(b - best)
    mass = weight_a + weight_b
    d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    shown = mine[:, None] & (d < HEAD_DIM)[None, :]
    inside = head[:, None] * HEAD_DIM + d[None, :]
    x = tl.load(first + token[:, None] * first_stride + inside, mask=shown, other=0.0).to(tl.float32)
    y = tl.load(second + token[:, None] * second_stride + inside, mask=shown, other=0.0).to(tl.float32)
    merged = x * (weight_a / mass)[:, None] + y * (weight_b / mass)[:, None]
    tl.store(output + rows[:, None] * HEAD_DIM + d[None, :], merged, mask=shown)
    tl.store(output_sums + head * tokens + token, best + tl.log(mass), mask=mine)


def merge_pair_triton(
    first: torch.Tensor, first_sums: torch.Tensor, second: torch.Tensor, second_sums: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention_parts.merge_pair`."""
    tokens, heads, head_dim = first.shape
    output = torch.empty(tokens, heads, head_dim, dtype=dtype, device=first.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=first.device)
    merge_pair_kernel[(cdiv(tokens * heads, _ROWS),)](
        first=first,
        first_sums=first_sums,
        second=second,
        second_sums=second_sums,
        output=output,
        output_sums=sums,
        tokens=tokens,
        first_stride=first.stride(0),
        first_sums_stride=first_sums.stride(0),
        second_stride=second.stride(0),
        second_sums_stride=second_sums.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        ROWS=_ROWS,
        num_warps=_WARPS,
    )
    return output, sums
