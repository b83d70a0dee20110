"""The product of experts' weights with the activations of the pairs that were routed to them.

Tiles of the weight are the tall side of `tl.dot`, pairs its narrow one, as in `linear/grouped_triton.py`: weights that are
unpacked or widened in registers are an operand there and never go back to shared memory. A program has one tile of weight rows
of one expert and one tile of that expert's pairs. The first linear (GATED) reads a token's row, and its epilogue applies the
activation; the second reads a pair's row and writes what is to be added up, each in its own place.

With programmatic dependent launch: the first linear lets the second one start only after its own wait, so the routing is
complete when the second starts, and may be read, and weights asked for, before it waits.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl

from common.ops.linear.grouped_triton import sum_weights
from common.ops.linear.parts_triton import ask_ahead, ask_l2, weight_rows
from common.ops.moe.candidates import LANES
from common.ops.moe.sort_triton import TILE_FIELDS
from common.ops.moe.sums_triton import sum_codes, sum_numbers, sum_words

MAX_LANES = tl.constexpr(LANES)


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
    ask_l2(start, size)


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


@triton.jit
def _tile(
    operands,  # see `experts_kernel`; weights of the expert
    pair,  # int32 [BLOCK_M]
    present,  # [BLOCK_M]
    place,  # the expert, the tile and the split, and the split's first step and the one after its last
    sizes,  # as those of `experts_kernel`
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    WEIGH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    RUN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Compute one tile of weight rows for up to BLOCK_M pairs, and store what comes out."""
    x, x_scale, values, scale, offset, channel, bias, factors, out = operands
    wide, tile, split, first, last = place
    rows, N, K, steps, alpha, limit = sizes
    n = weight_rows(tile, N, BLOCK_N, GATED)
    row = (pair // TOP_K if GATED else pair).to(tl.int64)
    x_rows = x + row[:, None] * K
    shown = present[:, None]
    if SCALED and FORMAT == "mxfp4":
        total = sum_words(
            x_rows, shown, values, scale, n, first, last, N, K, steps, BLOCK_N, BLOCK_M, RUN, EVEN_K, STAGES, FAST
        )
    elif SCALED and RUN > 0:
        LANES: tl.constexpr = RUN if RUN < MAX_LANES else MAX_LANES
        total = sum_weights(
            x_rows, shown, values, scale, offset, None, n, first, last, N, K,
            BLOCK_N, BLOCK_M, RUN, RUN, LANES, 0, EVEN_K, STAGES, FAST,
        )  # fmt: skip
    elif RUN > 0:
        total = sum_codes(
            x_rows, shown, values, scale, offset, n, first, last, N, K, steps,
            BLOCK_N, BLOCK_M, RUN, AT_ONCE, FORMAT == "mxfp4", EVEN_K, STAGES, FAST,
        )  # fmt: skip
    else:
        x_scales = None if x_scale is None else x_scale + row * tl.cdiv(K, 128)
        total = sum_numbers(
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
    HALVINGS: tl.constexpr,  # not DIRECT: how often a tile of few pairs may be halved, at most 2
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # ask L2 for weights before waiting
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    AT_ONCE: tl.constexpr = 128 // (2 * RUN) if FORMAT == "mxfp4" else 1
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
            _ask_for_codes(values, tile, first * AT_ONCE, tl.minimum(asked * AT_ONCE, steps), N, BLOCK_N, RUN)
        elif AHEAD:
            ask_ahead(values, tile, first, asked, N, K, BLOCK_N, BLOCK_K, False, 8, False)
        tl.extra.cuda.gdc_wait()
    if count <= 0:
        return
    operands = (x, x_scale, values, scale, offset, channel, bias, factors, out)
    place = (wide, tile, split, first, last)
    sizes = (rows, N, K, steps, alpha, limit)
    if HALVINGS == 0 or count > BLOCK_M // 2:
        _tile(
            operands, pair, present, place, sizes, TOP_K, GATED, WEIGH, ACTIVATION, FORMAT, RUN, AT_ONCE,
            BLOCK_N, BLOCK_M, BLOCK_K, SCALED, EVEN_K, STAGES, FAST,
        )  # fmt: skip
    elif HALVINGS == 1 or count > BLOCK_M // 4:
        _, half_pair, half_present, _ = pairs_sorted(tiles, order, slot, BLOCK_M // 2)
        _tile(
            operands, half_pair, half_present, place, sizes, TOP_K, GATED, WEIGH, ACTIVATION, FORMAT, RUN, AT_ONCE,
            BLOCK_N, BLOCK_M // 2, BLOCK_K, SCALED, EVEN_K, STAGES, FAST,
        )  # fmt: skip
    else:
        _, quarter_pair, quarter_present, _ = pairs_sorted(tiles, order, slot, BLOCK_M // 4)
        _tile(
            operands, quarter_pair, quarter_present, place, sizes, TOP_K, GATED, WEIGH, ACTIVATION, FORMAT, RUN, AT_ONCE,
            BLOCK_N, BLOCK_M // 4, BLOCK_K, SCALED, EVEN_K, STAGES, FAST,
        )  # fmt: skip
