"""Quantise activations with a scale for each 128 columns of a row, as DeepSeek's FP8 checkpoints expect."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.quant.quantise_triton import as_e4m3
from common.ops.sizes import cdiv

_BLOCKS = 8


@triton.jit
def quantise_blocks_kernel(
    x,  # [rows, K]
    data,  # float8_e4m3fn [rows, K], written
    scale,  # float32 [rows, ⌈K / 128⌉], written
    K,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    highest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-20)
    tl.store(data + row * K + column, as_e4m3(values, highest[:, None]), mask=column < K)
    blocks = tl.cdiv(K, 128)
    tl.store(scale + row * blocks + block, highest / 448.0, mask=block < blocks)


def quantise_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [rows, size], contiguous. Returns float8_e4m3fn [rows, size] and its scales, float32 [rows, ⌈size / 128⌉]."""
    rows, size = x.shape
    blocks = cdiv(size, 128)
    data = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    pdl = backend.pdl(x)
    quantise_blocks_kernel[(rows, cdiv(blocks, _BLOCKS))](
        x=x, data=data, scale=scale, K=size, BLOCKS=_BLOCKS, PDL=pdl, num_warps=2, launch_pdl=pdl
    )
    return data, scale
