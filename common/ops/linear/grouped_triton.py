"""`linear` for weights of 4 or 8 bits with a scale for each group (`quant/grouped.py`): from one row to thousands.

As `dot_triton.py`: tiles of the weight are the tall side of `tl.dot`, activation rows its narrow one; one tile is one step,
two runs of inputs. Codes become bf16 numbers in registers, exactly, four bytes at a time. Each run's product is multiplied by
its group's scale in float32, and an offset meets the sum of its group's activations (few rows); or numbers become weights
before the product, which is one of both runs then (SCALED: many rows, and groups of 16, two of which are one run). 8 rows go
through mma.sync, which two warps feed best; more rows through wgmma, with the weight as its operand in registers.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.linear.candidates import Candidate, Op
from common.ops.linear.parts_triton import ask_steps, finish, output_of, scaled, summed, weight_rows
from common.ops.linear.settled_triton import settled
from common.ops.linear.unpack_triton import times, times_plus, unpacked
from common.ops.quant.grouped import GroupedWeight, table_of
from common.ops.sizes import cdiv

if TYPE_CHECKING:
    from common.ops.linear.weight import LinearWeight

CODES = {"int4": 0, "fp4": 1, "nf4": 2, "int8": 3}
"""CODE of the kernels."""

_DEQUANTISED_ROWS = 32
_AHEAD_ROWS = 32
_MOST_AHEAD = 16
_AHEAD_BYTES = 32768
"""Of codes that a program asks L2 for while the kernel before it runs."""


@triton.jit
def halves_of(pair):
    """int32, two float16. Returns both as float32."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def step_numbers(w_rows, step, N, table, dtype: tl.constexpr, RUN: tl.constexpr, CODE: tl.constexpr, FAST: tl.constexpr):
    """The numbers of a step's two runs, [BLOCK_N, RUN] each. w_rows: pointers [BLOCK_N, RUN] to step 0."""
    size = tl.cast(N, tl.int64) * RUN
    if CODE == 3:
        low = tl.load(w_rows + 2 * step * size).to(tl.float32).to(dtype)
        high = tl.load(w_rows + (2 * step + 1) * size).to(tl.float32).to(dtype)
    else:
        low, high = unpacked(tl.load(w_rows + step * size), table, dtype, CODE, FAST)
    return low, high


@triton.jit
def step_scales(scales, step, n, N, lane, GROUP: tl.constexpr, RUN: tl.constexpr):
    """The scales of a step's two runs, float32: [BLOCK_N, 1] each, or [BLOCK_N, RUN] where a run is two groups."""
    row = scales + n
    if GROUP == RUN:
        first, second = halves_of(tl.load(row + tl.cast(step, tl.int64) * N))
        low, high = first[:, None], second[:, None]
    else:
        first, second = halves_of(tl.load(row + 2 * tl.cast(step, tl.int64) * N))
        third, fourth = halves_of(tl.load(row + (2 * tl.cast(step, tl.int64) + 1) * N))
        left = (lane < GROUP)[None, :]
        low = tl.where(left, first[:, None], second[:, None])
        high = tl.where(left, third[:, None], fourth[:, None])
    return low, high


@triton.jit
def _activations(x_rows, shown, depth, K, BLOCK_M: tl.constexpr, EVEN_K: tl.constexpr):
    """[BLOCK_M, columns] of the columns `depth`. x_rows: pointers [BLOCK_M, 1]; shown: [BLOCK_M, 1]."""
    if not EVEN_K:
        a = tl.load(x_rows + depth[None, :], mask=shown & (depth < K)[None, :], other=0.0)
    elif BLOCK_M <= 16:  # padding is not read
        a = tl.load(x_rows + depth[None, :], mask=shown, other=0.0)
    else:
        a = tl.load(x_rows + depth[None, :])
    return a


@triton.jit
def _sum_numbers(
    x_rows,  # see `_activations`
    shown,
    weight,  # this and the next three: see `grouped_kernel`
    scales,
    offsets,
    table,
    n,  # [BLOCK_N]
    first,
    last,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RUN: tl.constexpr,
    CODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sum steps first … last - 1, float32 [BLOCK_N, BLOCK_M]: numbers times activations, then times scales, a run at a time."""
    lane = tl.arange(0, RUN)
    w_rows = weight + n.to(tl.int64)[:, None] * RUN + lane[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):  # named, so that scales are copied ahead as well
        depth = step * (2 * RUN) + lane
        a = _activations(x_rows, shown, depth, K, BLOCK_M, EVEN_K)
        b = _activations(x_rows, shown, depth + RUN, K, BLOCK_M, EVEN_K)
        low_scale, high_scale = step_scales(scales, step, n, N, lane, RUN, RUN)
        low, high = step_numbers(w_rows, step, N, table, a.dtype, RUN, CODE, FAST)
        total += tl.dot(low, a.T, input_precision="ieee") * low_scale
        total += tl.dot(high, b.T, input_precision="ieee") * high_scale
        if offsets is not None:
            low_offset, high_offset = step_scales(offsets, step, n, N, lane, RUN, RUN)
            total += low_offset * tl.sum(a.to(tl.float32), axis=1)[None, :]
            total += high_offset * tl.sum(b.to(tl.float32), axis=1)[None, :]
    return total


@triton.jit
def sum_weights(
    x_rows,  # pointers [BLOCK_M, 1]
    shown,  # [BLOCK_M, 1]
    weight,  # this and the next three: see `grouped_kernel`
    scales,
    offsets,
    table,
    n,  # [BLOCK_N]
    first,
    last,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    LANES: tl.constexpr,
    CODE: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sum steps first … last - 1, float32 [BLOCK_N, BLOCK_M]: weights times activations.

    LANES of both runs are one product, not two of which the second waits for the first."""
    PARTS: tl.constexpr = RUN // LANES
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 2 * LANES)
    column = column % LANES + column // LANES * RUN
    w_rows = weight + n.to(tl.int64)[:, None] * RUN + lane[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in tl.range(first * PARTS, last * PARTS, num_stages=STAGES):
        step = turn // PARTS
        skipped = turn % PARTS * LANES
        a = _activations(x_rows, shown, step * (2 * RUN) + skipped + column, K, BLOCK_M, EVEN_K)
        low, high = step_numbers(w_rows + skipped, step, N, table, a.dtype, RUN, CODE, FAST)
        low_scale, high_scale = step_scales(scales, step, n, N, lane, GROUP, RUN)
        low_scale = tl.broadcast_to(low_scale.to(a.dtype), [BLOCK_N, LANES])
        high_scale = tl.broadcast_to(high_scale.to(a.dtype), [BLOCK_N, LANES])
        if offsets is None:
            low = times(low, low_scale, a.dtype, FAST)
            high = times(high, high_scale, a.dtype, FAST)
        else:
            low_offset, high_offset = step_scales(offsets, step, n, N, lane, GROUP, RUN)
            low = times_plus(low, low_scale, tl.broadcast_to(low_offset.to(a.dtype), [BLOCK_N, LANES]), a.dtype, FAST)
            high = times_plus(high, high_scale, tl.broadcast_to(high_offset.to(a.dtype), [BLOCK_N, LANES]), a.dtype, FAST)
        w = tl.join(low, high).permute(0, 2, 1).reshape(BLOCK_N, 2 * LANES)
        total = settled(tl.dot(w, a.T, total, input_precision="ieee"), FAST)
    return total


@triton.jit(do_not_specialize=["rows", "steps_per_split", "steps"])
def grouped_kernel(
    x,  # [rows, K]
    weight,  # see `GroupedWeight`
    scales,  # int32 [steps, N]
    offsets,  # int32 [steps, N] or None
    channel,  # float32 [N]
    table,  # float32 [16], read where CODE is 2 and FAST is not set
    bias,  # [N] or None
    out,  # [rows, N], [rows, N / 2] if GATED, or float32 [splits, rows, N]
    rows,
    N,
    K,
    steps,
    steps_per_split,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    LANES: tl.constexpr,  # of a run in a turn of the loop, if SCALED
    CODE: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
    AHEAD: tl.constexpr,  # steps
    PDL: tl.constexpr,
):
    m_tiles = tl.cdiv(rows, BLOCK_M)
    tile = tl.program_id(0) // m_tiles  # programs of one weight tile are neighbours: the second finds it in L2
    m = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, steps)
    n = weight_rows(tile, N, BLOCK_N, GATED)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD > 0:
            PIECES: tl.constexpr = 2 if CODE == 3 else 1
            SCALES: tl.constexpr = 1 if GROUP == RUN else 2
            ask_steps(weight, tile, first, last, N, RUN, PIECES, BLOCK_N, GATED, AHEAD)
            ask_steps(scales, tile, first, last, N, 1, SCALES, BLOCK_N, GATED, AHEAD)
            if offsets is not None:
                ask_steps(offsets, tile, first, last, N, 1, SCALES, BLOCK_N, GATED, AHEAD)
        tl.extra.cuda.gdc_wait()
    x_rows = x + (m % rows).to(tl.int64)[:, None] * K  # padding reads all rows: L2 is slow if all ask for one
    shown = (m < rows)[:, None]
    if SCALED:
        total = sum_weights(
            x_rows, shown, weight, scales, offsets, table, n, first, last, N, K,
            BLOCK_N, BLOCK_M, GROUP, RUN, LANES, CODE, EVEN_K, STAGES, FAST,
        )  # fmt: skip
    else:
        total = _sum_numbers(
            x_rows, shown, weight, scales, offsets, table, n, first, last, N, K,
            BLOCK_N, BLOCK_M, RUN, CODE, EVEN_K, STAGES, FAST,
        )  # fmt: skip
    total = scaled(total, n, m, split, None, channel, bias, rows, 1)
    finish(total, m, tile, split, out, rows, N, BLOCK_N, BLOCK_M, GATED)


def linear_grouped(op: Op, x: torch.Tensor, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    """x: [rows, in_features], columns in the weight's order. Returns as `linear_dot` does."""
    grouped = weight.grouped
    assert grouped is not None
    rows, depth = x.shape
    steps = len(grouped.data)
    per_split = cdiv(steps, chosen.splits)
    splits = cdiv(steps, per_split)
    out = output_of(x, weight, op, splits=splits, partial=splits > 1)
    pdl = backend.pdl(x)
    grid = (cdiv(weight.out_features, chosen.block_n) * cdiv(rows, chosen.block_m), splits)
    grouped_kernel[grid](
        x=x,
        weight=grouped.data,
        scales=grouped.scales,
        offsets=grouped.offsets,
        channel=grouped.channel,
        table=_table(grouped),
        bias=weight.bias,
        out=out,
        rows=rows,
        N=weight.out_features,
        K=depth,
        steps=steps,
        steps_per_split=per_split,
        BLOCK_N=chosen.block_n,
        BLOCK_M=chosen.block_m,
        GROUP=grouped.group,
        CODE=CODES[grouped.code],
        GATED=op == "gated",
        RUN=grouped.run,
        LANES=min(chosen.lanes or grouped.run, grouped.run),
        EVEN_K=depth % (2 * grouped.run) == 0,
        SCALED=chosen.scaled or grouped.group < grouped.run,
        STAGES=chosen.stages,
        FAST=pdl,
        AHEAD=_steps_ahead(weight, grouped, chosen),
        PDL=pdl,
        num_warps=chosen.warps,
        launch_pdl=pdl,
        enable_fp_fusion=not weight.batch_invariant,
    )
    return summed(out, weight, op)


def _steps_ahead(weight: LinearWeight, grouped: GroupedWeight, chosen: Candidate) -> int:
    """How many steps to ask L2 for: none where a tile's rows are not whole runs of 16 bytes, or many rows hide the wait."""
    if chosen.ahead == "none" or chosen.block_m > _AHEAD_ROWS or weight.out_features % 8:
        return 0
    step_bytes = chosen.block_n * grouped.data[0].nbytes // weight.out_features
    return max(1, min(_MOST_AHEAD, _AHEAD_BYTES // step_bytes))


# ── for the library ──────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def dequantise_grouped_kernel(
    weight,
    scales,
    offsets,
    channel,
    table,
    out,  # [rows, K], of the weight's rows first … first + rows - 1
    first,
    rows,
    N,
    K,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    CODE: tl.constexpr,
    FAST: tl.constexpr,
):
    step = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = first + tl.minimum(row, rows - 1)
    lane = tl.arange(0, RUN)
    w_rows = weight + n.to(tl.int64)[:, None] * RUN + lane[None, :]
    low, high = step_numbers(w_rows, step, N, table, out.dtype.element_ty, RUN, CODE, FAST)
    factor = tl.load(channel + n)[:, None]
    low_scale, high_scale = step_scales(scales, step, n, N, lane, GROUP, RUN)
    low = low.to(tl.float32) * (low_scale * factor)
    high = high.to(tl.float32) * (high_scale * factor)
    if offsets is not None:
        low_offset, high_offset = step_scales(offsets, step, n, N, lane, GROUP, RUN)
        low += low_offset * factor
        high += high_offset * factor
    depth = step * (2 * RUN) + lane
    place = out + row.to(tl.int64)[:, None] * K
    inside = (row < rows)[:, None]
    tl.store(place + depth[None, :], low.to(out.dtype.element_ty), mask=inside & (depth < K)[None, :])
    tl.store(place + (depth + RUN)[None, :], high.to(out.dtype.element_ty), mask=inside & (depth + RUN < K)[None, :])


def dequantise_rows(weight: GroupedWeight, first: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Outputs first … first + rows - 1 of `weight`, [rows, in] in `dtype`, columns in the stored order."""
    out = torch.empty(rows, weight.in_features, dtype=dtype, device=weight.data.device)
    dequantise_grouped_kernel[(cdiv(rows, _DEQUANTISED_ROWS), len(weight.data))](
        weight=weight.data,
        scales=weight.scales,
        offsets=weight.offsets,
        channel=weight.channel,
        table=_table(weight),
        out=out,
        first=first,
        rows=rows,
        N=weight.out_features,
        K=weight.in_features,
        BLOCK_N=_DEQUANTISED_ROWS,
        GROUP=weight.group,
        RUN=weight.run,
        CODE=CODES[weight.code],
        FAST=backend.pdl(out),
        num_warps=4,
    )
    return out


_tables: dict[torch.device, torch.Tensor] = {}


def _table(weight: GroupedWeight) -> torch.Tensor | None:
    if weight.code != "nf4":
        return None
    device = weight.data.device
    if device not in _tables:
        _tables[device] = table_of("nf4", device)
    return _tables[device]
