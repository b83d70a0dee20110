"""Residual addition, RMSNorm and fp8 quantisation of a row in one kernel: one program per row, the row in registers."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.ops import backend
from common.ops.loads_triton import AT_ONCE, held, loads_begun
from common.ops.sizes import next_power_of_2
from common.ops.tensors import Activation, Quantised

ELEMENTS_PER_THREAD = 8
"""What one 16-byte load of bfloat16 holds; it gives the number of warps. 4096 elements: 16 warps."""
CANDIDATES = (4, 8, 16)


@triton.jit
def _sum_and_highest(sum_a, highest_a, sum_b, highest_b):
    return sum_a + sum_b, tl.maximum(highest_a, highest_b)


@triton.jit
def add_rms_norm_kernel(
    residual,  # [rows, SIZE], read and written
    delta,  # [SPLITS, rows, SIZE] in the residual's dtype or float32; None if SPLITS is 0
    weight,  # [SIZE] or None
    behind,  # [SIZE] or None
    output,  # [rows, SIZE], the residual's dtype or float8_e4m3fn; None if weight is and QUANTISE is not
    scale,  # float32 [rows] if QUANTISE, else None
    split_stride,
    row_stride,  # of delta
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    gain, gain_behind = 1.0, None
    if weight is not None:
        gain = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if behind is not None:
        gain_behind = tl.load(behind + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = residual + row * SIZE + columns
    x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    if SPLITS > 0:
        # one latency for a few splits and the residual, not one for each
        total = x
        for begin in tl.static_range(0, SPLITS, AT_ONCE):
            parts = ()
            for split in tl.static_range(begin, min(begin + AT_ONCE, SPLITS)):
                offset = tl.full((), split, tl.int64) * split_stride + row * row_stride
                parts += (tl.load(delta + offset + columns, mask=mask, other=0.0).to(tl.float32),)
            part = held(parts[0], loads_begun(PDL and SPLITS > 1), PDL and SPLITS > 1)
            total = part if begin == 0 else total + part
            for split in tl.static_range(1, min(AT_ONCE, SPLITS - begin)):
                total += parts[split]
        if behind is not None:
            DTYPE: tl.constexpr = residual.dtype.element_ty
            total = total.to(DTYPE).to(tl.float32)
            total = total * tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps) * gain_behind
            total = total.to(DTYPE).to(tl.float32)
        rounded = (x + total).to(residual.dtype.element_ty)
        tl.store(places, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if QUANTISE and weight is None:
        highest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-20, propagate_nan=tl.PropagateNan.ALL)
        tl.store(scale + row, highest / 448.0)
        tl.store(output + row * SIZE + columns, (x * (448.0 / highest)).to(output.dtype.element_ty), mask=mask)
    elif QUANTISE:
        squares, highest = tl.reduce((x * x, tl.abs(x * gain)), axis=0, combine_fn=_sum_and_highest)
        inverse = tl.rsqrt(squares / SIZE + eps)
        highest = tl.maximum(highest * inverse, 1e-20, propagate_nan=tl.PropagateNan.ALL)
        tl.store(scale + row, highest / 448.0)
        y = x * gain * (inverse * (448.0 / highest))  # the conversion saturates, and NaN stays NaN
        tl.store(output + row * SIZE + columns, y.to(output.dtype.element_ty), mask=mask)
    elif weight is not None:
        y = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * gain
        tl.store(output + row * SIZE + columns, y.to(output.dtype.element_ty), mask=mask)


def add_rms_norm_triton(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    behind: torch.Tensor | None = None,
    quantise: bool,
    elements_per_thread: int = ELEMENTS_PER_THREAD,
) -> Activation:
    """As `add_rms_norm`, shapes checked by it."""
    rows, size = residual.shape
    in_place = weight is None and not quantise
    if in_place and delta is None:
        return residual
    output = None if in_place else torch.empty_like(residual, dtype=torch.float8_e4m3fn if quantise else residual.dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=residual.device) if quantise else None
    if rows:
        pdl = backend.pdl(residual)
        block = next_power_of_2(size)
        splits = 0 if delta is None else 1 if delta.ndim == 2 else delta.shape[0]
        add_rms_norm_kernel[(rows,)](
            residual=residual,
            delta=delta,
            weight=weight,
            behind=None if delta is None else behind,
            output=output,
            scale=scale,
            split_stride=0 if delta is None else delta.stride(0),
            row_stride=0 if delta is None else delta.stride(-2),
            eps=eps,
            SIZE=size,
            BLOCK=block,
            SPLITS=splits,
            QUANTISE=quantise,
            PDL=pdl,
            num_warps=num_warps(block, elements_per_thread),
            launch_pdl=pdl,
            enable_fp_fusion=False,  # a row has the same bits whatever number of partial sums it is given
        )
    if output is None:
        return residual
    return output if scale is None else Quantised(output, scale)


def num_warps(block: int, elements_per_thread: int = ELEMENTS_PER_THREAD) -> int:
    """Warps for a row of `block` elements, whatever the number of rows: they decide the order of its sum."""
    return min(32, max(1, block // (32 * elements_per_thread)))
