"""`linear` for many rows on a GPU, persistent: one program per multiprocessor takes tile after tile, through TMA.

Both operands come as boxes of 128 bytes by BLOCK rows. FLAT makes one loop of tiles and steps, so that the loads of the next
tile are on their way during the epilogue of this one. Tiles go in groups of GROUP_M row tiles, so that what runs at a time
shares weights and activations in L2. Descriptors are made on the host.
Innermost box and row lengths must be multiples of 16 bytes: TMA corrupts silently otherwise.

GATED: as in `linear_triton.py`; the gate's tile and the up's tile are two boxes and two accumulators.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from common.ops import backend
from common.ops.linear.candidates import Candidate, Op
from common.ops.linear.parts_triton import result_dtype
from common.ops.sizes import cdiv
from common.ops.tensors import Activation, Quantised

if TYPE_CHECKING:
    from common.ops.linear.weight import LinearWeight

GROUP_M = 8


@triton.jit
def tile_place(tile, m_tiles, n_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles go through all columns before the next rows."""
    size = GROUP * n_tiles
    first = tile // size * GROUP
    height = tl.minimum(m_tiles - first, GROUP)
    within = tile % size
    return first + within % height, within // height


@triton.jit
def rescaled(total, m, n, x_scale, w_scale, bias, rows, N, W_SCALE: tl.constexpr):
    """total: [BLOCK_M, BLOCK_N] of activation rows m and weight rows n."""
    columns = tl.minimum(n, N - 1)
    if W_SCALE == 1:
        total *= tl.load(w_scale + columns)[None, :]
    if x_scale is not None:
        total *= tl.load(x_scale + tl.minimum(m, rows - 1))[:, None]
    if bias is not None:
        total += tl.load(bias + columns).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["rows", "scale_columns"])
def gemm_kernel(
    x_box,  # descriptor of [rows, K], boxes [BLOCK_M, BLOCK_K]
    w_box,  # descriptor of [N, K], boxes [BLOCK_N, BLOCK_K], or [BLOCK_N / 2, BLOCK_K] if GATED
    x_scale,  # float32 [rows] or None
    w_scale,  # float32 [N] if W_SCALE is 1, [⌈N/128⌉, scale_columns] if 2, else None
    bias,  # [N] or None
    out,  # [rows, N], or [rows, N / 2] if GATED
    rows,
    N,
    K,
    scale_columns,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    W_SCALE: tl.constexpr,
    FLAT: tl.constexpr,  # tiles and steps are one loop
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    width = N // 2 if GATED else N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m_tiles = tl.cdiv(rows, BLOCK_M)
    n_tiles = tl.cdiv(width, WIDTH)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLAT):
        m_tile, n_tile = tile_place(tile, m_tiles, n_tiles, GROUP)
        m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        n = n_tile * WIDTH + tl.arange(0, WIDTH)
        total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        ups = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        # a tile lies in one row of blocks
        w_blocks = w_scale + n_tile * WIDTH // 128 * scale_columns if W_SCALE == 2 else None
        u_blocks = w_scale + (width + n_tile * WIDTH) // 128 * scale_columns if W_SCALE == 2 else None
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = x_box.load([m_tile * BLOCK_M, step * BLOCK_K])
            w = w_box.load([n_tile * WIDTH, step * BLOCK_K])
            if W_SCALE == 2:
                total += tl.dot(x, w.T) * tl.load(w_blocks + step * BLOCK_K // 128)
            else:
                total = tl.dot(x, w.T, total)
            if GATED:
                u = w_box.load([width + n_tile * WIDTH, step * BLOCK_K])
                if W_SCALE == 2:
                    ups += tl.dot(x, u.T) * tl.load(u_blocks + step * BLOCK_K // 128)
                else:
                    ups = tl.dot(x, u.T, ups)
        total = rescaled(total, m, n, x_scale, w_scale, bias, rows, N, W_SCALE)
        if GATED:
            ups = rescaled(ups, m, width + n, x_scale, w_scale, bias, rows, N, W_SCALE)
            total = total / (1.0 + tl.exp(-total)) * ups
        place = m.to(tl.int64)[:, None] * width + n[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < width)[None, :])


def linear_persistent(op: Op, x: Activation, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    """x: of the weight's dtype, or quantised. Returns [rows, out_features], of "gated" half as many."""
    data, x_scale = (x.data, x.scale) if isinstance(x, Quantised) else (x, None)
    rows, depth = data.shape
    gated = op == "gated"
    size = weight.out_features // 2 if gated else weight.out_features
    out = torch.empty(rows, size, dtype=result_dtype(weight, op), device=data.device)
    pdl = backend.pdl(data)
    block_n = chosen.block_n // 2 if gated else chosen.block_n
    tiles = cdiv(rows, chosen.block_m) * cdiv(size, block_n)
    blocks = weight.scale is not None and weight.scale.ndim == 2
    gemm_kernel[(min(tiles, backend.num_sms(data.get_device())),)](
        x_box=TensorDescriptor.from_tensor(data, [chosen.block_m, chosen.block_k]),
        w_box=TensorDescriptor.from_tensor(weight.data, [block_n, chosen.block_k]),
        x_scale=x_scale,
        w_scale=weight.scale,
        bias=weight.bias,
        out=out,
        rows=rows,
        N=weight.out_features,
        K=depth,
        scale_columns=weight.scale.shape[1] if weight.scale is not None and blocks else 0,
        BLOCK_N=chosen.block_n,
        BLOCK_M=chosen.block_m,
        BLOCK_K=chosen.block_k,
        GROUP=GROUP_M,
        GATED=gated,
        W_SCALE=0 if weight.scale is None else weight.scale.ndim,
        FLAT=chosen.flat,
        PDL=pdl,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        launch_pdl=pdl,
    )
    return out
