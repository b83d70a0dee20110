"""Attention over paged KV by a work list: decode, verification and prefill chunks in one kernel, and the merge of splits.

One program takes one item of `work_list` for one KV head: up to BLOCK_M // GROUP queries of a row (all query heads that
share the KV head, flattened into the rows of the matrix products) over a range of key tiles. Scores live in base 2.
See FlashAttention-2 (arXiv 2307.08691) and FlashDecoding (pytorch.org/blog/flash-decoding).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.ops import backend
from common.ops.attention.configs import SHORT_QUERIES
from common.ops.attention.form import AttentionForm
from common.ops.attention.merge_triton import fold, merge_rows, merge_splits, sink_weight
from common.ops.attention.tiles_triton import attend_tiles, load_blocks, prefetch_tiles
from common.ops.attention.work import DevicePlan
from common.ops.attention.work_list import WorkList
from common.ops.attention.work_triton import first_key


@triton.jit
def _load_item(item):
    return (
        tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3),
        tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7),
    )  # fmt: skip


@triton.jit
def _first_blocks(block_ids, item, low, real, BLOCK_SHIFT: tl.constexpr, TILE: tl.constexpr, LIMITED: tl.constexpr):
    return load_blocks(block_ids + item[3], item[4], low, item[2] + item[1], real, BLOCK_SHIFT, TILE, LIMITED)


@triton.jit
def _attend_item(
    query,
    pool,
    output,
    partials,
    sums,
    arrivals,
    block_ids,
    kv_scale,
    sinks,
    layer,
    scale,
    soft_cap,
    window,
    chunk,
    query_stride,
    head,
    item,
    low,
    block,
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
    FUSED: tl.constexpr,
    LIMITED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    token, queries, start, blocks, first, tiles, first_slot, part = item
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
    lowest = first_key(position, window, chunk) if LIMITED else 0
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
    cap = soft_cap * 1.4426950408889634
    if CAPPED:
        factor *= 2 / soft_cap

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
            acc, acc_odd, top, total, block = attend_tiles(
                q, q_odd, acc, acc_odd, top, total, bases, ids, block, begin, tl.minimum(begin + SEGMENT, last),
                low, end, position, lowest, factor, cap, TOKEN_STRIDE, BLOCK_STRIDE, BLOCK_SHIFT, TILE, WIDTH, BLOCK_D, KV8,
                ASSEMBLY, False, LAZY, True, LIMITED, CAPPED,
            )  # fmt: skip
            total = tl.sum(total, 1) if LAZY else total
            divisor = tl.where(total == 0.0, 1.0, total)  # a query that sees nothing: top is -inf, and so is its sum
            part_sum = top + tl.log2(divisor)
            best, mass, kept, added = fold(best, mass, part_sum)
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
            acc, acc_odd, top, total, block = attend_tiles(
                q, q_odd, acc, acc_odd, top, total, bases, ids, block, first, open_end, low, end, position, lowest,
                factor, cap, TOKEN_STRIDE, BLOCK_STRIDE, BLOCK_SHIFT, TILE, WIDTH, BLOCK_D, KV8, ASSEMBLY, SWAP, LAZY, False,
                False, CAPPED,
            )  # fmt: skip
            first = open_end
        acc, acc_odd, top, total, block = attend_tiles(
            q, q_odd, acc, acc_odd, top, total, bases, ids, block, first, last, low, end, position, lowest, factor, cap,
            TOKEN_STRIDE, BLOCK_STRIDE, BLOCK_SHIFT, TILE, WIDTH, BLOCK_D, KV8, ASSEMBLY, SWAP, LAZY, True, LIMITED, CAPPED,
        )  # fmt: skip
        if LAZY:
            total = tl.sum(total, 0 if SWAP else 1)

    if SINKS and first_slot < 0:  # else the merge adds them
        total += sink_weight(sinks, head, m, top, GROUP)
    divisor = tl.where(total == 0.0, 1.0, total)
    if SWAP:
        acc = tl.trans(acc)
    if KV8:
        acc = tl.interleave(acc, acc_odd)
    acc = acc / divisor[:, None] if SEGMENT > 0 else acc * (value_scale / divisor)[:, None]
    if first_slot < 0:
        tl.store(output + (rows * (KV_HEADS * GROUP * HEAD_DIM) + columns)[:, None] + d[None, :], acc, mask=shown)
    else:
        places = ((first_slot + part % 65536).to(tl.int64) * KV_HEADS + head) * SLOT_ROWS + m
        tl.store(partials + (places * HEAD_DIM)[:, None] + d[None, :], acc, mask=shown)
        tl.store(sums + places, top + tl.log2(divisor), mask=mine)
        if FUSED:
            # whoever comes last merges: all parts are written, and the order of adding up is theirs, not that of coming
            tl.debug_barrier()
            counter = arrivals + first_slot * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == part // 65536 - 1:
                tl.store(counter, 0)
                ROWS: tl.constexpr = min(4, triton.next_power_of_2(SLOT_ROWS))
                for begin in range(0, queries * GROUP, ROWS):
                    merge_rows(
                        output, partials, sums, sinks, head, token, queries, first_slot, part // 65536, KV_HEADS, GROUP,
                        HEAD_DIM, SLOT_ROWS, ROWS, max(1, 4096 // (ROWS * FULL_D)), SINKS, begin,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "soft_cap", "window", "chunk", "num_rows", "end_token"])
def attention_kernel(
    query,  # [tokens, KV_HEADS * GROUP, HEAD_DIM], rows query_stride apart
    pool,  # see paged_kv; as int16 [..., HEAD_DIM // 2] if KV8
    output,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    partials,  # float32 [slots, KV_HEADS, SLOT_ROWS, HEAD_DIM]
    sums,  # float32 [slots, KV_HEADS, SLOT_ROWS], base 2
    arrivals,  # int32 [slots, KV_HEADS] if FUSED
    items,  # int32 [items, 8], see `work_list`
    counts,  # int32 [2]
    block_ids,
    query_starts,  # of the step: tokens past query_starts[num_rows] are padding
    kv_scale,  # float32 [layers, 2, KV_HEADS] if SCALED
    sinks,  # float32 [KV_HEADS * GROUP] if SINKS
    layer,
    scale,
    soft_cap,  # if CAPPED
    window,  # if LIMITED, as `chunk`: see `form.Reach`
    chunk,
    query_stride,
    num_rows,
    end_token,  # padding up to there gets zeros
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
    FUSED: tl.constexpr,
    PREFETCH: tl.constexpr,
    LOOP: tl.constexpr,
    LIMITED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    program, programs = tl.program_id(0), tl.num_programs(0)
    work = tl.load(counts) * KV_HEADS
    used = tl.load(query_starts + num_rows)
    if LOOP:
        if PDL:
            gdc_wait()
        for index in range(program, work, programs):
            item = _load_item(items + index // KV_HEADS * 8)
            low = first_key(item[2], window, chunk) if LIMITED else 0
            block = _first_blocks(block_ids, item, low, program < work, BLOCK_SHIFT, TILE, LIMITED)
            _attend_item(
                query, pool, output, partials, sums, arrivals, block_ids, kv_scale, sinks, layer, scale, soft_cap, window,
                chunk, query_stride, index % KV_HEADS, item, low, block, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SHIFT,
                BLOCK_STRIDE, BLOCK_M, TILE, SLOT_ROWS, SEGMENT, KV8, ASSEMBLY, SCALED, SWAP, OPEN_LOOP, FUSED, LIMITED, CAPPED,
                SINKS,
            )  # fmt: skip
    else:
        # work list and block ids are older than the kernel before this one: read them while that one still runs
        item = _load_item(items + program // KV_HEADS * 8)
        low = first_key(item[2], window, chunk) if LIMITED else 0
        block = _first_blocks(block_ids, item, low, program < work, BLOCK_SHIFT, TILE, LIMITED)
        if PREFETCH > 0 and program < work:
            prefetch_tiles(
                pool, block_ids, item, program % KV_HEADS, layer, KV_HEADS, HEAD_DIM // 2 if KV8 else HEAD_DIM, BLOCK_SHIFT,
                BLOCK_STRIDE, TILE, PREFETCH, low, LIMITED,
            )  # fmt: skip
        if PDL:
            gdc_wait()
        if program < work and item[5] > 0:
            _attend_item(
                query, pool, output, partials, sums, arrivals, block_ids, kv_scale, sinks, layer, scale, soft_cap, window,
                chunk, query_stride, program % KV_HEADS, item, low, block, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SHIFT,
                BLOCK_STRIDE, BLOCK_M, TILE, SLOT_ROWS, SEGMENT, KV8, ASSEMBLY, SCALED, SWAP, OPEN_LOOP, FUSED, LIMITED, CAPPED,
                SINKS,
            )  # fmt: skip
    d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    for index in range(used * KV_HEADS * GROUP + program, end_token * KV_HEADS * GROUP, programs):
        place = output + tl.cast(index, tl.int64) * HEAD_DIM + d
        tl.store(place, tl.zeros((d.shape[0],), tl.float32), mask=d < HEAD_DIM)


def attend_paged(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: DevicePlan,
    form: AttentionForm,
    kv_scale: torch.Tensor | None,
    output: torch.Tensor,
    *,
    lists: Sequence[WorkList] | None = None,
) -> None:
    """The rows in the plan's lists, and zeros for padding. Two launches a list, or one where nothing can be split.

    lists: of the plan's, all by default.
    """
    _, layers, _, block_tokens, kv_heads, head_dim = pool.shape
    group = plan.num_heads // kv_heads
    kv8 = pool.dtype == torch.float8_e4m3fn
    words = pool.view(torch.int16) if kv8 else pool
    width = words.shape[5]
    sms, pdl = backend.num_sms(query.get_device()), backend.pdl(query)
    is_limited = any(form.reach)
    for work in plan.lists if lists is None else lists:
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
            arrivals=work.arrivals if config.fused else None,
            items=work.items,
            counts=work.counts,
            block_ids=plan.batch.block_ids,
            query_starts=plan.batch.query_starts,
            kv_scale=kv_scale,
            sinks=form.sinks,
            layer=layer,
            scale=form.scale,
            soft_cap=form.soft_cap,
            window=form.window,
            chunk=form.chunk,
            query_stride=query.stride(0),
            num_rows=plan.batch.num_rows,
            end_token=plan.batch.num_tokens if work is plan.lists[-1] else 0,  # no constant: a kernel more to compile
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
            OPEN_LOOP=work.max_queries > SHORT_QUERIES and not segment and not is_limited,
            FUSED=config.fused,
            PREFETCH=config.prefetch if query.is_cuda and not loop else 0,
            LOOP=loop,
            LIMITED=is_limited,
            CAPPED=form.soft_cap > 0,
            SINKS=form.sinks is not None,
            PDL=pdl,
            num_warps=config.warps,
            num_stages=config.stages,
            launch_pdl=pdl,
            enable_fp_fusion=not segment,  # fused or not, by what a compiler likes, is not invariant
        )
        if not config.fused:
            merge_splits(work, plan, form.sinks, output, sms, pdl=pdl, in_order=segment > 0)
