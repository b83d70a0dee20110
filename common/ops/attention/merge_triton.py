"""What the splits of a row's keys gave becomes one result, first split first."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.ops.attention.work import DevicePlan
from common.ops.attention.work_list import WorkList


@triton.jit
def fold(best, mass, part_sum):
    """One more split. Returns the new maximum and mass, and the factors of what is merged and of what is added.

    Explicit fma here and where it is used: the same bits in every kernel, whatever the compiler contracts.
    """
    higher = tl.maximum(best, part_sum)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(best - safe)
    added = tl.exp2(part_sum - safe)
    return higher, tl.fma(mass, kept, added), kept, added


@triton.jit
def sink_weight(sinks, head, m, best, GROUP: tl.constexpr):
    """What sinks add to the mass of query rows m of a KV head, whose largest exponent of 2 is `best`."""
    sink = tl.load(sinks + head * GROUP + m % GROUP)
    return tl.exp2(tl.fma(sink, sink * 0.0 + 1.4426950408889634, -tl.where(best == float("-inf"), 0.0, best)))


@triton.jit
def merge_rows(
    output,
    partials,
    sums,
    sinks,
    head,
    token,
    queries,
    first_slot,
    parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    begin,
):
    """Result rows begin, …, begin + ROWS - 1 of a slot, PARTS parts at a time."""
    d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    m = begin + tl.arange(0, ROWS)
    mine = (m // GROUP < queries) & (m < SLOT_ROWS)
    origin = (first_slot.to(tl.int64) * KV_HEADS + head) * SLOT_ROWS + m
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    merged = tl.zeros((ROWS, d.shape[0]), tl.float32)
    for part in range(0, parts, PARTS):
        nth = part + tl.arange(0, PARTS)
        places = nth[:, None] * (KV_HEADS * SLOT_ROWS) + origin[None, :]
        there = (nth < parts)[:, None] & mine[None, :]
        part_sums = tl.load(sums + places, mask=there, other=float("-inf"), cache_modifier=".cg")
        shown = there[:, :, None] & (d < HEAD_DIM)[None, None, :]
        found = tl.load(
            partials + (places * HEAD_DIM)[:, :, None] + d[None, None, :], mask=shown, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(best, tl.max(part_sums, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(part_sums - safe[None, :])
        kept = tl.exp2(best - safe)
        mass = mass * kept + tl.sum(weights, 0)
        merged = merged * kept[:, None] + tl.sum(found * weights[:, :, None], 0)
        best = higher
    if SINKS:
        mass += sink_weight(sinks, head, m, best, GROUP)
    merged = merged / tl.where(mass == 0.0, 1.0, mass)[:, None]
    places = (token + m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + m % GROUP
    tl.store(output + (places * HEAD_DIM)[:, None] + d[None, :], merged, mask=mine[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def _merge_in_order(
    output,
    partials,
    sums,
    sinks,
    head,
    token,
    m,
    first_slot,
    parts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One result row, with the operations by which one program merges the segments of its keys."""
    d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    shown = d < HEAD_DIM
    origin = (first_slot.to(tl.int64) * KV_HEADS + head) * SLOT_ROWS + m
    best = float("-inf")
    mass = 0.0
    merged = tl.zeros((d.shape[0],), tl.float32)
    for part in range(parts):
        places = origin + part * (KV_HEADS * SLOT_ROWS)
        found = tl.load(partials + places * HEAD_DIM + d, mask=shown, other=0.0)
        best, mass, kept, added = fold(best, mass, tl.load(sums + places))
        merged = tl.fma(found, tl.zeros_like(merged) + added, merged * kept)
    if SINKS:
        mass += sink_weight(sinks, head, m, best, GROUP)
    place = (token + m // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + m % GROUP
    tl.store(output + place * HEAD_DIM + d, merged / mass, mask=shown)


@triton.jit
def _load_merge(merges, index, ROWS: tl.constexpr):
    merge = merges + index // ROWS * 4
    return tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)


@triton.jit
def merge_kernel(
    output,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    partials,  # float32 [slots, KV_HEADS, SLOT_ROWS, HEAD_DIM]
    sums,  # float32 [slots, KV_HEADS, SLOT_ROWS], base 2
    sinks,  # float32 [KV_HEADS * GROUP] if SINKS
    merges,  # int32 [merges, 4], see `work_list`
    counts,  # int32 [2]
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    ROWS: tl.constexpr = KV_HEADS * SLOT_ROWS
    work = tl.load(counts + 1) * ROWS
    # the list is older than the kernel before this one
    token, queries, slot, parts = _load_merge(merges, tl.program_id(0), ROWS)
    if PDL:
        gdc_wait()
    for index in range(tl.program_id(0), work, tl.num_programs(0)):
        if index != tl.program_id(0):
            token, queries, slot, parts = _load_merge(merges, index, ROWS)
        m, head = index % SLOT_ROWS, index // SLOT_ROWS % KV_HEADS
        if m // GROUP < queries:
            if IN_ORDER:
                _merge_in_order(
                    output, partials, sums, sinks, head, token, m, slot, parts, KV_HEADS, GROUP, HEAD_DIM, SLOT_ROWS, SINKS
                )  # fmt: skip
            else:
                merge_rows(
                    output, partials, sums, sinks, head, token, queries, slot, parts, KV_HEADS, GROUP, HEAD_DIM, SLOT_ROWS, 1,
                    PARTS, SINKS, m,
                )  # fmt: skip


_PARTS = 8
"""Parts of a result row that a warp loads at once: few, so that its registers leave room for other warps."""
_MANY_PARTS = 32
"""The same where one or two rows have all parts: there are few warps then, and fewer turns count."""


def merge_splits(
    work: WorkList,
    plan: DevicePlan,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    sms: int,
    *,
    pdl: bool,
    in_order: bool,
) -> None:
    """Writes the rows of `output` whose keys were split.

    A warp has a row: with more of them, parts would be added up through shared memory.
    """
    slot_rows = work.partials.shape[2]
    # parts of a row, if all rows are of one length
    expected = sms * work.config.programs // (plan.kv_heads * plan.batch.num_rows)
    most = sms * (16 if expected > 1 else 8)
    # of heads over 128, many parts take more registers than a thread has
    at_once = _MANY_PARTS if expected > 2 * _PARTS and plan.head_dim <= 128 else _PARTS
    merge_kernel[(min(len(work.merges) * plan.kv_heads * slot_rows, most),)](
        output=output,
        partials=work.partials,
        sums=work.sums,
        sinks=sinks,
        merges=work.merges,
        counts=work.counts,
        KV_HEADS=plan.kv_heads,
        GROUP=plan.num_heads // plan.kv_heads,
        HEAD_DIM=plan.head_dim,
        SLOT_ROWS=slot_rows,
        PARTS=at_once,
        IN_ORDER=in_order,
        SINKS=sinks is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
        enable_fp_fusion=not in_order,
    )
