"""`linear` for few rows on a GPU: tiles of the weight are the tall side of `tl.dot`, activation rows its narrow one.

Every weight is read once and memory is the bound, so what counts is bytes in flight: 4.2 TB/s × 0.8 µs is 26 KB for each of an
H200's 132 multiprocessors, and candidates keep 40 KB or more there (stages × tile × resident programs, see
`linear_candidates.py`). BLOCK_N weight rows, 64 or 128, are the M side that wgmma and tcgen05 want, and 8, 16, … activation
rows the N side, which needs no padding to 64; weight tiles come through cp.async of 16 bytes, `num_stages` deep. Deep, narrow
weights are cut along K: float32 partial sums [splits, rows, N], each written once, added up in order by whoever reads them.

With programmatic dependent launch a program asks L2 for its first weight tiles before it waits for the kernel that makes its
activations. fp8 weights are converted in registers for bf16 activations (W8A16, by mma.sync: see `linear_candidates.py`), or
multiplied as they are with quantised ones (W8A8); scales of 128 × 128 blocks multiply each step's product, scales of rows and
channels the sum.
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
from common.ops.tensors import Activation, Quantised

if TYPE_CHECKING:
    from common.ops.linear.weight import LinearWeight


@triton.jit
def block_scale(w_scale, tile, N, depth, scale_columns, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """128-block scales of a tile at a depth: one number, or the gate's and the up's by row, [BLOCK_N, 1]."""
    column = w_scale + depth // 128
    if GATED:
        first = tile * (BLOCK_N // 2)
        gates = tl.load(column + first // 128 * scale_columns)
        ups = tl.load(column + (N // 2 + first) // 128 * scale_columns)
        return tl.where(tl.arange(0, BLOCK_N) < BLOCK_N // 2, gates, ups)[:, None]
    else:  # noqa: RET505, the compiler wants one type from each path
        return tl.load(column + tile * BLOCK_N // 128 * scale_columns)


@triton.jit
def widened(w, dtype: tl.constexpr, HOPPER: tl.constexpr):
    """w: float8_e4m3fn. To bf16 by shifting bits into place, four at a time: exponents are 120 too small then, which a product
    puts right, subnormals included; NaN becomes ±480. Bytes come spread out behind copies of their sign, so that one shift and
    one mask leave both: four quick instructions for two numbers, two of them not the integer unit's."""
    if HOPPER and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, m;
            mov.b32 m, 0x7b807b80;
            prmt.b32 t, $2, 0, 0x9180;
            shl.b32 t, t, 4;
            and.b32 t, t, 0x87f087f0;
            mul.bf16x2 $0, t, m;
            prmt.b32 t, $2, 0, 0xb3a2;
            shl.b32 t, t, 4;
            and.b32 t, t, 0x87f087f0;
            mul.bf16x2 $1, t, m;
            }""",
            "=&r,=&r,r",
            [w.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:  # noqa: RET505, as above
        return w.to(dtype)


@triton.jit
def accumulate(
    w_rows,  # [BLOCK_N, 1] pointers
    x_rows,  # [BLOCK_M, 1] pointers
    shown,  # [BLOCK_M, 1]: rows that are there
    w_scale,
    tile,
    first,
    last,
    N,
    K,
    scale_columns,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    W_SCALE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles first … last - 1 along K, float32 [BLOCK_N, BLOCK_M]."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first, last):
        depth = step * BLOCK_K + k
        if EVEN_K:
            w = tl.load(w_rows + depth[None, :])
            # padding is not read: all programs would ask L2 for the same row
            a = tl.load(x_rows + depth[None, :], mask=shown, other=0.0)
        else:
            w = tl.load(w_rows + depth[None, :], mask=(depth < K)[None, :], other=0.0)
            a = tl.load(x_rows + depth[None, :], mask=shown & (depth < K)[None, :], other=0.0)
        if w.dtype != a.dtype:
            w = widened(w, a.dtype, PDL)
        if W_SCALE == 2:
            total += tl.dot(w, a.T) * block_scale(w_scale, tile, N, step * BLOCK_K, scale_columns, BLOCK_N, GATED)
        elif EXACT:
            total += tl.dot(w, a.T)
        else:
            total = tl.dot(w, a.T, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows", "scale_columns", "tiles_per_split", "splits"])
def dot_kernel(
    x,  # [rows, K], the model's dtype or float8_e4m3fn
    x_scale,  # float32 [rows] or None
    weight,  # [N, K]
    w_scale,  # float32 [N] if W_SCALE is 1, [⌈N/128⌉, scale_columns] if 2, else None
    bias,  # [N] or None
    out,  # [rows, N], [rows, N / 2] if GATED, or float32 [splits, rows, N]
    rows,
    N,
    K,
    scale_columns,
    tiles_per_split,
    splits,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    W_SCALE: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,  # tiles
    LINES: tl.constexpr,
    EXACT: tl.constexpr,  # fp8: every dot is added up in float32, not in the tensor core's narrower sum
    WHOLE: tl.constexpr,  # a program adds up all splits, as the reader of partial sums would
    PDL: tl.constexpr,
):
    m_tiles = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0) // m_tiles  # programs of one weight tile are neighbours: the second finds it in L2
    m = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    first = split * tiles_per_split
    k_tiles = tl.cdiv(K, BLOCK_K)
    last = tl.minimum(first + tiles_per_split, k_tiles)
    n = weight_rows(tile, N, BLOCK_N, GATED)
    w_rows = weight + n.to(tl.int64)[:, None] * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            ask_ahead(weight, tile, first, last, N, K, BLOCK_N, BLOCK_K, GATED, PREFETCH, LINES)
        tl.extra.cuda.gdc_wait()
    x_rows = x + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * K
    shown = (m < rows)[:, None]
    total = accumulate(
        w_rows,
        x_rows,
        shown,
        w_scale,
        tile,
        first,
        last,
        N,
        K,
        scale_columns,
        BLOCK_N,
        BLOCK_M,
        BLOCK_K,
        GATED,
        W_SCALE,
        EVEN_K,
        EXACT,
        PDL,
    )
    total = scaled(total, n, m, split, x_scale, w_scale, bias, rows, W_SCALE)
    if WHOLE:
        for part in range(1, splits):
            first = part * tiles_per_split
            last = tl.minimum(first + tiles_per_split, k_tiles)
            more = accumulate(
                w_rows,
                x_rows,
                shown,
                w_scale,
                tile,
                first,
                last,
                N,
                K,
                scale_columns,
                BLOCK_N,
                BLOCK_M,
                BLOCK_K,
                GATED,
                W_SCALE,
                EVEN_K,
                EXACT,
                PDL,
            )
            total += scaled(more, n, m, part, x_scale, w_scale, bias, rows, W_SCALE)
    finish(total, m, tile, split, out, rows, N, BLOCK_N, BLOCK_M, GATED)


def linear_dot(op: Op, x: Activation, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    """See `Op`: of "split", with more than one of them, float32 [splits, rows, N]; of "gated" [rows, N / 2]; else [rows, N].

    Of a batch-invariant weight, rows beyond one tile have their splits added up by the program, to the same bits.
    """
    data, x_scale = (x.data, x.scale) if isinstance(x, Quantised) else (x, None)
    rows, depth = data.shape
    split, gated = op == "split", op == "gated"
    blocks = weight.scale is not None and weight.scale.ndim == 2
    if blocks and gated and weight.out_features % chosen.block_n:
        raise ValueError(f"a gate of {weight.out_features // 2} rows does not end with a tile of {chosen.block_n // 2}")
    k_tiles = cdiv(depth, chosen.block_k)
    per_split = cdiv(k_tiles, chosen.splits)
    splits = cdiv(k_tiles, per_split)
    invariant = weight.batch_invariant
    whole = splits > 1 and invariant and rows > chosen.block_m
    partial = splits > 1 and (split or not whole)
    out = output_of(data, weight, op, splits=1 if whole else splits, partial=partial)
    pdl = backend.pdl(data)
    m_tiles = cdiv(rows, chosen.block_m)
    grid = (cdiv(weight.out_features, chosen.block_n) * m_tiles, 1 if whole else splits)
    dot_kernel[grid](
        x=data,
        x_scale=x_scale,
        weight=weight.data,
        w_scale=weight.scale,
        bias=weight.bias,
        out=out,
        rows=rows,
        N=weight.out_features,
        K=depth,
        scale_columns=weight.scale.shape[1] if weight.scale is not None and blocks else 0,
        tiles_per_split=per_split,
        splits=splits,
        BLOCK_N=chosen.block_n,
        BLOCK_M=chosen.block_m,
        BLOCK_K=chosen.block_k,
        GATED=gated,
        W_SCALE=scaling(weight),
        EVEN_K=depth % chosen.block_k == 0,
        PREFETCH=tiles_ahead(weight, chosen, chosen.stages - 1),
        LINES=chosen.ahead == "lines",
        EXACT=x_scale is not None and chosen.block_m <= 64,
        WHOLE=whole,
        PDL=pdl,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        launch_pdl=pdl,
        enable_fp_fusion=not invariant,  # a product and a sum rounded once here and twice there would be a difference
    )
    return summed(out, weight, op)
