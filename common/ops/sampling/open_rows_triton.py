"""Open rows settled by a program each."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops.sampling.board_layout import BOARD_WORDS, LINE_TOKENS, LINES, TAKEN_HEADER, TAKEN_WORDS
from common.ops.sampling.open_row_inputs import HEADER, MAX_VERIFIED, StepInputs


@triton.jit(do_not_specialize=["slot_stride", "start_stride"])
def settle_open_rows_kernel(
    words,
    sampled,
    tokens,
    feeds,
    positions,
    context_lens,
    draws,
    slots,  # [groups, tokens]
    block_ids,
    block_starts,  # [groups, rows]
    slot_stride,
    start_stride,
    proposals,  # [slots, PROPOSAL]
    num_proposed,
    board,  # [slots, BOARD_WORDS]
    taken,  # [slots, TAKEN_WORDS]
    NUM_GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    PROPOSAL: tl.constexpr,
    LINES: tl.constexpr,
    LINE_TOKENS: tl.constexpr,
    BOARD_WORDS: tl.constexpr,
    TAKEN_HEADER: tl.constexpr,
    TAKEN_WORDS: tl.constexpr,
):
    header = words + tl.program_id(0) * HEADER
    row = tl.load(header)
    first = tl.load(header + 1)
    length = tl.load(header + 2)
    sample = tl.load(header + 3)
    start = tl.load(header + 4)
    feed = tl.load(header + 5)
    num_listed = tl.load(header + 6)
    num_outcomes = tl.load(header + 7)
    lists = words + tl.load(header + 8)
    i = tl.arange(0, BLOCK)

    slot = tl.load(header + 9)
    is_looked_up = slot >= 0
    num_verified = tl.where(is_looked_up, tl.load(num_proposed + slot, mask=is_looked_up, other=0), num_listed)
    is_verified = i < num_verified
    listed = tl.load(lists + i, mask=i < num_listed, other=0)
    looked_up = tl.load(proposals + slot * PROPOSAL + i, mask=is_looked_up & is_verified, other=0)
    proposed = tl.where(is_looked_up, looked_up, listed)
    found = tl.load(sampled + feed + i, mask=is_verified, other=0)
    accepted = tl.min(tl.where(is_verified & (found != proposed), i, num_verified))
    token = tl.load(sampled + feed + accepted)

    outcomes = lists + num_listed
    is_outcome = i < num_outcomes
    wanted = tl.load(outcomes + i, mask=is_outcome, other=-1)
    behind = tl.load(outcomes + num_outcomes + i, mask=is_outcome, other=-1)
    came_true = tl.min(tl.where(is_outcome & (wanted == accepted) & (behind == token), i, BLOCK))
    proposal = outcomes + 3 * num_outcomes + came_true * (length - 1)
    is_there = (i < length - 1) & (came_true < BLOCK)
    tl.store(tokens + first + 1 + i, tl.load(proposal + i, mask=is_there, other=0).to(tl.int64), mask=i < length - 1)
    posted = tl.load(header + 10)
    if posted >= 0:
        keep = tl.load(header + 11)
        board += posted * BOARD_WORDS
        taken += posted * TAKEN_WORDS
        line = tl.arange(0, LINES)
        j = tl.arange(0, LINE_TOKENS)
        written = tl.load(board + 1 + line)
        lengths = tl.where(tl.load(board) == start, tl.minimum(tl.abs(written), LINE_TOKENS), 0)
        texts = tl.load(board + 1 + LINES + line[:, None] * LINE_TOKENS + j[None, :])
        came = tl.load(sampled + feed + j, mask=j <= accepted, other=0)
        differs = (j[None, :] <= accepted) & (texts != came[None, :])
        agrees = tl.max(differs.to(tl.int32), 1) == 0
        left = tl.where(agrees, tl.maximum(lengths - accepted - 1, 0), 0)
        best = tl.max(left * LINES + LINES - 1 - line)
        num_there = best // LINES
        chosen = LINES - 1 - best % LINES
        num_taken = tl.minimum(num_there, length - 1)
        behind = tl.load(
            board + 1 + LINES + chosen * LINE_TOKENS + accepted + 1 + i, mask=(i < num_there) & (i < LINE_TOKENS), other=0
        )
        tl.store(tokens + first + 1 + i, tl.where(i < num_taken, behind, 0).to(tl.int64), mask=i < length - 1)
        tl.store(proposals + keep * PROPOSAL + i, behind, mask=i < num_taken)
        tl.store(num_proposed + keep, num_taken)
        tl.store(taken, num_taken)
        tl.store(taken + 1, num_there)
        tl.store(taken + 2, tl.max((agrees & (lengths > accepted) & (written < 0)).to(tl.int32)))
        tl.store(taken + TAKEN_HEADER + i, behind, mask=i < num_there)
    tl.store(tokens + first, token)
    tl.store(feeds + first, tl.full((), -1, tl.int64))

    inside = i < length
    place = start + accepted + i
    tl.store(positions + first + i, place.to(tl.int64), mask=inside)
    tl.store(draws + sample + i, (place + 1).to(tl.int64), mask=inside)
    tl.store(context_lens + row, start + accepted + length)
    for group in tl.static_range(NUM_GROUPS):
        table = block_ids + tl.load(block_starts + group * start_stride + row)
        block = tl.load(table + place // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        slot = block * BLOCK_TOKENS + place % BLOCK_TOKENS
        tl.store(slots + group * slot_stride + first + i, slot, mask=inside)


def settle_open_rows_triton(words: torch.Tensor, num_rows: int, inputs: StepInputs) -> None:
    """As `settle_open_rows`."""
    settle_open_rows_kernel[(num_rows,)](
        words=words,
        sampled=inputs.sampled,
        tokens=inputs.tokens,
        feeds=inputs.feeds,
        positions=inputs.positions,
        context_lens=inputs.context_lens,
        draws=inputs.draws,
        slots=inputs.slots,
        block_ids=inputs.block_ids,
        block_starts=inputs.block_starts,
        slot_stride=inputs.slots.stride(0),
        start_stride=inputs.block_starts.stride(0),
        proposals=inputs.proposals,
        num_proposed=inputs.num_proposed,
        board=inputs.board,
        taken=inputs.taken,
        NUM_GROUPS=len(inputs.slots),
        BLOCK_TOKENS=inputs.block_tokens,
        HEADER=HEADER,
        BLOCK=MAX_VERIFIED,
        PROPOSAL=inputs.proposals.shape[1],
        LINES=LINES,
        LINE_TOKENS=LINE_TOKENS,
        BOARD_WORDS=BOARD_WORDS,
        TAKEN_HEADER=TAKEN_HEADER,
        TAKEN_WORDS=TAKEN_WORDS,
        num_warps=1,
    )
