"""A plain mixture of experts on a GPU, to compare `common.ops.moe` with: published layouts, tiles by a rule, no overlap.

Pairs of token and expert are sorted by expert, then three kernels multiply and add up. Weights are the second operand of
`tl.dot`: 4-bit codes become numbers one by one, in float32, and go through shared memory.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from common.ops.moe.form import ExpertActivation, Routing
from common.ops.moe.grouped_weight import GroupedWeight


class Tiles(NamedTuple):
    """How the grouped products are cut up. block_m: pairs of one expert in a program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def default_tiles(pairs: int, experts: int) -> Tiles:
    """Return tiles by the pairs that an expert gets on average."""
    if pairs <= 16 * experts:
        return Tiles(16, 32, 128, 4, 4)
    return Tiles(64, 64, 64, 4, 3) if pairs <= 64 * experts else Tiles(128, 64, 64, 8, 3)


@triton.jit
def sort_kernel(
    ids,  # int32 [pairs]
    offsets,  # int32 [EXPERTS + 1], written
    order,  # int32 [pairs], written: the pairs of expert 0, of expert 1, …, each expert's in their own order
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    before = tl.zeros((), tl.int32)
    for begin in range(0, pairs, BLOCK):
        found = tl.load(ids + begin + columns, mask=begin + columns < pairs, other=EXPERTS)
        before += tl.sum((found < expert).to(tl.int32))
    tl.store(offsets + expert, before)
    if expert == EXPERTS - 1:
        tl.store(offsets + EXPERTS, pairs)
    for begin in range(0, pairs, BLOCK):
        found = tl.load(ids + begin + columns, mask=begin + columns < pairs, other=EXPERTS)
        mine = (found == expert).to(tl.int32)
        tl.store(order + before + tl.cumsum(mine, 0) - 1, begin + columns, mask=mine != 0)
        before += tl.sum(mine)


@triton.jit
def _weight_tile(
    values,  # of this expert
    scale,
    zeros,
    n,  # [BLOCK_N]
    begin,
    N,
    K,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] in DTYPE; fp8 without its scale."""
    if FORMAT == "plain" or FORMAT == "fp8":
        k = begin + tl.arange(0, BLOCK_K)
        inside = (n < N)[:, None] & (k < K)[None, :]
        tile = tl.load(values + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0).to(DTYPE)
    else:
        k = begin // 2 + tl.arange(0, BLOCK_K // 2)
        inside = (n < N)[:, None] & (k < K // 2)[None, :]
        packed = tl.load(values + n.to(tl.int64)[:, None] * (K // 2) + k[None, :], mask=inside, other=0)
        code = tl.join(packed & 15, packed >> 4).to(tl.int32)
        group = begin + 32 * tl.arange(0, BLOCK_K // 32)
        scale_at = n.to(tl.int64)[:, None] * (K // GROUP) + (group // GROUP)[None, :]
        has_scale = (n < N)[:, None] & (group < K)[None, :]
        if FORMAT == "mxfp4":
            exponent = (code >> 1) & 3
            # in halves: 0, 1, 2, 3, 4, 6, 8, 12
            halves = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << (tl.maximum(exponent, 1) - 1))
            number = tl.where(code >= 8, -halves, halves).to(tl.float32) * 0.5
            bits = tl.load(scale + scale_at, mask=has_scale, other=0).to(tl.int32)
            factor = (bits << 23).to(tl.float32, bitcast=True)
            number = tl.reshape(number, (BLOCK_N, BLOCK_K // 32, 32))
        else:
            factor = tl.load(scale + scale_at, mask=has_scale, other=0.0).to(tl.float32)
            number = tl.reshape(code.to(tl.float32), (BLOCK_N, BLOCK_K // 32, 32))
            if zeros is None:
                number = number - 8.0
            else:
                number = number - tl.load(zeros + scale_at, mask=has_scale, other=0).to(tl.float32)[:, :, None]
        tile = tl.reshape(number * factor[:, :, None], (BLOCK_N, BLOCK_K)).to(DTYPE)
    return tile


@triton.jit
def _finished(total, scale, bias, expert, n, N, FORMAT: tl.constexpr):
    """The sums of columns n with the scale of their channel and their bias. total: [BLOCK_M, BLOCK_N]."""
    at = expert.to(tl.int64) * N + n
    if FORMAT == "fp8":
        total = total * tl.load(scale + at, mask=n < N, other=0.0)[None, :]
    if bias is not None:
        total = total + tl.load(bias + at, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def grouped_kernel(
    x,  # GATED: [rows, K], else [pairs, K] in the order of `order`
    values,  # GroupedWeight's, of N rows an expert: 2 * WIDTH if GATED, gate above up, else WIDTH
    scale,
    zeros,
    bias,
    offsets,  # int32 [EXPERTS + 1]
    order,  # int32 [pairs]
    factors,  # float32 [pairs]
    out,  # GATED: [pairs, WIDTH] in the order of `order`, x's dtype; else float32 [pairs, WIDTH] in that of tokens
    K,
    WIDTH,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    WEIGH: tl.constexpr,  # GATED: the inputs, else the answers
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(1)
    each = tl.arange(0, EXPERTS_BLOCK)
    starts = tl.load(offsets + each, mask=each < EXPERTS, other=0)
    stops = tl.load(offsets + each + 1, mask=each < EXPERTS, other=0)
    tiles = (stops - starts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32))
    if expert >= EXPERTS:
        return
    chosen = each == expert
    first = tl.sum(tl.where(chosen, ends - tiles, 0))
    position = tl.sum(tl.where(chosen, starts, 0)) + (tile - first) * BLOCK_M + tl.arange(0, BLOCK_M)
    present = position < tl.sum(tl.where(chosen, stops, 0))
    pair = tl.load(order + position, mask=present, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    N = 2 * WIDTH if GATED else WIDTH
    a_row = (pair // TOP_K if GATED else tl.where(present, position, 0)).to(tl.int64)
    factor = tl.load(factors + pair, mask=present, other=0.0)
    bytes_per_two: tl.constexpr = 1 if FORMAT == "mxfp4" or FORMAT == "int4" else 2
    mine = values + expert.to(tl.int64) * N * (K * bytes_per_two // 2)
    up_mine = mine + WIDTH.to(tl.int64) * (K * bytes_per_two // 2)
    scale_mine, zeros_mine, up_scale, up_zeros = scale, zeros, scale, zeros
    if bytes_per_two == 1:
        skipped = expert.to(tl.int64) * N * (K // GROUP)
        scale_mine = scale + skipped
        up_scale = scale_mine + WIDTH.to(tl.int64) * (K // GROUP)
        if zeros is not None:
            zeros_mine = zeros + skipped
            up_zeros = zeros_mine + WIDTH.to(tl.int64) * (K // GROUP)
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        a = tl.load(x + a_row[:, None] * K + k[None, :], mask=present[:, None] & (k < K)[None, :], other=0.0)
        if GATED and WEIGH:
            a = (a.to(tl.float32) * factor[:, None]).to(dtype)
        w = _weight_tile(mine, scale_mine, zeros_mine, n, begin, WIDTH, K, FORMAT, GROUP, BLOCK_N, BLOCK_K, dtype)
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
        if GATED:
            w = _weight_tile(up_mine, up_scale, up_zeros, n, begin, WIDTH, K, FORMAT, GROUP, BLOCK_N, BLOCK_K, dtype)
            up = tl.dot(a, tl.trans(w), up, input_precision="ieee")
    inside = present[:, None] & (n < WIDTH)[None, :]
    if GATED:
        up_n = tl.where(n < WIDTH, n + WIDTH, N)
        gate_n = tl.where(n < WIDTH, n, N)
        gate = _finished(total, scale, bias, expert, gate_n, N, FORMAT)
        up = _finished(up, scale, bias, expert, up_n, N, FORMAT)
        if ACTIVATION == "clamped_swiglu":
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            answer = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
        elif ACTIVATION == "silu":
            answer = gate * tl.sigmoid(gate) * up
        else:
            # gelu's 0.5 * (1 + tanh(z)) is sigmoid(2 * z)
            answer = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
        place = position.to(tl.int64)
    else:
        answer = _finished(total, scale, bias, expert, n, N, FORMAT)
        if WEIGH:
            answer = answer * factor[:, None]
        place = pair.to(tl.int64)
    tl.store(out + place[:, None] * WIDTH + n[None, :], answer.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    answers,  # float32 [rows * TOP_K, WIDTH]
    out,  # [rows, WIDTH]
    WIDTH,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        total += tl.load(answers + (row * TOP_K + rank) * WIDTH + n, mask=n < WIDTH, other=0.0)
    tl.store(out + row * WIDTH + n, total.to(out.dtype.element_ty), mask=n < WIDTH)


def experts_baseline(
    x: torch.Tensor,
    routing: Routing,
    gate_up: GroupedWeight,
    down: GroupedWeight,
    activation: ExpertActivation,
    *,
    weigh_inputs: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """See `experts`. x: [rows, hidden], contiguous. tiles: `default_tiles` if None."""
    (rows, top_k), hidden, middle = routing.ids.shape, x.shape[1], down.k
    pairs, count = rows * top_k, gate_up.experts
    out = torch.empty_like(x)
    if not rows:
        return out
    ids, factors = routing.ids.contiguous(), routing.weights.contiguous()
    chosen = tiles or default_tiles(pairs, count)
    offsets = torch.empty(count + 1, dtype=torch.int32, device=x.device)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    block = min(4096, max(64, triton.next_power_of_2(pairs)))
    sort_kernel[(count,)](ids=ids, offsets=offsets, order=order, pairs=pairs, EXPERTS=count, BLOCK=block)
    between = torch.empty(pairs, middle, dtype=x.dtype, device=x.device)
    answers = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    # every expert that has pairs may have one tile that is not full
    most_tiles = min(pairs, count) + pairs // chosen.block_m
    for weight, given, result, gated in ((gate_up, x, between, True), (down, between, answers, False)):
        width = result.shape[1]
        grouped_kernel[(triton.cdiv(width, chosen.block_n), most_tiles)](
            x=given,
            values=weight.values,
            scale=weight.scale,
            zeros=weight.zeros,
            bias=weight.bias,
            offsets=offsets,
            order=order,
            factors=factors,
            out=result,
            K=weight.k,
            WIDTH=width,
            alpha=activation.alpha,
            limit=activation.limit,
            EXPERTS=count,
            EXPERTS_BLOCK=triton.next_power_of_2(count),
            TOP_K=top_k,
            GATED=gated,
            WEIGH=weigh_inputs == gated,
            ACTIVATION=activation.kind,
            FORMAT=weight.format,
            GROUP=weight.group,
            BLOCK_M=chosen.block_m,
            BLOCK_N=chosen.block_n,
            BLOCK_K=chosen.block_k,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    combine_kernel[(rows, triton.cdiv(hidden, 1024))](answers=answers, out=out, WIDTH=hidden, TOP_K=top_k, BLOCK=1024)
    return out
