"""activation(gate) · up of a finished linear on a GPU, and what the linear left to do: scales and bias."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.quant.quantise_triton import as_e4m3
from common.ops.sizes import cdiv, next_power_of_2
from common.ops.tensors import Activation, Quantised

_BLOCK = 2048
_MAX_ROW = 16384
"""Elements of a row that is held in registers while its scale is found; a longer one is computed twice."""


@triton.jit
def silu_mul_kernel(
    gate_up,  # [rows, 2 · size], the gate first
    x_scale,  # float32 [rows] with w_scale float32 [2 · size], or None
    w_scale,
    bias,  # [2 · size], still to be added, or None
    out,  # [rows, size], float8_e4m3fn if QUANTISE
    out_scale,  # float32 [rows] if QUANTISE, else None
    size,
    BLOCK: tl.constexpr,
    QUANTISE: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK holds a row
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate_up += row * 2 * size
    out += row * size
    if x_scale is not None:
        x_scale += row
    if QUANTISE and WHOLE:
        place = tl.arange(0, BLOCK)
        values = gated(gate_up, x_scale, w_scale, bias, place, size, GELU)
        highest = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-20)
        tl.store(out + place, as_e4m3(values, highest), mask=place < size)
        tl.store(out_scale + row, highest / 448.0)
    elif QUANTISE:
        found = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            found = tl.maximum(found, tl.abs(gated(gate_up, x_scale, w_scale, bias, start + tl.arange(0, BLOCK), size, GELU)))
        highest = tl.maximum(tl.max(found, axis=0), 1e-20)
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(
                out + place, as_e4m3(gated(gate_up, x_scale, w_scale, bias, place, size, GELU), highest), mask=place < size
            )
        tl.store(out_scale + row, highest / 448.0)
    else:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = gated(gate_up, x_scale, w_scale, bias, place, size, GELU)
        tl.store(out + place, values.to(out.dtype.element_ty), mask=place < size)


@triton.jit
def gated(gate_up, x_scale, w_scale, bias, place, size, GELU: tl.constexpr):
    """silu(gate) · up of one row at `place`, or gelu's tanh form, float32; 0 past its end."""
    inside = place < size
    gate = tl.load(gate_up + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + size + place, mask=inside, other=0.0).to(tl.float32)
    if x_scale is not None:
        factor = tl.load(x_scale)
        gate *= tl.load(w_scale + place, mask=inside, other=0.0) * factor
        up *= tl.load(w_scale + size + place, mask=inside, other=0.0) * factor
    if bias is not None:
        gate += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + size + place, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # x · (1 + tanh(y)) / 2 is x · sigmoid(2 y)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-inner)) * up


@triton.jit
def rescale_kernel(y, x_scale, w_scale, bias, out, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = y · x_scale · w_scale + bias, [rows, N]; it may be y itself."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < N
    factor = tl.load(w_scale + place, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(y + row * N + place, mask=inside, other=0.0).to(tl.float32) * (factor * tl.load(x_scale + row))
    if bias is not None:
        value += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + place, value.to(out.dtype.element_ty), mask=inside)


def silu_mul_triton(
    gate_up: torch.Tensor,
    dtype: torch.dtype,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    quantise: bool = False,
    gelu: bool = False,
) -> Activation:
    """gate_up: [rows, 2 · size], before `scales` (of rows and of columns) and `bias` if given. gelu: instead of silu.

    Returns [rows, size].
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=torch.float8_e4m3fn if quantise else dtype, device=gate_up.device)
    out_scale = torch.empty(rows, dtype=torch.float32, device=gate_up.device) if quantise else None
    pdl = backend.pdl(gate_up)
    whole = quantise and size <= _MAX_ROW
    block = next_power_of_2(size) if whole else min(_BLOCK, next_power_of_2(size))
    silu_mul_kernel[(rows, 1 if quantise else cdiv(size, block))](
        gate_up=gate_up,
        x_scale=None if scales is None else scales[0],
        w_scale=None if scales is None else scales[1],
        bias=bias,
        out=out,
        out_scale=out_scale,
        size=size,
        BLOCK=block,
        QUANTISE=quantise,
        WHOLE=whole,
        GELU=gelu,
        PDL=pdl,
        num_warps=min(32, max(4, block // 512)) if whole else 8 if block >= 2048 else 4,
        launch_pdl=pdl,
    )
    return out if out_scale is None else Quantised(out, out_scale)


def rescale_triton(
    y: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """y: [rows, N], before scales of rows and of columns, and bias. Returns [rows, N] in `dtype`; y may be overwritten."""
    rows, size = y.shape
    out = y if y.dtype == dtype else torch.empty(rows, size, dtype=dtype, device=y.device)
    pdl = backend.pdl(y)
    block = min(_BLOCK, next_power_of_2(size))
    rescale_kernel[(rows, cdiv(size, block))](
        y=y,
        x_scale=x_scale,
        w_scale=w_scale,
        bias=bias,
        out=out,
        N=size,
        BLOCK=block,
        PDL=pdl,
        num_warps=8 if block >= 2048 else 4,
        launch_pdl=pdl,
    )
    return out
