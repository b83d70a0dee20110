"""`advance_with_given` in Triton: one program, since what it writes of block tables it also reads."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops.sampling.given_row_layout import CONSTANTS, GivenRows
from common.ops.sampling.open_row_inputs import StepInputs


@triton.jit(do_not_specialize=["capacity", "slot_stride", "start_stride"])
def advance_with_given_kernel(
    given,  # int64, see `GivenRows`
    tokens,
    feeds,
    positions,
    query_starts,
    context_lens,
    draws,
    slots,  # [groups, tokens]
    block_ids,
    block_starts,  # [groups, rows]
    capacity,
    slot_stride,
    start_stride,
    NUM_GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANGES: tl.constexpr,
    KINDS_AT: tl.constexpr,
    TOKENS_AT: tl.constexpr,
    FEEDS_AT: tl.constexpr,
    POSITIONS_AT: tl.constexpr,
    STARTS_AT: tl.constexpr,
    PLACE_SHIFT: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    IS_OVER: tl.constexpr,
):
    num_rows = tl.load(given)
    change = tl.arange(0, CHANGES)
    is_change = change < tl.load(given + 1)
    word = tl.load(given + STARTS_AT + NUM_GROUPS * ROWS + change, mask=is_change, other=0)
    tl.store(block_ids + (word >> PLACE_SHIFT), word.to(tl.int32), mask=is_change)  # its low half
    tl.debug_barrier()  # what follows reads them, in other threads

    row = tl.arange(0, ROWS)
    inside = row < capacity
    kind = tl.load(given + KINDS_AT + row, mask=inside, other=0)
    fresh = inside & (kind == IS_GIVEN)
    over = inside & (kind == IS_OVER)
    used = inside & (tl.load(slots + row, mask=inside, other=-1) >= 0)
    used = fresh | (used & (kind != IS_OVER))
    written = used | over
    place = tl.load(positions + row, mask=inside, other=0) + 1
    place = tl.where(fresh, tl.load(given + POSITIONS_AT + row, mask=fresh, other=0), place)
    token = tl.load(given + TOKENS_AT + row, mask=fresh, other=0)
    feed = tl.where(fresh, tl.load(given + FEEDS_AT + row, mask=fresh, other=0), row.to(tl.int64))
    tl.store(tokens + row, token, mask=fresh | over)
    tl.store(feeds + row, tl.where(over, -1, feed), mask=written)
    tl.store(positions + row, tl.where(over, 0, place), mask=written)
    tl.store(draws + row, place + 1, mask=used)
    tl.store(context_lens + row, tl.where(over, 0, place + 1).to(tl.int32), mask=written)
    tl.store(query_starts + 1 + row, tl.minimum(row + 1, num_rows).to(tl.int32), mask=inside)
    for group in tl.static_range(NUM_GROUPS):
        begin = tl.load(block_starts + group * start_stride + row, mask=used, other=0)
        begin = tl.where(fresh, tl.load(given + STARTS_AT + group * ROWS + row, mask=fresh, other=0).to(tl.int32), begin)
        block = tl.load(block_ids + begin + place // BLOCK_TOKENS, mask=used, other=0).to(tl.int64)
        slot = tl.where(over, -1, block * BLOCK_TOKENS + place % BLOCK_TOKENS)
        tl.store(block_starts + group * start_stride + row, tl.where(over, 0, begin), mask=fresh | over)
        tl.store(slots + group * slot_stride + row, slot, mask=written)


def advance_with_given_triton(inputs: StepInputs, given: GivenRows[torch.Tensor]) -> None:
    """As `advance_with_given`."""
    advance_with_given_kernel[(1,)](
        given=given.words,
        tokens=inputs.tokens,
        feeds=inputs.feeds,
        positions=inputs.positions,
        query_starts=inputs.query_starts,
        context_lens=inputs.context_lens,
        draws=inputs.draws,
        slots=inputs.slots,
        block_ids=inputs.block_ids,
        block_starts=inputs.block_starts,
        capacity=len(inputs.context_lens),
        slot_stride=inputs.slots.stride(0),
        start_stride=inputs.block_starts.stride(0),
        NUM_GROUPS=len(inputs.slots),
        BLOCK_TOKENS=inputs.block_tokens,
        **CONSTANTS,
        num_warps=4,
    )
