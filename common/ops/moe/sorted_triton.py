"""What stands around the library's grouped products: tokens in the order of their experts, the activation, and the way back."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.moe.form import ExpertActivation, Routing
from common.ops.moe.grouped_triton import activated
from common.ops.moe.sort_triton import SortedPairs
from common.ops.sizes import cdiv, next_power_of_2

_BLOCK = 1024
_SCATTERED_BLOCK = 2048


@triton.jit
def scatter_kernel(
    x,  # [rows, K]
    places,  # int32 [pairs]
    out,  # [pairs, K]
    K,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * K + k, mask=k < K)
    for one in tl.static_range(TOP_K):
        place = tl.load(places + row * TOP_K + one).to(tl.int64)
        tl.store(out + place * K + k, values, mask=k < K)


@triton.jit
def activate_kernel(
    products,  # [pairs, 2 * N], gate, then up, in the order of experts
    bias,  # [experts, 2 * N] or None
    order,  # int32 [pairs]
    ids,  # int32 [pairs], of a token's experts
    factors,  # float32 [pairs]
    out,  # [pairs, N]
    N,
    alpha,
    limit,
    WEIGH: tl.constexpr,  # the inputs were to be scaled: their products are
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.load(order + place)
    expert = tl.load(ids + pair).to(tl.int64)
    for begin in range(0, N, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        gate = tl.load(products + place * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
        up = tl.load(products + place * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
        if WEIGH:
            factor = tl.load(factors + pair)
            gate *= factor
            up *= factor
        if bias is not None:
            gate += tl.load(bias + expert * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
            up += tl.load(bias + expert * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
        value = activated(gate, up, alpha, limit, ACTIVATION)
        tl.store(out + place * N + n, value.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def return_kernel(
    answers,  # [pairs, N], in the order of experts
    bias,  # [experts, N] or None
    places,  # int32 [pairs]
    ids,  # int32 [pairs]
    factors,  # float32 [pairs]
    out,  # [rows, N]
    N,
    TOP_K: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for begin in range(0, N, BLOCK):
        n = begin + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for one in tl.static_range(TOP_K):
            pair = row * TOP_K + one
            place = tl.load(places + pair).to(tl.int64)
            answer = tl.load(answers + place * N + n, mask=n < N, other=0.0).to(tl.float32)
            if bias is not None:
                expert = tl.load(ids + pair).to(tl.int64)
                answer += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)
            if WEIGH:
                answer *= tl.load(factors + pair)
            total += answer
        tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=n < N)


def scattered(x: torch.Tensor, found: SortedPairs, top_k: int) -> torch.Tensor:
    """x: [rows, size]. found: with places. Returns [pairs, size], a token's row for each of its experts, in the order of
    experts."""
    assert found.places is not None
    (rows, size), pdl = x.shape, backend.pdl(x)
    out = torch.empty(rows * top_k, size, dtype=x.dtype, device=x.device)
    block = min(_SCATTERED_BLOCK, next_power_of_2(size))
    scatter_kernel[(rows, cdiv(size, block))](
        x=x, places=found.places, out=out, K=size, TOP_K=top_k, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def activate(
    products: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    found: SortedPairs,
    activation: ExpertActivation,
    *,
    weigh_inputs: bool,
) -> torch.Tensor:
    """products: [pairs, 2 * size], gate, then up, in the order of experts. Returns [pairs, size] in that dtype."""
    pairs, size = len(products), products.shape[1] // 2
    out = torch.empty(pairs, size, dtype=products.dtype, device=products.device)
    pdl = backend.pdl(products)
    activate_kernel[(pairs,)](
        products=products,
        bias=bias,
        order=found.order,
        ids=routing.ids,
        factors=routing.weights,
        out=out,
        N=size,
        alpha=activation.alpha,
        limit=activation.limit,
        WEIGH=weigh_inputs,
        ACTIVATION=activation.kind,
        BLOCK=min(_BLOCK, next_power_of_2(size)),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def returned(
    answers: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    found: SortedPairs,
    *,
    weigh: bool,
) -> torch.Tensor:
    """answers: [pairs, size], in the order of experts. Returns [rows, size] in that dtype: the sums of each token's answers, in
    the order of its routing, in float32. found: with places."""
    (rows, top_k), size = routing.ids.shape, answers.shape[1]
    assert found.places is not None
    out = torch.empty(rows, size, dtype=answers.dtype, device=answers.device)
    pdl = backend.pdl(answers)
    return_kernel[(rows,)](
        answers=answers,
        bias=bias,
        places=found.places,
        ids=routing.ids,
        factors=routing.weights,
        out=out,
        N=size,
        TOP_K=top_k,
        WEIGH=weigh,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
