"""`linear` for 1–4 rows on a GPU, without tensor cores: activations stay in registers, weight rows stream by.

A program holds a split of K (2048 or 4096 deep) of all activation rows, and goes through weight rows, BLOCK_N at a time, STAGES
tiles deep through cp.async: (STAGES − 1) × 16–32 KB in flight, whatever the compiler does with loads.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.linear.candidates import Candidate, Op
from common.ops.linear.parts_triton import (
    ask_ahead,
    finish,
    output_of,
    scaled,
    scaling,
    summed,
    tiles_ahead,
    weight_rows,
)
from common.ops.sizes import cdiv

if TYPE_CHECKING:
    from common.ops.linear.weight import LinearWeight

RESIDENTS = 2
"""Programs on a multiprocessor; each streams rows until there are none left."""


@triton.jit(do_not_specialize=["rows", "n_tiles"])
def gemv_kernel(
    x,  # [rows, K], rows ≤ BLOCK_M
    weight,
    w_scale,  # float32 [N] if W_SCALE is 1, else None
    bias,
    out,
    rows,
    N,
    K,
    n_tiles,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 1, 2 or 4
    BLOCK_K: tl.constexpr,  # the depth of a split
    GATED: tl.constexpr,
    W_SCALE: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `dot_kernel`, by multiply and sum: x stays in registers, and the weight's rows stream by, STAGES tiles deep."""
    split = tl.program_id(1)
    depth = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (depth < K)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        for ahead in tl.static_range(PREFETCH):
            tile = tl.program_id(0) + ahead * tl.num_programs(0)
            ask_ahead(weight, tile, split, split + 1, N, K, BLOCK_N, BLOCK_K, GATED, 1, LINES)
        tl.extra.cuda.gdc_wait()
    x0 = load_row(x + depth[None, :], inside, EVEN_K)
    x1, x2, x3 = x0, x0, x0
    if BLOCK_M > 1:
        x1 = load_row(x + tl.minimum(1, rows - 1) * K + depth[None, :], inside, EVEN_K)
    if BLOCK_M > 2:
        x2 = load_row(x + tl.minimum(2, rows - 1) * K + depth[None, :], inside, EVEN_K)
        x3 = load_row(x + tl.minimum(3, rows - 1) * K + depth[None, :], inside, EVEN_K)
    m = tl.arange(0, BLOCK_M)
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=STAGES):
        n = weight_rows(tile, N, BLOCK_N, GATED)
        w_tile = weight + n.to(tl.int64)[:, None] * K + depth[None, :]
        if EVEN_K:
            w = tl.load(w_tile).to(tl.float32)
        else:
            w = tl.load(w_tile, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(w * x0, axis=1)[:, None] + tl.zeros([1, BLOCK_M], tl.float32)
        if BLOCK_M > 1:
            total = tl.where((m == 1)[None, :], tl.sum(w * x1, axis=1)[:, None], total)
        if BLOCK_M > 2:
            total = tl.where((m == 2)[None, :], tl.sum(w * x2, axis=1)[:, None], total)
            total = tl.where((m == 3)[None, :], tl.sum(w * x3, axis=1)[:, None], total)
        total = scaled(total, n, m, split, None, w_scale, bias, rows, W_SCALE)
        finish(total, m, tile, split, out, rows, N, BLOCK_N, BLOCK_M, GATED)


@triton.jit
def load_row(pointers, inside, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


def linear_gemv(op: Op, x: torch.Tensor, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    """As `linear_dot`, for up to `chosen.block_m` rows."""
    rows, depth = x.shape
    splits = cdiv(depth, chosen.block_k)
    out = output_of(x, weight, op, splits=splits, partial=splits > 1)
    pdl = backend.pdl(x)
    n_tiles = cdiv(weight.out_features, chosen.block_n)
    programs = max(1, backend.num_sms(x.get_device()) * RESIDENTS // splits)
    gemv_kernel[(min(n_tiles, programs), splits)](
        x=x,
        weight=weight.data,
        w_scale=weight.scale,
        bias=weight.bias,
        out=out,
        rows=rows,
        N=weight.out_features,
        K=depth,
        n_tiles=n_tiles,
        BLOCK_N=chosen.block_n,
        BLOCK_M=chosen.block_m,
        BLOCK_K=chosen.block_k,
        GATED=op == "gated",
        W_SCALE=scaling(weight),
        EVEN_K=depth % chosen.block_k == 0,
        PREFETCH=tiles_ahead(weight, chosen, 2),
        LINES=chosen.ahead == "lines",
        STAGES=chosen.stages,
        PDL=pdl,
        num_warps=chosen.warps,
        launch_pdl=pdl,
    )
    return summed(out, weight, op)
