"""`advance_rows` in Triton: a program advances `_BLOCK` rows."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from common.ops.sampling.open_row_inputs import StepInputs
from common.ops.sizes import cdiv

_BLOCK = 64
"""Rows of a program."""


@triton.jit(do_not_specialize=["num_rows", "slot_stride", "start_stride"])
def advance_rows_kernel(
    feeds,
    positions,
    context_lens,
    draws,
    slots,  # [groups, tokens]
    block_ids,
    block_starts,  # [groups, rows]
    num_rows,
    slot_stride,
    start_stride,
    NUM_GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = row < num_rows
    used = used & (tl.load(slots + row, mask=used, other=-1) >= 0)
    place = tl.load(positions + row, mask=used, other=0) + 1
    tl.store(feeds + row, row.to(tl.int64), mask=used)
    tl.store(positions + row, place, mask=used)
    tl.store(draws + row, place + 1, mask=used)
    tl.store(context_lens + row, (place + 1).to(tl.int32), mask=used)
    for group in tl.static_range(NUM_GROUPS):
        table = block_ids + tl.load(block_starts + group * start_stride + row, mask=used, other=0)
        block = tl.load(table + place // BLOCK_TOKENS, mask=used, other=0).to(tl.int64)
        tl.store(slots + group * slot_stride + row, block * BLOCK_TOKENS + place % BLOCK_TOKENS, mask=used)


def advance_rows_triton(inputs: StepInputs) -> None:
    """As `advance_rows`."""
    num_rows = len(inputs.context_lens)
    advance_rows_kernel[(cdiv(num_rows, _BLOCK),)](
        feeds=inputs.feeds,
        positions=inputs.positions,
        context_lens=inputs.context_lens,
        draws=inputs.draws,
        slots=inputs.slots,
        block_ids=inputs.block_ids,
        block_starts=inputs.block_starts,
        num_rows=num_rows,
        slot_stride=inputs.slots.stride(0),
        start_stride=inputs.block_starts.stride(0),
        NUM_GROUPS=len(inputs.slots),
        BLOCK_TOKENS=inputs.block_tokens,
        BLOCK=_BLOCK,
        num_warps=1,
    )
