"""What the kernels for few rows share: which weight rows a tile has, asking L2 ahead, scales, bias and gate, sums of splits.

GATED: the weight is gate rows, then up rows; a tile holds BLOCK_N / 2 of each, and silu(gate) · up leaves it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.linear.candidates import Candidate, Op
from common.ops.sizes import cdiv

if TYPE_CHECKING:
    from common.ops.linear.weight import LinearWeight

_SUM_BLOCK = 1024


@triton.jit
def weight_rows(tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The weight rows of a tile (beyond the last: the last again), [BLOCK_N]; with GATED the gate's rows, then the up's."""
    return _row_of(tl.arange(0, BLOCK_N), tile, N, BLOCK_N, GATED)


@triton.jit
def _row_of(lane, tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    if GATED:
        size = N // 2
        column = tl.minimum(tile * (BLOCK_N // 2) + lane % (BLOCK_N // 2), size - 1)
        return column + tl.where(lane < BLOCK_N // 2, 0, size)
    return tl.minimum(tile * BLOCK_N + lane, N - 1)


@triton.jit
def gate(total, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """total: [BLOCK_N, BLOCK_M], gate rows, then up rows. Returns silu(gate) · up, [BLOCK_N / 2, BLOCK_M]."""
    halves = total.reshape(2, BLOCK_N // 2, BLOCK_M).permute(1, 2, 0)
    gates, ups = tl.split(halves)
    return gates / (1.0 + tl.exp(-gates)) * ups


@triton.jit
def ask_ahead(
    weight,
    tile,
    first,
    last,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
):
    """Asks L2 for the first TILES tiles along K of each weight row of a tile. Rows are multiples of 16 bytes long."""
    ITEM: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    if LINES:  # one line of 128 bytes a thread; the last of a row stands for those past its end
        rows = weight_rows(tile, N, BLOCK_N, GATED).to(tl.int64)[:, None]
        start = (weight + rows * K + first * BLOCK_K).to(tl.int64)
        line = tl.arange(0, BLOCK_K * ITEM // 128) * 128
        for ahead in tl.static_range(TILES):
            depth = tl.minimum(line + ahead * (BLOCK_K * ITEM), (K - first * BLOCK_K - 1) * ITEM)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [start + depth[None, :]],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    else:
        # one run of bytes a row. A tensor of BLOCK_N would be copied to all threads, and every warp would ask for every row;
        # so one thread a row asks, as many in each warp, since the instruction takes its threads one after the other
        THREADS: tl.constexpr = tl.extra.cuda.num_threads()
        EACH: tl.constexpr = max(1, THREADS // BLOCK_N)
        lane = tl.arange(0, BLOCK_N * EACH)
        rows = _row_of(lane // EACH, tile, N, BLOCK_N, GATED).to(tl.int64)
        start = (weight + rows * K + first * BLOCK_K).to(tl.int64)
        size = tl.minimum((last - first) * BLOCK_K, TILES * BLOCK_K)
        size = tl.minimum(size, K - first * BLOCK_K) * ITEM
        ask_l2(start, tl.where(lane % EACH == 0, size, 0))


@triton.jit
def ask_steps(
    data,
    tile,
    first,
    last,
    N,
    ROW: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Asks L2 for a tile's part of a weight in groups, or of its scales: up to STEPS steps from `first` on, before `last`.

    data: [steps, PIECES, N, ROW]; a tile's rows lie side by side, so one thread asks for all of a piece (with GATED two do:
    the gate's rows and the up's). N and N / 2 times a row's bytes are multiples of 16."""
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    PARTS: tl.constexpr = 2 if GATED else 1  # pyright: ignore[reportAssignmentType]
    ROWS: tl.constexpr = BLOCK_N // PARTS
    tl.static_assert(STEPS * PIECES * PARTS <= THREADS)
    lane = tl.arange(0, THREADS)
    piece = lane // PARTS
    width = N // PARTS
    row = tile * ROWS
    place = (first * PIECES + piece).to(tl.int64) * N + lane % PARTS * width + row
    size = tl.minimum(width - row, ROWS) * (ROW * data.dtype.element_ty.primitive_bitwidth // 8)
    asked = piece < tl.minimum(last - first, STEPS) * PIECES
    ask_l2((data + place * ROW).to(tl.int64), tl.where(asked, size, 0))


@triton.jit
def ask_l2(address, size):
    """Ask L2 for `size` bytes, a multiple of 16, at each address; of those with a size of 0 nothing."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred asks;
        setp.gt.s32 asks, $2, 0;
        @asks cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def scaled(total, n, m, split, x_scale, w_scale, bias, rows, W_SCALE: tl.constexpr):
    """total: [BLOCK_N, BLOCK_M] of weight rows n and activation rows m; the bias goes to the first split."""
    if W_SCALE == 1:
        total *= tl.load(w_scale + n)[:, None]
    if x_scale is not None:
        total *= tl.load(x_scale + tl.minimum(m, rows - 1))[None, :]
    if bias is not None:
        total += tl.where(split == 0, tl.load(bias + n).to(tl.float32), 0.0)[:, None]
    return total


@triton.jit
def finish(
    total,  # float32 [BLOCK_N, BLOCK_M]
    m,  # its activation rows, [BLOCK_M]
    tile,
    split,
    out,
    rows,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GATED: tl.constexpr,
):
    """Gate of a tile, and its store."""
    if GATED:
        total = gate(total, BLOCK_N, BLOCK_M)
        columns = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        width = N // 2
    else:
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        width = N
    place = (split * rows + m).to(tl.int64)[None, :] * width + columns[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(m < rows)[None, :] & (columns < width)[:, None])


@triton.jit(do_not_specialize=["rows", "splits"])
def sum_kernel(partials, out, rows, N, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[rows, N] = Σ partials[splits, rows, N], first to last."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    size = rows.to(tl.int64) * N
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    total = tl.load(partials + place, mask=mask, other=0.0)
    for split in range(1, splits):
        total += tl.load(partials + split * size + place, mask=mask, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def sum_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partials: float32 [splits, rows, N]. Returns their sum, first to last, [rows, N] in `dtype`."""
    splits, rows, size = partials.shape
    out = torch.empty(rows, size, dtype=dtype, device=partials.device)
    pdl = backend.pdl(partials)
    sum_kernel[(cdiv(rows * size, _SUM_BLOCK),)](
        partials=partials,
        out=out,
        rows=rows,
        N=size,
        splits=splits,
        BLOCK=_SUM_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def output_of(data: torch.Tensor, weight: LinearWeight, op: Op, *, splits: int, partial: bool) -> torch.Tensor:
    rows, size = len(data), weight.out_features
    if partial:
        return torch.empty(splits, rows, size, dtype=torch.float32, device=data.device)
    return torch.empty(rows, size // 2 if op == "gated" else size, dtype=result_dtype(weight, op), device=data.device)


def summed(out: torch.Tensor, weight: LinearWeight, op: Op) -> torch.Tensor:
    return out if out.ndim == 2 or op == "split" else sum_partials(out, result_dtype(weight, op))


def result_dtype(weight: LinearWeight, op: Op) -> torch.dtype:
    """Return what the results of `op` are, partial sums aside."""
    return torch.float32 if op == "wide" else weight.dtype


def scaling(weight: LinearWeight) -> int:
    return 0 if weight.scale is None else weight.scale.ndim


def tiles_ahead(weight: LinearWeight, chosen: Candidate, tiles: int) -> int:
    """How many tiles to ask L2 for: none where rows are not whole runs of 16 bytes."""
    aligned = weight.in_features * weight.data.element_size() % 16 == 0
    return tiles if aligned and chosen.ahead != "none" else 0
