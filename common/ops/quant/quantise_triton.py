"""`quantise_rows`: one program per row; a row of up to 16384 is held in registers, a longer one is read twice."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.sizes import next_power_of_2
from common.ops.tensors import Quantised

_MAX_BLOCK = 16384


@triton.jit
def quantise_rows_kernel(
    x,  # [rows, size]
    data,  # float8_e4m3fn [rows, size]
    scale,  # float32 [rows]
    size,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK holds a row
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * size
    data += row * size
    place = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if WHOLE:
        values = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
        highest = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-20)
        tl.store(data + place, as_e4m3(values, highest), mask=place < size)
    else:
        found = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            inside = start + place < size
            found = tl.maximum(found, tl.abs(tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)))
        highest = tl.maximum(tl.max(found, axis=0), 1e-20)
        for start in range(0, size, BLOCK):
            inside = start + place < size
            values = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(data + start + place, as_e4m3(values, highest), mask=inside)
    tl.store(scale + row, highest / 448.0)


@triton.jit
def as_e4m3(values, highest):
    """values · 448 / highest as float8_e4m3fn."""
    return tl.clamp(values * (448.0 / highest), -448.0, 448.0).to(tl.float8e4nv)


def quantise_rows_triton(x: torch.Tensor) -> Quantised:
    """As `quantise_rows`."""
    rows, size = x.shape
    data = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        pdl = backend.pdl(x)
        block = min(_MAX_BLOCK, next_power_of_2(size))
        quantise_rows_kernel[(rows,)](
            x=x,
            data=data,
            scale=scale,
            size=size,
            BLOCK=block,
            WHOLE=block >= size,
            PDL=pdl,
            num_warps=min(32, max(1, block // 512)),
            launch_pdl=pdl,
        )
    return Quantised(data, scale)
