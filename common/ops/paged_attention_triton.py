"""Attention over paged KV by a work list: decode, verification and prefill chunks in one kernel, and the merge of splits.

One program takes one item of `attention_work` for one KV head: up to BLOCK_M // GROUP queries of a row (all query heads that
share the KV head, flattened into the rows of the matrix products) over a range of key tiles. Scores live in base 2. KV of
8 bits is read as pairs of numbers in 16-bit words, which keeps transposed loads of V possible; the halves become two dots of
half the width. See FlashAttention-2 (arXiv 2307.08691) and FlashDecoding (pytorch.org/blog/flash-decoding).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.ops import backend
from common.ops.attention_work import DevicePlan, WorkList

_UNPACK = tl.constexpr(
    """{
    .reg .b32 apart;
    .reg .b16 even, odd;
    prmt.b32 apart, $2, 0, 0x3120;
    mov.b32 {even, odd}, apart;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }"""
)


@triton.jit
def _unpack(pairs, ASSEMBLY: tl.constexpr):
    """int16 of two float8_e4m3fn each → the lower and the upper ones as float16."""
    if ASSEMBLY:
        even, odd = tl.inline_asm_elementwise(_UNPACK, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def _attend(
    q,
    q_odd,
    acc,
    acc_odd,
    top,
    total,
    bases,
    ids,
    first,
    last,
    end,
    position,
    factor,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV8: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    SWAP: tl.constexpr,
    LAZY: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Key tiles [first, last). q: [BLOCK_M, BLOCK_D]; acc alike, float32; top: [BLOCK_M]; total alike, or with LAZY one for
    each key of a tile, to be added up once at the end. SWAP: acc and a lazy total are transposed."""
    tokens = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    # keys past the end are read as the last key, finite, and hidden by the scores: no load needs a mask
    keys = tl.minimum(first * TILE + tokens, end - 1)
    block = tl.load(ids + (keys >> BLOCK_SHIFT))
    for tile in range(first, last):
        places = bases + (block.to(tl.int64) * BLOCK_STRIDE + (keys & ((1 << BLOCK_SHIFT) - 1)) * TOKEN_STRIDE)[:, None]
        places += d[None, :]
        # the blocks of the next tile: K and V are then one load deep, which the pipeliner needs to fetch them stages ahead
        keys = tl.minimum(tile * TILE + TILE + tokens, end - 1)
        block = tl.load(ids + (keys >> BLOCK_SHIFT))
        if WIDTH < BLOCK_D:
            shown = tl.broadcast_to((d < WIDTH)[None, :], TILE, BLOCK_D)
            k = tl.load(places, mask=shown, other=0)
            v = tl.load(places + (TOKEN_STRIDE << BLOCK_SHIFT), mask=shown, other=0)
        else:
            k = tl.load(places)
            v = tl.load(places + (TOKEN_STRIDE << BLOCK_SHIFT))
        key = tile * TILE + tokens
        if SWAP:
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            if MASKED:
                scores = tl.where(key[:, None] <= position[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0) * factor)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores * factor - safe[None, :])
            fade = tl.exp2(top - safe)
            total = total * fade[None, :] + weights if LAZY else total * fade + tl.sum(weights, 0)
            acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * fade[None, :], input_precision="ieee")
        else:
            if KV8:
                k_even, k_odd = _unpack(tl.trans(k), ASSEMBLY)
                scores = tl.dot(q, k_even)
                scores = tl.dot(q_odd, k_odd, scores)
            else:
                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if MASKED:
                scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1) * factor)
            safe = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
            weights = tl.exp2(scores * factor - safe[:, None])
            fade = tl.exp2(top - safe)
            total = total * fade[:, None] + weights if LAZY else total * fade + tl.sum(weights, 1)
            if KV8:
                v_even, v_odd = _unpack(v, ASSEMBLY)
                weights = weights.to(tl.float16)
                acc = tl.dot(weights, v_even, acc * fade[:, None])
                acc_odd = tl.dot(weights, v_odd, acc_odd * fade[:, None])
            else:
                acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, acc_odd, top, total


@triton.jit
def _fold(best, mass, part_sum):
    """One more split. Returns the new maximum and mass, and the factors of what is merged and of what is added.

    Explicit fma here and where it is used: the same bits in every kernel, whatever the compiler contracts.
    """
    higher = tl.maximum(best, part_sum)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(best - safe)
    added = tl.exp2(part_sum - safe)
    return higher, tl.fma(mass, kept, added), kept, added


@triton.jit
def _attend_item(
    query,
    pool,
    output,
    partials,
    sums,
    block_ids,
    kv_scale,
    layer,
    scale,
    query_stride,
    head,
    token,
    queries,
    start,
    blocks,
    first,
    tiles,
    slot,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    KV8: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    SCALED: tl.constexpr,
    SWAP: tl.constexpr,
    OPEN_LOOP: tl.constexpr,
):
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KV8 else HEAD_DIM
    BLOCK_D: tl.constexpr = triton.next_power_of_2(WIDTH)
    FULL_D: tl.constexpr = 2 * BLOCK_D if KV8 else BLOCK_D
    TOKEN_STRIDE: tl.constexpr = KV_HEADS * WIDTH
    LAZY: tl.constexpr = BLOCK_M <= 32  # few registers, and warps share the keys: adding up over them each time costs barriers

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, FULL_D)
    nth = m // GROUP
    mine = nth < queries
    position = start + nth
    rows = (token + nth).to(tl.int64)
    columns = (head * GROUP + m % GROUP) * HEAD_DIM
    shown = mine[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(query + rows[:, None] * query_stride + columns[:, None] + d[None, :], mask=shown, other=0.0)
    if KV8:
        q, q_odd = tl.split(q.to(tl.float16).reshape(BLOCK_M, BLOCK_D, 2))
    else:
        q_odd = 0
    factor = scale * 1.4426950408889634
    value_scale = 1.0
    if SCALED:
        factor *= tl.load(kv_scale + 2 * layer * KV_HEADS + head)
        value_scale = tl.load(kv_scale + (2 * layer + 1) * KV_HEADS + head)

    bases = pool + (layer.to(tl.int64) * (TOKEN_STRIDE << (BLOCK_SHIFT + 1)) + head * WIDTH)
    ids = block_ids + blocks
    end = start + queries
    last = first + tiles

    if SEGMENT > 0:
        best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK_M,), tl.float32)
        merged = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        merged_odd = merged if KV8 else 0
        for begin in range(first, last, SEGMENT):
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M, TILE) if LAZY else (BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            acc_odd = acc if KV8 else 0
            acc, acc_odd, top, total = _attend(
                q, q_odd, acc, acc_odd, top, total, bases, ids, begin, tl.minimum(begin + SEGMENT, last),
                end, position, factor, TOKEN_STRIDE, BLOCK_STRIDE, BLOCK_SHIFT, TILE, WIDTH, BLOCK_D, KV8, ASSEMBLY,
                False, LAZY, True,
            )  # fmt: skip
            total = tl.sum(total, 1) if LAZY else total
            divisor = tl.where(total == 0.0, 1.0, total)  # a query that sees nothing: top is -inf, and so is its sum
            part_sum = top + tl.log2(divisor)
            best, mass, kept, added = _fold(best, mass, part_sum)
            added = tl.broadcast_to(added[:, None], BLOCK_M, BLOCK_D)
            merged = tl.fma(acc / divisor[:, None] * value_scale, added, merged * kept[:, None])
            if KV8:
                merged_odd = tl.fma(acc_odd / divisor[:, None] * value_scale, added, merged_odd * kept[:, None])
        acc, acc_odd, top, total = merged, merged_odd, best, mass
    else:
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros(((TILE, BLOCK_M) if SWAP else (BLOCK_M, TILE)) if LAZY else (BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_D, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_D), tl.float32)
        acc_odd = acc if KV8 else 0
        if OPEN_LOOP:
            open_end = tl.maximum(tl.minimum((start + 1) // TILE, last), first)  # every query sees the tiles before it whole
            acc, acc_odd, top, total = _attend(
                q, q_odd, acc, acc_odd, top, total, bases, ids, first, open_end, end, position, factor,
                TOKEN_STRIDE, BLOCK_STRIDE, BLOCK_SHIFT, TILE, WIDTH, BLOCK_D, KV8, ASSEMBLY, SWAP, LAZY, False,
            )  # fmt: skip
            first = open_end
        acc, acc_odd, top, total = _attend(
            q, q_odd, acc, acc_odd, top, total, bases, ids, first, last, end, position, factor,
            TOKEN_STRIDE, BLOCK_STRIDE, BLOCK_SHIFT, TILE, WIDTH, BLOCK_D, KV8, ASSEMBLY, SWAP, LAZY, True,
        )  # fmt: skip
        if LAZY:
            total = tl.sum(total, 0 if SWAP else 1)

    divisor = tl.where(total == 0.0, 1.0, total)
    if SWAP:
        acc = tl.trans(acc)
    if KV8:
        acc = tl.interleave(acc, acc_odd)
    acc = acc / divisor[:, None] if SEGMENT > 0 else acc * (value_scale / divisor)[:, None]
    if slot < 0:
        tl.store(output + (rows * (KV_HEADS * GROUP * HEAD_DIM) + columns)[:, None] + d[None, :], acc, mask=shown)
    else:
        places = (slot.to(tl.int64) * KV_HEADS + head) * SLOT_ROWS + m
        tl.store(partials + (places * HEAD_DIM)[:, None] + d[None, :], acc, mask=shown)
        tl.store(sums + places, top + tl.log2(divisor), mask=mine)


@triton.jit(do_not_specialize=["layer"])
def attention_kernel(
    query,  # [tokens, KV_HEADS * GROUP, HEAD_DIM], rows query_stride apart
    pool,  # see paged_kv; as int16 [..., HEAD_DIM // 2] if KV8
    output,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    partials,  # float32 [slots, KV_HEADS, SLOT_ROWS, HEAD_DIM]
    sums,  # float32 [slots, KV_HEADS, SLOT_ROWS], base 2
    items,  # int32 [items, 8], see attention_work
    counts,  # int32 [2]
    block_ids,
    kv_scale,  # float32 [layers, 2, KV_HEADS] if SCALED
    layer,
    scale,
    query_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    KV8: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    SCALED: tl.constexpr,
    SWAP: tl.constexpr,
    OPEN_LOOP: tl.constexpr,
    LOOP: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    work = tl.load(counts) * KV_HEADS
    if LOOP:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        for index in range(program, work, tl.num_programs(0)):
            item = items + index // KV_HEADS * 8
            _attend_item(
                query, pool, output, partials, sums, block_ids, kv_scale, layer, scale, query_stride, index % KV_HEADS,
                tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5),
                tl.load(item + 6), KV_HEADS, GROUP, HEAD_DIM, BLOCK_SHIFT, BLOCK_STRIDE, BLOCK_M, TILE, SLOT_ROWS, SEGMENT,
                KV8, ASSEMBLY, SCALED, SWAP, OPEN_LOOP,
            )  # fmt: skip
    else:
        # the work list is older than the kernel before this one: read it while that one still runs
        item = items + program // KV_HEADS * 8
        token, queries, start, blocks = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        first, tiles, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        if program < work:
            _attend_item(
                query, pool, output, partials, sums, block_ids, kv_scale, layer, scale, query_stride, program % KV_HEADS,
                token, queries, start, blocks, first, tiles, slot, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SHIFT, BLOCK_STRIDE,
                BLOCK_M, TILE, SLOT_ROWS, SEGMENT, KV8, ASSEMBLY, SCALED, SWAP, OPEN_LOOP,
            )  # fmt: skip


@triton.jit
def merge_kernel(
    output,
    partials,
    sums,
    merges,  # int32 [merges, 4], see attention_work
    counts,
    query_starts,  # of the step: tokens past query_starts[num_rows] are padding
    num_rows,
    num_tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    CLEAR: tl.constexpr,
    PDL: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    work = tl.load(counts + 1) * (KV_HEADS * SLOT_ROWS)
    end = tl.load(query_starts + num_rows)
    d = tl.arange(0, BLOCK_D)
    shown = d < HEAD_DIM
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for index in range(program, work, programs):
        merge = merges + index // (KV_HEADS * SLOT_ROWS) * 4
        m, head = index % SLOT_ROWS, index // SLOT_ROWS % KV_HEADS
        token, queries, slot, splits = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
        if m // GROUP < queries:
            origin = (slot.to(tl.int64) * KV_HEADS + head) * SLOT_ROWS + m
            STEP: tl.constexpr = KV_HEADS * SLOT_ROWS
            best = float("-inf")
            mass = 0.0
            merged = tl.zeros((BLOCK_D,), tl.float32)
            if IN_ORDER:
                for split in range(splits):
                    places = origin + split * STEP
                    part = tl.load(partials + places * HEAD_DIM + d, mask=shown, other=0.0)
                    best, mass, kept, added = _fold(best, mass, tl.load(sums + places))
                    merged = tl.fma(part, tl.full((BLOCK_D,), 0.0, tl.float32) + added, merged * kept)
            else:
                for begin in range(0, splits, SPLITS):
                    split = begin + tl.arange(0, SPLITS)
                    places = origin + split * STEP
                    there = split < splits
                    part_sums = tl.load(sums + places, mask=there, other=float("-inf"))
                    parts = tl.load(
                        partials + (places * HEAD_DIM)[:, None] + d[None, :], mask=there[:, None] & shown[None, :], other=0.0
                    )
                    higher = tl.maximum(best, tl.max(part_sums, 0))
                    safe = tl.where(higher == float("-inf"), 0.0, higher)
                    weights = tl.exp2(part_sums - safe)
                    kept = tl.exp2(best - safe)
                    mass = mass * kept + tl.sum(weights, 0)
                    merged = merged * kept + tl.sum(parts * weights[:, None], 0)
                    best = higher
            place = (token + m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + m % GROUP
            tl.store(output + place * HEAD_DIM + d, merged / mass, mask=shown)
    if CLEAR:
        for index in range(end * KV_HEADS * GROUP + program, num_tokens * KV_HEADS * GROUP, programs):
            tl.store(output + tl.cast(index, tl.int64) * HEAD_DIM + d, tl.zeros((BLOCK_D,), tl.float32), mask=shown)


def attend_paged(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: DevicePlan,
    scale: float,
    kv_scale: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """The rows in the plan's lists, and zeros for padding. Two launches a list, or one where nothing can be split."""
    _, layers, _, block_tokens, kv_heads, head_dim = pool.shape
    group = plan.num_heads // kv_heads
    kv8 = pool.dtype == torch.float8_e4m3fn
    words = pool.view(torch.int16) if kv8 else pool
    width = words.shape[5]
    sms, pdl = backend.num_sms(query.get_device()), backend.pdl(query)
    for work in plan.lists:
        config = work.config
        segment = config.segment_keys // config.tile
        programs = len(work.items) * kv_heads
        loop = segment > 0
        attention_kernel[(min(programs, 8 * sms) if loop else programs,)](
            query=query,
            pool=words,
            output=output,
            partials=work.partials,
            sums=work.sums,
            items=work.items,
            counts=work.counts,
            block_ids=plan.batch.block_ids,
            kv_scale=kv_scale,
            layer=layer,
            scale=scale,
            query_stride=query.stride(0),
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SHIFT=block_tokens.bit_length() - 1,
            BLOCK_STRIDE=layers * 2 * block_tokens * kv_heads * width,
            BLOCK_M=config.block_m,
            TILE=config.tile,
            SLOT_ROWS=work.partials.shape[2],
            SEGMENT=segment,
            KV8=kv8,
            ASSEMBLY=query.is_cuda,
            SCALED=kv_scale is not None,
            SWAP=config.swap,
            OPEN_LOOP=config.block_m >= 64 and not segment,
            LOOP=loop,
            PDL=pdl,
            num_warps=config.warps,
            num_stages=config.stages,
            launch_pdl=pdl,
        )
        _merge(work, plan, output, sms, pdl, in_order=segment > 0, clear=work is plan.lists[-1])


def _merge(work: WorkList, plan: DevicePlan, output: torch.Tensor, sms: int, pdl: bool, *, in_order: bool, clear: bool) -> None:
    slot_rows = work.partials.shape[2]
    merge_kernel[(min(len(work.merges) * plan.kv_heads * slot_rows, 8 * sms),)](
        output=output,
        partials=work.partials,
        sums=work.sums,
        merges=work.merges,
        counts=work.counts,
        query_starts=plan.batch.query_starts,
        num_rows=plan.batch.num_rows,
        num_tokens=plan.batch.num_tokens,
        KV_HEADS=plan.kv_heads,
        GROUP=plan.num_heads // plan.kv_heads,
        HEAD_DIM=plan.head_dim,
        BLOCK_D=triton.next_power_of_2(plan.head_dim),
        SLOT_ROWS=slot_rows,
        SPLITS=16,
        IN_ORDER=in_order,
        CLEAR=clear,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
