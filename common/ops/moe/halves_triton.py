"""Products for many pairs with float8 weights in blocks: two accumulators, each with one scale a step.

Tensor cores add up 128 columns; the sum is scaled then and added to the total, in registers, which takes about as long as the
tensor cores do. Where all rows of an accumulator share a scale, that is one multiplication with addition a sum, not two
operations and an addition. Gate and up have an accumulator each, or the two halves of a tile of the second linear.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.moe.candidates import SCALE_COLUMNS, ExpertCandidate
from common.ops.moe.form import ExpertActivation, Routing
from common.ops.moe.grouped_triton import activated, pairs_sorted
from common.ops.moe.packed_weight import PackedWeight
from common.ops.moe.quantise_triton import quantise_blocks
from common.ops.moe.sort_triton import SortedPairs
from common.ops.sizes import cdiv


@triton.jit
def _sum_halves(
    x_rows,  # [BLOCK_M, 1] pointers
    x_scales,  # [BLOCK_M] pointers to the first 128 columns' scale
    values,  # of the expert, [N, K]
    scale,  # of the expert, [⌈N / 128⌉, ⌈K / 128⌉]
    upper,  # [HALF] rows of one block
    lower,  # [HALF] rows of one block
    upper_block,
    lower_block,
    K,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return two sums over all columns, float32 [HALF, BLOCK_M] each."""
    k = tl.arange(0, 128)
    blocks = tl.cdiv(K, 128)
    upper_rows = values + upper.to(tl.int64)[:, None] * K
    lower_rows = values + lower.to(tl.int64)[:, None] * K
    total_upper = tl.zeros([HALF, BLOCK_M], tl.float32)
    total_lower = tl.zeros([HALF, BLOCK_M], tl.float32)
    factors = tl.load(x_scales)  # asked for a step ahead
    for step in tl.range(0, blocks, num_stages=STAGES):
        depth = (step * 128 + k)[None, :]
        if EVEN_K:
            a = tl.load(x_rows + depth)
            first = tl.load(upper_rows + depth)
            second = tl.load(lower_rows + depth)
        else:
            a = tl.load(x_rows + depth, mask=depth < K, other=0.0)
            first = tl.load(upper_rows + depth, mask=depth < K, other=0.0)
            second = tl.load(lower_rows + depth, mask=depth < K, other=0.0)
        product_upper = tl.dot(first, a.T)
        product_lower = tl.dot(second, a.T)
        following = tl.load(x_scales + tl.minimum(step + 1, blocks - 1))
        total_upper += product_upper * (factors * tl.load(scale + upper_block * blocks + step))[None, :]
        total_lower += product_lower * (factors * tl.load(scale + lower_block * blocks + step))[None, :]
        factors = following
    return total_upper, total_lower


@triton.jit
def _tile(
    operands,  # see `halves_kernel`
    pair,  # int32 [BLOCK_M]
    present,  # [BLOCK_M]
    place,  # the expert and the tile of weight rows
    sizes,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    WEIGH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one tile of weight rows for up to BLOCK_M pairs, and store what comes out."""
    x, x_scale, values, scale, bias, factors, out = operands
    wide, tile = place
    rows, N, K, alpha, limit = sizes
    HALF: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, HALF)
    width = N // 2 if GATED else N
    upper_first = tile * HALF if GATED else tile * BLOCK_N
    upper = tl.minimum(upper_first + lane, width - 1)
    lower_first = width + upper_first if GATED else upper_first + HALF
    lower = tl.minimum(lower_first + lane, N - 1)
    row = (pair // TOP_K if GATED else pair).to(tl.int64)
    first, second = _sum_halves(
        x + row[:, None] * K,
        x_scale + row * tl.cdiv(K, 128),
        values + wide * N * K,
        scale + wide * tl.cdiv(N, 128) * tl.cdiv(K, 128),
        upper,
        lower,
        upper_first // 128,
        tl.minimum(lower_first, N - 1) // 128,
        K,
        HALF,
        BLOCK_M,
        EVEN_K,
        STAGES,
    )
    if GATED and WEIGH:  # a product with scaled inputs is the scaled product
        factor = tl.load(factors + pair)[None, :]
        first *= factor
        second *= factor
    if bias is not None:
        first += tl.load(bias + wide * N + upper).to(tl.float32)[:, None]
        second += tl.load(bias + wide * N + lower).to(tl.float32)[:, None]
    inside = present[None, :]
    if GATED:
        first = activated(first, second, alpha, limit, ACTIVATION)
        place = pair.to(tl.int64)[None, :]
    else:
        if WEIGH:
            factor = tl.load(factors + pair)[None, :]
            first *= factor
            second *= factor
        place = ((pair % TOP_K).to(tl.int64) * rows + pair // TOP_K)[None, :]
        column = (lower_first + lane)[:, None]
        tl.store(out + place * width + column, second.to(out.dtype.element_ty), mask=(column < width) & inside)
    column = (upper_first + lane)[:, None]
    tl.store(out + place * width + column, first.to(out.dtype.element_ty), mask=(column < width) & inside)


@triton.jit(do_not_specialize=["rows"])
def halves_kernel(
    x,  # float8_e4m3fn, GATED: [rows, K], else [pairs, K]
    x_scale,  # float32 [rows or pairs, ⌈K / 128⌉]
    values,  # float8_e4m3fn [experts, N, K]
    scale,  # float32 [experts, ⌈N / 128⌉, ⌈K / 128⌉]
    bias,  # [experts, N] or None
    tiles,  # see `SortedPairs`
    order,
    factors,  # float32 [pairs]
    out,  # GATED: [pairs, N / 2], else [TOP_K, rows, N]
    rows,
    N,
    K,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    WEIGH: tl.constexpr,  # GATED: the inputs, else the answers
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,  # at most 256
    BLOCK_M: tl.constexpr,
    HALVINGS: tl.constexpr,  # see `experts_kernel`
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    n_tiles = tl.cdiv(N, BLOCK_N)
    slot = tl.program_id(0) // n_tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, pair, present, count = pairs_sorted(tiles, order, slot, BLOCK_M)
    if count <= 0:
        return
    operands = (x, x_scale, values, scale, bias, factors, out)
    place = (expert.to(tl.int64), tl.program_id(0) % n_tiles)
    sizes = (rows, N, K, alpha, limit)
    if HALVINGS == 0 or count > BLOCK_M // 2:
        _tile(operands, pair, present, place, sizes, TOP_K, GATED, WEIGH, ACTIVATION, BLOCK_N, BLOCK_M, EVEN_K, STAGES)
    elif HALVINGS == 1 or count > BLOCK_M // 4:
        _, half_pair, half_present, _ = pairs_sorted(tiles, order, slot, BLOCK_M // 2)
        _tile(
            operands,
            half_pair,
            half_present,
            place,
            sizes,
            TOP_K,
            GATED,
            WEIGH,
            ACTIVATION,
            BLOCK_N,
            BLOCK_M // 2,
            EVEN_K,
            STAGES,
        )
    else:
        _, quarter_pair, quarter_present, _ = pairs_sorted(tiles, order, slot, BLOCK_M // 4)
        _tile(
            operands,
            quarter_pair,
            quarter_present,
            place,
            sizes,
            TOP_K,
            GATED,
            WEIGH,
            ACTIVATION,
            BLOCK_N,
            BLOCK_M // 4,
            EVEN_K,
            STAGES,
        )


def multiply_halves(
    x: torch.Tensor,
    weight: PackedWeight,
    routing: Routing,
    found: SortedPairs,
    activation: ExpertActivation,
    chosen: ExpertCandidate,
    out: torch.Tensor,
    *,
    weigh_inputs: bool,
) -> None:
    """One linear of all experts. x: [rows, k] of the first one, else [pairs, k]; out: [pairs, n / 2] of the first one, else
    [top_k, rows, n]. Half a tile is rows of one block: `chosen.block_n` / 2 divides 128 and the experts' width."""
    rows, top_k = routing.ids.shape
    gated, pdl = out.ndim == 2, backend.pdl(x)
    data, x_scale = quantise_blocks(x)
    halves_kernel[(cdiv(weight.n, chosen.block_n) * len(found.tiles),)](
        x=data,
        x_scale=x_scale,
        values=weight.values,
        scale=weight.scale,
        bias=weight.bias,
        tiles=found.tiles,
        order=found.order,
        factors=routing.weights,
        out=out,
        rows=rows,
        N=weight.n,
        K=weight.k,
        alpha=activation.alpha,
        limit=activation.limit,
        TOP_K=top_k,
        GATED=gated,
        WEIGH=weigh_inputs == gated,
        ACTIVATION=activation.kind,
        BLOCK_N=chosen.block_n,
        BLOCK_M=chosen.block_m,
        HALVINGS=chosen.halvings,
        EVEN_K=weight.k % SCALE_COLUMNS == 0,
        STAGES=chosen.stages,
        PDL=pdl,
        num_warps=chosen.warps,
        launch_pdl=pdl,
        enable_fp_fusion=not weight.batch_invariant,
    )
