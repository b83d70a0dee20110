"""Add the answers of a token's experts, in the order of its routing."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.sizes import cdiv


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    answers,  # [PARTS, rows, N]
    out,  # [rows, N]
    rows,
    N,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):  # unrolled: all loads are on their way at once
        total += tl.load(answers + (part * rows + row) * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=n < N)


def combined(answers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """answers: [parts, rows, size]. Returns their float32 sum, first to last, [rows, size] in `dtype`."""
    parts, rows, size = answers.shape
    out = torch.empty(rows, size, dtype=dtype, device=answers.device)
    block = 256 if rows <= 64 else 1024
    pdl = backend.pdl(answers)
    combine_kernel[(rows, cdiv(size, block))](
        answers=answers,
        out=out,
        rows=rows,
        N=size,
        PARTS=parts,
        BLOCK=block,
        PDL=pdl,
        num_warps=block // 256,
        launch_pdl=pdl,
    )
    return out
