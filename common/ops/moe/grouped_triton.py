"""The product of experts' weights with the activations of the pairs that were routed to them.

Tiles of the weight are the tall side of `tl.dot`, pairs its narrow one, as in `linear/grouped_triton.py`: weights that are
unpacked or widened in registers are an operand there and never go back to shared memory. A program has one tile of weight rows
of one expert and one tile of that expert's pairs. The first linear (GATED) reads a token's row, and its epilogue applies the
activation; the second reads a pair's row and writes what is to be added up, each in its own place.

With programmatic dependent launch: the first linear lets the second one start only after its own wait, so the routing is
complete when the second starts, and may be read, and weights asked for, before it waits.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from common.ops.linear.dot_triton import widened
from common.ops.linear.grouped_triton import halves_of
from common.ops.linear.parts_triton import ask_ahead, weight_rows
from common.ops.linear.unpack_triton import times, unpacked
from common.ops.moe.sort_triton import TILE_FIELDS
from common.ops.moe.unpack_triton import scaled_floats


@triton.jit
def _pairs_found(ids, slot, pairs, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr):
    """Find the pairs of a program by looking through the routing: those of pair `slot`'s expert, in tiles of BLOCK_M, each for
    the program of its first pair. Returns the expert, the pairs, which of them are there, and how many."""
    every = tl.arange(0, PAIRS)
    found = tl.load(ids + every, mask=every < pairs, other=-1)
    expert = tl.load(ids + slot)
    mine = (found == expert).to(tl.int32)
    mine_before = tl.sum(tl.where(every < slot, mine, 0), 0)
    rank = tl.where(mine != 0, tl.cumsum(mine, 0) - 1, -1)
    wanted = mine_before + tl.arange(0, BLOCK_M)
    pair = tl.sum(tl.where(rank[None, :] == wanted[:, None], every[None, :], 0), 1)
    total = tl.sum(mine, 0)
    count = tl.where(mine_before % BLOCK_M == 0, total - mine_before, 0)
    return expert, pair, wanted < total, count


@triton.jit
def pairs_sorted(tiles, order, slot, BLOCK_M: tl.constexpr):
    """As `_pairs_found`, from what the sort left."""
    entry = tiles + slot * TILE_FIELDS
    expert = tl.load(entry)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    lane = tl.arange(0, BLOCK_M)
    present = lane < count
    pair = tl.load(order + first + lane, mask=present, other=0)
    return expert, pair, present, count


@triton.jit
def _ask_for_codes(values, tile, first, last, N, BLOCK_N: tl.constexpr, RUN: tl.constexpr):
    """Ask L2 for a tile of each step first … last - 1, one thread a step."""
    step = first + tl.arange(0, tl.extra.cuda.num_threads())
    start = (values + (step.to(tl.int64) * N + tile * BLOCK_N) * RUN).to(tl.int64)
    size = tl.where(step < last, tl.minimum(BLOCK_N, N - tile * BLOCK_N) * RUN, 0)
    tl.inline_asm_elementwise(
        """{
        .reg .pred asks;
        setp.gt.s32 asks, $2, 0;
        @asks cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [start, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_codes(
    x_rows,  # [BLOCK_M, 1] pointers
    shown,  # [BLOCK_M, 1]
    values,  # of the expert
    scale,
    offset,
    n,  # [BLOCK_N]
    first,
    last,
    N,
    K,
    steps,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RUN: tl.constexpr,
    STEPS_AT_ONCE: tl.constexpr,
    EXPONENTS: tl.constexpr,  # mxfp4, else int4
    SCALED: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sum 4-bit codes over words of scales first … last - 1, float32 [BLOCK_N, BLOCK_M]."""
    lane = tl.arange(0, RUN)
    w_rows = values + n[:, None] * RUN + lane[None, :]
    step_bytes = tl.cast(N, tl.int64) * RUN
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for word_at in tl.range(first, last, num_stages=STAGES):
        word = tl.load(scale + tl.cast(word_at, tl.int64) * N + n)
        for part in tl.static_range(STEPS_AT_ONCE):
            step = word_at * STEPS_AT_ONCE + part
            depth = step * (2 * RUN) + lane
            if EVEN_K:
                if BLOCK_M <= 16:
                    a = tl.load(x_rows + depth[None, :], mask=shown, other=0.0)
                    b = tl.load(x_rows + (depth + RUN)[None, :], mask=shown, other=0.0)
                else:
                    a = tl.load(x_rows + depth[None, :])
                    b = tl.load(x_rows + (depth + RUN)[None, :])
            else:
                a = tl.load(x_rows + depth[None, :], mask=shown & (depth < K)[None, :], other=0.0)
                b = tl.load(x_rows + (depth + RUN)[None, :], mask=shown & (depth + RUN < K)[None, :], other=0.0)
            if STEPS_AT_ONCE > 1 and not EVEN_K:
                step = tl.minimum(step, steps - 1)  # past the end activations are zero
            packed = tl.load(w_rows + step * step_bytes)
            if EXPONENTS and SCALED:
                low_exponent = ((word >> (16 * part)) & 0xFF)[:, None]
                high_exponent = ((word >> (16 * part + 8)) & 0xFF)[:, None]
                low, high = scaled_floats(packed, low_exponent, high_exponent, a.dtype, BLOCK_N, RUN, FAST)
            else:
                low, high = unpacked(packed, None, a.dtype, 1 if EXPONENTS else 0, FAST)
            if EXPONENTS:
                low_scale = (((word >> (16 * part)) & 0xFF) << 23).to(tl.float32, bitcast=True)[:, None]
                high_scale = (((word >> (16 * part + 8)) & 0xFF) << 23).to(tl.float32, bitcast=True)[:, None]
            else:
                left, right = halves_of(word)
                low_scale, high_scale = left[:, None], right[:, None]
            if SCALED and not EXPONENTS:
                low = times(low, tl.broadcast_to(low_scale.to(a.dtype), [BLOCK_N, RUN]), a.dtype, FAST)
                high = times(high, tl.broadcast_to(high_scale.to(a.dtype), [BLOCK_N, RUN]), a.dtype, FAST)
            if SCALED:
                total = tl.dot(low, a.T, total, input_precision="ieee")
                total = tl.dot(high, b.T, total, input_precision="ieee")
            else:
                total += tl.dot(low, a.T, input_precision="ieee") * low_scale
                total += tl.dot(high, b.T, input_precision="ieee") * high_scale
            if offset is not None:
                left, right = halves_of(tl.load(offset + tl.cast(word_at, tl.int64) * N + n))
                total += left[:, None] * tl.sum(a.to(tl.float32), axis=1)[None, :]
                total += right[:, None] * tl.sum(b.to(tl.float32), axis=1)[None, :]
    return total


@triton.jit
def _sum_numbers(
    x_rows,  # [BLOCK_M, 1] pointers
    x_scales,  # [BLOCK_M] pointers to the first 128 columns' scale, or None
    shown,  # [BLOCK_M, 1]
    values,  # of the expert
    scale,  # of the expert's blocks, or None
    n,  # [BLOCK_N]
    first,
    last,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sum columns of steps first … last - 1, float32 [BLOCK_N, BLOCK_M]."""
    k = tl.arange(0, BLOCK_K)
    w_rows = values + n.to(tl.int64)[:, None] * K
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if scale is not None:
        scale += n // 128 * tl.cdiv(K, 128)
    for step in tl.range(first, last, num_stages=STAGES):
        depth = step * BLOCK_K + k
        if EVEN_K:
            w = tl.load(w_rows + depth[None, :])
            if BLOCK_M <= 16:
                a = tl.load(x_rows + depth[None, :], mask=shown, other=0.0)
            else:
                a = tl.load(x_rows + depth[None, :])
        else:
            w = tl.load(w_rows + depth[None, :], mask=(depth < K)[None, :], other=0.0)
            a = tl.load(x_rows + depth[None, :], mask=shown & (depth < K)[None, :], other=0.0)
        if w.dtype != a.dtype:
            w = widened(w, a.dtype, FAST)
        if scale is not None or x_scales is not None:
            product = tl.dot(w, a.T, input_precision="ieee")
            if scale is not None:
                product *= tl.load(scale + step * BLOCK_K // 128)[:, None]
            if x_scales is not None:
                product *= tl.load(x_scales + step * BLOCK_K // 128)[None, :]
            total += product
        else:
            total = tl.dot(w, a.T, total, input_precision="ieee")
    return total


@triton.jit
def activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        answer = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    elif ACTIVATION == "silu":
        answer = gate * tl.sigmoid(gate) * up
    else:
        # gelu's 0.5 * (1 + tanh(z)) is sigmoid(2 * z)
        answer = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    return answer


@triton.jit(do_not_specialize=["rows", "pairs", "slots", "words_per_split"])
def experts_kernel(
    x,  # GATED: [rows, K], else [pairs, K]; the model's dtype or float8_e4m3fn
    x_scale,  # float32 [rows or pairs, ⌈K / 128⌉] of float8_e4m3fn, else None
    values,  # this and the next four: see `PackedWeight`; N rows an expert, of GATED gate rows, then up rows
    scale,
    offset,
    channel,
    bias,
    ids,  # int32 [pairs], read if DIRECT
    tiles,  # see `SortedPairs`, read if not DIRECT
    order,
    factors,  # float32 [pairs]
    out,  # GATED: [pairs, N / 2], else [TOP_K * splits, rows, N]
    rows,
    pairs,
    slots,
    N,
    K,
    steps,  # of 4-bit codes
    words,  # steps of the loop
    words_per_split,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,  # DIRECT: at least `pairs`
    DIRECT: tl.constexpr,
    GATED: tl.constexpr,
    WEIGH: tl.constexpr,  # GATED: the inputs, else the answers
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN_K: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # ask L2 for weights before waiting
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    n_tiles = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    group = program // (NEIGHBOURS * n_tiles)
    within = program % (NEIGHBOURS * n_tiles)
    beside = tl.minimum(NEIGHBOURS, slots - group * NEIGHBOURS)
    slot = group * NEIGHBOURS + within % beside
    tile = within // beside
    split = tl.program_id(1)
    first = split * words_per_split
    last = tl.minimum(first + words_per_split, words)
    if PDL and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if DIRECT:
        expert, pair, present, count = _pairs_found(ids, slot, pairs, BLOCK_M, PAIRS)
    else:
        expert, pair, present, count = pairs_sorted(tiles, order, slot, BLOCK_M)
    wide = expert.to(tl.int64)
    if RUN > 0:
        at_once: tl.constexpr = 128 // (2 * RUN) if FORMAT == "mxfp4" else 1
        values += wide * steps * N * RUN
        scale += wide * words * N
        if offset is not None:
            offset += wide * words * N
    else:
        values += wide * N * K
        if scale is not None:
            scale += wide * tl.cdiv(N, 128) * tl.cdiv(K, 128)
    if PDL and not GATED:
        tl.extra.cuda.gdc_launch_dependents()
        asked = tl.where(count > 0, last, first)
        if AHEAD and RUN > 0:
            _ask_for_codes(values, tile, first * at_once, tl.minimum(asked * at_once, steps), N, BLOCK_N, RUN)
        elif AHEAD:
            ask_ahead(values, tile, first, asked, N, K, BLOCK_N, BLOCK_K, False, 8, False)
        tl.extra.cuda.gdc_wait()
    if count <= 0:
        return
    n = weight_rows(tile, N, BLOCK_N, GATED)
    row = (pair // TOP_K if GATED else pair).to(tl.int64)
    x_rows = x + row[:, None] * K
    shown = present[:, None]
    if RUN > 0:
        total = _sum_codes(
            x_rows,
            shown,
            values,
            scale,
            offset,
            n,
            first,
            last,
            N,
            K,
            steps,
            BLOCK_N,
            BLOCK_M,
            RUN,
            at_once,
            FORMAT == "mxfp4",
            SCALED,
            EVEN_K,
            STAGES,
            FAST,
        )
    else:
        x_scales = None if x_scale is None else x_scale + row * tl.cdiv(K, 128)
        total = _sum_numbers(
            x_rows,
            x_scales,
            shown,
            values,
            scale,
            n,
            first,
            last,
            K,
            BLOCK_N,
            BLOCK_M,
            BLOCK_K,
            EVEN_K,
            STAGES,
            FAST,
        )
    if channel is not None:
        total *= tl.load(channel + wide * N + n)[:, None]
    if GATED and WEIGH:  # a product with scaled inputs is the scaled product
        total *= tl.load(factors + pair)[None, :]
    if bias is not None:
        total += tl.where(split == 0, tl.load(bias + wide * N + n).to(tl.float32), 0.0)[:, None]
    if GATED:
        halves = total.reshape(2, BLOCK_N // 2, BLOCK_M).permute(1, 2, 0)
        gate, up = tl.split(halves)
        total = activated(gate, up, alpha, limit, ACTIVATION)
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        width = N // 2
        place = pair.to(tl.int64)
    else:
        if WEIGH:
            total *= tl.load(factors + pair)[None, :]
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        width = N
        part = pair % TOP_K * tl.num_programs(1) + split
        place = part.to(tl.int64) * rows + pair // TOP_K
    inside = (column < width)[:, None] & present[None, :]
    tl.store(out + place[None, :] * width + column[:, None], total.to(out.dtype.element_ty), mask=inside)
